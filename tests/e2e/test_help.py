"""The help of every command shows how to call it, and waits for nothing that only commands need."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from typer.core import TyperGroup

from tests.sources import ROOT
from unified_cache.cli.commands import DeferredCommand, command_line
from unified_cache.cli.main import app, run

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


def command_names() -> Iterator[str]:
    """Yield the name of every command, its group before it."""
    for deferred in deferred_commands():
        command = deferred.load()
        if isinstance(command, TyperGroup):
            yield from (f"{deferred.name} {name}" for name in command.commands)
        else:
            yield deferred.name or ""


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


@pytest.mark.parametrize("name", list(command_names()))
def test_the_help_of_a_command_ends_in_an_example_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "<bool>" not in shown, "a flag takes no value"
    assert f"unified-cache {name} " in f"{shown.partition('Examples')[2]} "
