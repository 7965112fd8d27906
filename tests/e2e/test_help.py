"""The help of every command shows how to call it, and waits for nothing that only commands need."""

import json
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.core import TyperGroup

from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.document_shell import DocumentShell
from unified_cache.cli.commands import DeferredCommand, command_line
from unified_cache.cli.main import app
from unified_cache.cli.text import copyable, example

if TYPE_CHECKING:
    from typer._click import Command

HEAVY = frozenset({"torch", "transformers", "grpc", "matplotlib", "numpy", "google", "pydantic", "asyncio"})
"""Packages that take longer to import than help may take; so do our own rooms but for the command line."""

MODULES_MAX = 420
"""Modules that help may import, those of Python and of the command line's libraries: 360 with Python 3.11."""

LOADED = """
import json, sys
from unified_cache.cli.main import run
status = run(json.loads(sys.argv[1]))
sys.stderr.write(json.dumps([status, sorted(sys.modules)]))
"""


@cache
def deferred_commands() -> tuple[DeferredCommand, ...]:
    found = tuple(command_line(app).commands.values())
    return tuple(each for each in found if isinstance(each, DeferredCommand))


@cache
def commands() -> "dict[str, Command]":
    """Return every command by its name, its group before it."""
    found: dict[str, Command] = {}
    for deferred in deferred_commands():
        command = deferred.load()
        if isinstance(command, TyperGroup):
            found |= {f"{deferred.name} {name}": each for name, each in command.commands.items()}
        else:
            found[deferred.name or ""] = command
    return found


def modules_loaded_by(*arguments: str) -> list[str]:
    """Run a command line in a process of its own; return the modules that it has imported."""
    command = [sys.executable, "-c", LOADED, json.dumps(arguments)]
    ended = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
    status, modules = json.loads(ended.stderr)
    assert status == 0
    return [str(each) for each in modules]


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_what_only_commands_need_is_not_imported_for_help(arguments: tuple[str, ...]) -> None:
    modules = modules_loaded_by(*arguments)
    assert HEAVY.isdisjoint(each.split(".")[0] for each in modules)
    ours = {each for each in modules if each.startswith("unified_cache.") and each.count(".") > 1}
    rest = {each for each in ours if not each.startswith("unified_cache.cli.")}
    assert rest == {"unified_cache.core.errors", "unified_cache.core.extras"}
    assert len(modules) <= MODULES_MAX


def test_a_command_does_not_import_the_others() -> None:
    modules = modules_loaded_by("layout", "--help")
    assert {"torch", "grpc", "google", "matplotlib"}.isdisjoint(each.split(".")[0] for each in modules)
    assert "unified_cache.cli.layout" in modules
    assert "unified_cache.cli.serve" not in modules


@pytest.mark.parametrize("deferred", deferred_commands(), ids=lambda each: each.name)
def test_a_command_says_of_itself_what_the_list_says_of_it(deferred: DeferredCommand) -> None:
    said = deferred.load().help or ""
    assert " ".join(said.split("\n\n")[0].split()) == deferred.help


def code_in(text: str) -> list[list[str]]:
    """Return the command lines of a text, each as words, with lines that end in a backslash joined."""
    joined = "\n".join(line.strip() for line in text.splitlines()).replace("\\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.startswith("unified-cache ")]


@pytest.mark.parametrize("name", [*commands(), "storage", "token"])
def test_the_help_of_a_command_ends_in_examples_of_it_that_a_shell_reads_when_they_are_copied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = ask(*name.split(), "--help").out
    assert "<bool>" not in shown, "a flag takes no value"
    examples = code_in(shown.partition("Examples")[2])
    command = commands().get(name) or next(each.load() for each in deferred_commands() if each.name == name)
    assert examples == code_in(command.epilog or "")
    assert any(" ".join(words[1:]).startswith(name) for words in examples)


NOT_TYPED = frozenset({"demo", "faithful"})
"""Commands whose first example needs a model, or a server of one; ``test_demo`` and ``test_faithful`` run them."""

TOKEN_ID = "1f0c5a9be2d34471"


def test_the_first_examples_of_all_commands_can_be_typed_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    last = ("storage clear", "drain")  # they end what the others need
    names = [*(name for name in commands() if name not in {*last, *NOT_TYPED}), *last]
    with DocumentShell(tmp_path, {}) as shell:
        (tmp_path / "prompt.txt").write_text("\n".join(map(str, range(4096))), encoding="utf-8")  # as its examples do
        for name in names:
            if name == "token revoke":
                shell.places[TOKEN_ID] = shell.call(["unified-cache", "token", "list", "--tokens", "tokens"]).split()[0]
            words, *_ = code_in(commands()[name].epilog or "")
            assert " ".join(words[1:]).startswith(name)
            shell.call(words)
        shell.wait_stopped()


def test_a_long_example_is_cut_by_backslashes_and_reads_the_same() -> None:
    line = "unified-cache replay trace.jsonl.gz --model deepseek-v4-flash --device-bytes 40GiB --host-bytes 500GiB"
    for text in (example(line), copyable(f"Words.\n\n    {line}\n")):
        assert code_in(text) == [shlex.split(line)]
        assert max(map(len, text.splitlines())) < 80
