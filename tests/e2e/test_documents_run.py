"""The guides' commands run as they stand, in order, in one directory with a store that an engine has filled."""

import re
from pathlib import Path
from shutil import copytree

import pytest

from tests.e2e.test_operating_documents import ran
from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.documents import CodeBlock, code_blocks, command_lines

NAMES = ("planning", "sizing", "from-another-cache", "troubleshooting", "retention", "policies", "is-it-working")
GUIDES = tuple(name for name in NAMES if (ROOT / "docs" / f"{name}.md").exists())
PLACES = {r"\bTRACE\b": "traces/mooncake_conversation.jsonl.gz --limit 40", r"--limit \d+": "--limit 40"}
"""What is the reader's to fill in, and how much of a trace is read."""


@pytest.fixture(scope="module")
def filled_workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the traces and a store that a replay has filled; each guide has a copy."""
    directory = tmp_path_factory.mktemp("workshop")
    (directory / "traces").symlink_to(ROOT / "traces")
    filled = (
        "unified-cache replay traces/mooncake_conversation.jsonl.gz --limit 20 --page-bytes 512 --storage file:kv-store"
    )
    ran(directory, filled)
    return directory


@pytest.fixture
def workshop(filled_workshop: Path, tmp_path: Path) -> Path:
    return copytree(filled_workshop, tmp_path, symlinks=True, dirs_exist_ok=True)


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run(guide: str, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    text = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
    scripts = [block.text for block in code_blocks(text) if block.language == "console"]
    assert scripts, "a guide without commands guides nobody"
    for script in scripts:
        typed = re.sub(r"^\$ ", "", script, flags=re.MULTILINE)
        for place, here in PLACES.items():
            typed = re.sub(place, here, typed)
        commands = list(command_lines(CodeBlock("console", typed)))
        if all(words[0] == "unified-cache" for words in commands) and not re.search(r"[|<>;&]", typed):
            for _, *arguments in commands:
                result = ask(*arguments)
                assert result.status == 0, f"{arguments}\n{result.out}{result.err}"
        else:
            ran(workshop, f"set -eu\n{typed}")


def test_the_programs_of_the_page_on_whether_it_works_say_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "is-it-working.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    said: list[str] = []
    for block in code_blocks(text):
        if block.language == "python":
            exec(compile(block.text, "docs/is-it-working.md", "exec"), names)
            said.append(capsys.readouterr().out)
    assert "3 pages of 8 can be resumed (16 tokens each; write policy on_call)" in said[0]
    assert "[0, 3) held by a faster tier, and not here; [3, 8) in no tier" in said[0]
    assert "memory has 3 pages of the same tokens under another cache_salt" in said[1]
