"""JSON of the commands: versioned, documented, on standard output alone or in a file beside the tables."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill
from tests.support.running_service import running
from unified_cache.core.page import Prompt
from unified_cache.storage_backends.url import open_storage

DOCUMENT = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
TOKENS = list(range(PAGES * PAGE_SIZE))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """Yield a service, a store, and a directory with tokens and prompts."""
    path = tmp_path_factory.mktemp("json")
    (path / "prompts").write_text(json.dumps(TOKENS), encoding="utf-8")
    with running(storage=f"file:{path / 'own'}", access={"local_role": "admin"}) as server:
        url = f"grpc://{server.address}"
        for target in (url, f"file:{path / 'kept'}"):
            fill(open_storage(target), LAYOUTS["full"], [Prompt.of(TOKENS, PAGE_SIZE, whole=True)])
        made = ask("token", "new", "--tokens", path / "tokens", "--tenant", "acme")
        assert made.status == 0
        yield url, f"file:{path / 'kept'}", path


COMMANDS: dict[str, tuple[str, ...]] = {
    "layout": ("gpt-oss-20b",),
    "ping": ("URL",),
    "explain": ("--storage", "STORE", "--tokens", "DIR/prompts"),
    "storage stat": ("STORE",),
    "storage verify": ("STORE",),
    "storage scrub": ("STORE",),
    "storage gc": ("STORE",),
    "backup": ("STORE", "file:DIR/copy"),
    "prefetch": ("STORE", "--into", "file:DIR/warm", "--tokens", "DIR/prompts"),
    "conformance": ("memory:",),
    "token list": ("--tokens", "DIR/tokens"),
    "storage clear": ("file:DIR/copy", "--all", "--yes"),
}
"""Arguments of commands; those that remove come last."""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_fields_of_a_command_are_those_of_the_document(command: str, place: tuple[str, str, Path]) -> None:
    url, store, path = place
    arguments = [
        each.replace("URL", url).replace("STORE", store).replace("DIR", str(path)) for each in COMMANDS[command]
    ]
    kept = path / "kept.json"
    said = ask(*command.split(), *arguments, "--json", "--json-file", kept)
    assert said.status == 0, said.err
    found = json.loads(said.out)
    assert json.loads(kept.read_bytes()) == found, "the file has what is printed"
    assert list(found)[:2] == ["command", "format"]
    assert (found["command"], found["format"]) == (command, 1)
    (row,) = (line for line in DOCUMENT.splitlines() if line.startswith("|") and f"`{command}`" in line.split("|")[1])
    fields = {
        *found,
        *(field for value in found.values() if isinstance(value, list) for each in value for field in each),
    }
    assert "**1**" in DOCUMENT
    if command == "prefetch":
        row += next(line for line in DOCUMENT.splitlines() if line.startswith("| `backup`"))
    assert [field for field in fields - {"command", "format"} if f"`{field}`" not in row] == []


def test_a_file_stands_beside_the_tables(place: tuple[str, str, Path]) -> None:
    _, store, path = place
    said = ask("storage", "stat", store, "--json-file", path / "stat.json")
    assert said.status == 0
    assert said.out.startswith(store)
    assert json.loads((path / "stat.json").read_bytes())["store"] == store


def test_a_file_that_cannot_be_written_is_one_line(place: tuple[str, str, Path]) -> None:
    _, store, path = place
    said = ask("storage", "stat", store, "--json-file", path / "none" / "stat.json")
    assert (said.status, "No such file or directory" in said.error) == (1, True)
