"""The documents hold: their examples run, their commands parse, their links lead somewhere."""

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.sources import ROOT, repository_files
from tests.support.documents import SHELLS, code_blocks

README = "README.md"
COMMAND = "unified-cache"
EXAMPLE_TIMEOUT_S = 240
"""For all examples of the README together, on a slow machine."""

SHELL_SEPARATORS = frozenset({"|", "||", "&&", ";", ";;", "&", ">", ">>", "<", "2>", "2>&1"})

FENCE = re.compile(r"^ {0,3}(```+|~~~+)\s*([\w+-]*)")
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")

FOREIGN_WORDS = re.compile(
    r"(/w[o]rk/|/f[a]rm/|\bs[u]bagent|\.l[i]brary|sh[a]red/(design|style|reference))",
)
"""Places and people outside the project. The brackets keep the pattern from finding itself."""

TEXT_SUFFIXES = frozenset(
    {"", ".cfg", ".ini", ".json", ".md", ".proto", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml"}
)


def fenced_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, language and text of every line in a fenced block; language "" outside, "text" for none."""
    closing, language = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if not closing and fence:
            closing, language = fence[1], fence[2] or "text"
        elif closing and line.strip().startswith(closing):
            closing, language = "", ""
        else:
            yield number, language, line


def example_program(text: str) -> str:
    """Join the python blocks, each line where it stands in the document, so that tracebacks name its lines."""
    lines = [""] * len(text.splitlines())
    for number, language, line in fenced_lines(text):
        if language == "python":
            lines[number - 1] = line
    return "\n".join(lines)


def shown_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every ``unified-cache`` command in a shell block, cut where a pipe begins."""
    for block in code_blocks(text):
        for line in block.text.replace("\\\n", " ").splitlines() if block.language in SHELLS else ():
            command = line.strip().removeprefix("$ ")
            if command.startswith(f"{COMMAND} "):
                words = shlex.split(command, comments=True)[1:]
                yield list(itertools.takewhile(lambda word: word not in SHELL_SEPARATORS, words))


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and target of every link that stays in the repository."""
    for number, language, line in fenced_lines(text):
        if language:
            continue
        for inline, reference in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            target = inline or reference
            if not ELSEWHERE.match(target):
                yield number, target


def anchors(text: str) -> set[str]:
    """Name the places that a ``#fragment`` may lead to, as GitHub names headings."""
    names: list[str] = []
    for _, language, line in fenced_lines(text):
        heading = HEADING.match(line)
        if heading and not language:
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            names.append(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return {*names, *(f"{name}-{count}" for name in names for count in range(1, names.count(name)))}


def dead_links(document: Path, text: str) -> Iterator[str]:
    for number, target in links(text):
        path, _, fragment = target.partition("#")
        place = document.parent / path if path else document
        if not place.exists():
            yield f"{document}:{number}: found a link to {target}; expected a file there"
        elif fragment and place.suffix == ".md" and fragment not in anchors(place.read_text(encoding="utf-8")):
            yield f"{document}:{number}: found a link to {target}; expected a heading of that name"


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def documents(*, under: tuple[str, ...] = ("",)) -> list[str]:
    return [path for path in repository_files() if path.endswith(".md") and path.startswith(under)]


def test_the_examples_of_the_readme_run_in_order_in_one_namespace(tmp_path: Path) -> None:
    program = tmp_path / "readme.py"
    program.write_text(example_program(read(README)), encoding="utf-8")
    scratch = tmp_path / "cwd"
    scratch.mkdir()
    command = [sys.executable, str(program)]
    result = subprocess.run(
        command, check=False, cwd=scratch, capture_output=True, text=True, timeout=EXAMPLE_TIMEOUT_S
    )
    assert result.returncode == 0, f"{README}, same line numbers:\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("path", documents(under=(README, "docs/")))
def test_the_commands_in_a_document_parse(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in shown_commands(read(path)):
        # --help is answered after every option was recognised and before any is acted upon.
        status = run_command([*arguments, "--help"], monkeypatch)
        assert status == 0, f"{path}: {COMMAND} {shlex.join(arguments)}\n{capsys.readouterr().err}"


def run_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the installed command in this process; return its exit status."""
    (command,) = entry_points(group="console_scripts", name=COMMAND)
    monkeypatch.setattr(sys, "argv", [COMMAND, *arguments])
    try:
        return command.load()() or 0
    except SystemExit as ended:
        return ended.code or 0


def test_links_inside_the_repository_lead_somewhere() -> None:
    findings = [finding for path in documents() for finding in dead_links(ROOT / path, read(path))]
    assert not findings, "\n" + "\n".join(findings)


def test_the_project_speaks_of_itself_alone() -> None:
    findings = [
        f"{path}:{number}: found {line.strip()[:90]!r}; expected nothing from outside the project"
        for path in repository_files()
        if Path(path).suffix in TEXT_SUFFIXES
        for number, line in enumerate(read(path).splitlines(), 1)
        if FOREIGN_WORDS.search(line)
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_what_lies_outside_the_project_is_recognised() -> None:
    for word in ("/wo" + "rk/main", "a sub" + "agent", ".lib" + "rary", "shar" + "ed/style.md"):
        assert FOREIGN_WORDS.search(word)


DOCUMENT = """\
# Title: one, two

```python
x = 1
```

```console
$ unified-cache replay trace.jsonl --host-pages 2 \\
    --json | tail -1  # the last line
$ make run
```

```python
assert x == 1
```

See [that](#title-one-two), [this](gone.md), `[not this](no.md)`, [there](https://example.org/a) and [hm](#no-such).
"""


def test_python_blocks_keep_their_line_numbers() -> None:
    assert example_program(DOCUMENT).splitlines()[:4] == ["", "", "", "x = 1"]
    assert "assert x == 1" in example_program(DOCUMENT)


def test_a_command_is_joined_over_lines_and_cut_at_a_pipe() -> None:
    assert list(shown_commands(DOCUMENT)) == [["replay", "trace.jsonl", "--host-pages", "2", "--json"]]


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(DOCUMENT, encoding="utf-8")
    assert [finding.split("found ")[1] for finding in dead_links(document, DOCUMENT)] == [
        "a link to gone.md; expected a file there",
        "a link to #no-such; expected a heading of that name",
    ]
