"""The documents hold: every block is run, their commands parse, their links lead somewhere."""

import itertools
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.sources import ROOT, repository_files
from tests.support.documents import BLOCK, code_blocks, command_lines, documents, program_of, shell_commands

COMMAND = "unified-cache"
HERE = "tests/e2e/test_documents.py"
RUNNERS: Mapping[str, str] = {
    **dict.fromkeys(("certificates", "cluster", "demo", "embedding", "events", "first-service"), HERE),
    **dict.fromkeys(("live", "offline", "operate", "service", "traces", "two-engines", "leaders", "drain"), HERE),
    "bucket": "tests/e2e/test_object_commands.py",
    "deploy": "tests/e2e/test_deploy_walk.py",
    "example": "tests/e2e/test_examples.py",
    "faithful": "tests/e2e/test_faithful.py",
    "settings": "tests/unit/settings/test_description.py",
    "sglang": "tests/engines/sglang/check_document.py",
    "vllm": "tests/engines/vllm/check_serve.py",
}
"""By the name that a block gives: the file that runs it."""

SHELL_SEPARATORS = frozenset({"|", "||", "&&", ";", ";;", "&", ">", ">>", "<", "2>", "2>&1"})

FENCED = re.compile(r"^ *(```+|~~~+).*?^ *\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")

FOREIGN_WORDS = re.compile(
    r"(/w[o]rk/|/f[a]rm/|\bs[u]bagent|\.l[i]brary|sh[a]red/(design|style|reference))",
)
"""Places and people outside the project. The brackets keep the pattern from finding itself."""

TEXT_SUFFIXES = frozenset(
    {"", ".cfg", ".ini", ".json", ".md", ".proto", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml"}
)


def shown_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every ``unified-cache`` command in a shell block, cut where a pipe begins."""
    for program, *words in shell_commands(text):
        if program == COMMAND:
            yield list(itertools.takewhile(lambda word: word not in SHELL_SEPARATORS, words))


def prose(text: str) -> str:
    """Return a document with empty lines for its fenced blocks."""
    return FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and target of every link that stays in the repository."""
    for number, line in enumerate(prose(text).splitlines(), 1):
        for inline, reference in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            target = inline or reference
            if not ELSEWHERE.match(target):
                yield number, target


def anchors(text: str) -> set[str]:
    """Name the places that a ``#fragment`` may lead to, as GitHub names headings."""
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found).lower() for found in HEADING.findall(prose(text))]
    names = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
    return {*names, *(f"{name}-{count}" for name in names for count in range(1, names.count(name)))}


def dead_links(document: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and target of every link that leads to no file, or to no heading of one."""
    for number, target in links(text):
        path, _, fragment = target.partition("#")
        place = document.parent / path if path else document
        is_in_document = place.exists() and fragment and place.suffix == ".md"
        if not place.exists() or (is_in_document and fragment not in anchors(read(place))):
            yield number, target


def read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize("path", documents())
def test_every_block_is_run_by_somebody_or_says_why_not(path: str) -> None:
    text = read(path)
    fences = re.findall(r"^ *```(?!mermaid)\w.*$", text, re.MULTILINE)
    blocks = [block for block in code_blocks(text) if block.language != "mermaid"]
    assert len(blocks) == len(fences), f'expected run=NAME or skip="REASON" behind a language, found {fences}'
    for block in blocks:
        assert block.runner in {*RUNNERS, ""}, block
        assert block.runner or block.skipped_because or block.is_shell or block.language == "python", block


@pytest.mark.parametrize(("runner", "path"), RUNNERS.items())
def test_who_runs_a_block_is_there_and_has_one_to_run(runner: str, path: str) -> None:
    assert (ROOT / path).exists()
    assert path != HERE or f'blocks_run_by("{runner}"' in read(path)
    assert any(block.runner == runner for each in documents() for block in code_blocks(read(each)))


@pytest.mark.parametrize("path", documents())
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
    paths = [path for path in repository_files() if path.endswith(".md")]
    dead = {path: found for path in paths if (found := list(dead_links(ROOT / path, read(path))))}
    assert not dead, f"expected files and headings, found links to none, by line: {dead}"


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
    assert program_of(DOCUMENT).splitlines()[:4] == ["", "", "", "x = 1"]
    assert program_of(DOCUMENT).splitlines()[13] == "assert x == 1"


def test_a_command_is_joined_over_lines_and_cut_at_a_pipe() -> None:
    assert list(shown_commands(DOCUMENT)) == [["replay", "trace.jsonl", "--host-pages", "2", "--json"]]


def test_a_command_goes_on_inside_quotes_and_what_a_command_prints_is_none() -> None:
    (block,) = code_blocks("```console run=a\n$ two \\\n    three '{\n  \"four\": 5}'\nfive\n$ six  # seven\n```\n")
    assert list(command_lines(block)) == [["two", "three", '{\n  "four": 5}'], ["six"]]
    assert block.runner == "a"


def test_a_block_says_why_it_is_not_run() -> None:
    assert [block.skipped_because for block in code_blocks('```sh skip="needs a GPU"\nls\n```\n')] == ["needs a GPU"]
    assert not BLOCK.search("```sh ran=a\nls\n```\n")


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(DOCUMENT, encoding="utf-8")
    assert list(dead_links(document, DOCUMENT)) == [(17, "gone.md"), (17, "#no-such")]
