"""The help of every command shows how to call it."""

from collections.abc import Iterator

import pytest
from typer import Typer

from unified_cache.cli.main import app, run


def command_names(commands: Typer, group: str = "") -> Iterator[str]:
    """Yield the name of every command, its group before it."""
    for command in commands.registered_commands:
        yield f"{group}{command.name}"
    for member in commands.registered_groups:
        assert member.typer_instance is not None
        yield from command_names(member.typer_instance, f"{group}{member.typer_instance.info.name} ")


def test_all_commands_are_found() -> None:
    names = set(command_names(app))
    assert {"replay", "storage clear", "cluster up", "token new", "ping", "node"} <= names
    assert len(names) > 20


@pytest.mark.parametrize("name", list(command_names(app)))
def test_the_help_of_a_command_ends_in_an_example_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"unified-cache {name} " in f"{shown.partition('Examples')[2]} "
