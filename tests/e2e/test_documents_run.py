"""The guides' commands run as they stand, in order, in one directory with a store that an engine has filled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

TIMEOUT_S = 240
BLOCK = re.compile(r"^( *)```console\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
GUIDES = ("sizing", "migrating", "troubleshooting")


def commands_of(text: str) -> list[str]:
    """Return the scripts of all console blocks, without the blocks' indentation."""
    return [re.sub(rf"^{indentation}", "", script, flags=re.MULTILINE) for indentation, script in BLOCK.findall(text)]


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """A directory with the traces, the command, and a store that a replay has filled."""
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    programs = tmp_path / "bin"
    programs.mkdir()
    command = programs / "unified-cache"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from unified_cache.cli.main import main; main()" "$@"\n')
    command.chmod(0o755)
    filled = (
        "unified-cache replay traces/mooncake_conversation.jsonl.gz --limit 20 --page-bytes 512 --storage file:kv-store"
    )
    run(filled, tmp_path)
    return tmp_path


def run(script: str, directory: Path) -> str:
    search_path = os.pathsep.join((str(directory / "bin"), os.environ["PATH"]))
    ran = subprocess.run(
        ["sh", "-euc", script],
        check=False,
        cwd=directory,
        env={**os.environ, "PATH": search_path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, f"{script}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run(guide: str, workshop: Path) -> None:
    scripts = commands_of((ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8"))
    assert scripts, "a guide without commands guides nobody"
    for script in scripts:
        run(script, workshop)
