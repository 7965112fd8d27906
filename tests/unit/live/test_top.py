"""``unified-cache top``: the live page in a terminal, and its figures for programs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from unified_cache.cli.top import TOKEN_VARIABLE
from unified_cache.explain.short_hits import ShortHit
from unified_cache.live.door import OpenDoor, TokenDoor
from unified_cache.live.figures import (
    FoundPages,
    LaneFigures,
    LaneUnit,
    LegFigures,
    LiveFigures,
    OperationFigures,
    SlowFigures,
    SourceKind,
    StoreFigures,
    TenantFigures,
)
from unified_cache.live.server import LiveAddress, LiveServer
from unified_cache.recording.note import FoundByTier

DOCUMENT = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
TOKEN = "a token that is long enough"
FULL = LiveFigures(
    kind=SourceKind.CACHE,
    name="engine \x1b[31m7",
    counted_at_s=1.5,
    lanes=(
        LaneFigures("device", "full", LaneUnit.PAGES, 1_000, 100, 300, 100, 500, 12_345),
        LaneFigures("host", "all pools", LaneUnit.BYTES, 1 << 30, 0, 1 << 29, 0, 1 << 29, 0),
    ),
    found=FoundPages(7, 1, 2, 1, 0, 3),
    legs=(LegFigures("load", 5, 1 << 20),),
    operations_live=3,
    operations=(OperationFigures("load", 4, 3, 2, 1),),
    slowest=(SlowFigures("load", "done", 5, 0.25, 1.0),),
    store=StoreFigures("open", 9, 8, 7, 6, (("get", "hit", 5),)),
    tenants=(TenantFigures("acme", 1, 2, 3, 4 << 20),),
    explanations=(
        ShortHit(
            2.5, 96, 16, FoundByTier(40, 12, 5), ("full",), "full [57, 96): evicted \x1b[31m", "device: 57 pages\n  |=."
        ),
    ),
)


class FullSource:
    """Source of figures of every kind."""

    def look(self) -> None:
        pass

    def figures(self) -> LiveFigures:
        return FULL


@pytest.fixture
def url() -> Iterator[str]:
    with LiveServer.open(FullSource(), LiveAddress("127.0.0.1", 0), OpenDoor()) as server:
        yield server.url


def test_once_shows_everything_that_the_page_does(url: str) -> None:
    said = ask("top", url, "--once")
    assert said.status == 0, said.err
    for text in (
        "12,345",
        "50.0%",
        "512.00 MiB",
        "250.0 ms",
        "breaker open",
        "acme",
        "full [57, 96): evicted",
        "device: 57 pages",
        "3 under way",
    ):
        assert text in said.out
    assert "\x1b[31m7" not in said.out, "a name commands no terminal"
    (row,) = (line for line in said.out.splitlines() if "evicted" in line and "full" in line)
    assert row.split()[1:6] == ["96", "40", "12", "5", "39"]


def test_the_json_has_the_fields_of_the_document(url: str, tmp_path: Path) -> None:
    file = tmp_path / "top.json"
    said = ask("top", url, "--once", "--json", "--json-file", file)
    found = json.loads(said.out)
    assert json.loads(file.read_text(encoding="utf-8")) == found
    assert (found["command"], found["format"]) == ("top", 1)
    (row,) = (line for line in DOCUMENT.splitlines() if line.startswith("| `top`"))
    parts = [value for value in found.values() if isinstance(value, dict)]
    parts += [each for value in found.values() if isinstance(value, list) for each in value if isinstance(each, dict)]
    fields = {*found, *(field for part in parts for field in part)} - {"command", "format"}
    assert [field for field in fields if f"`{field}`" not in row] == []


def test_a_page_that_needs_a_token_says_so_and_takes_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer.open(FullSource(), LiveAddress("127.0.0.1", 0), TokenDoor(TOKEN)) as server:
        said = ask("top", server.url, "--once")
        assert (said.status, f"a valid token in {TOKEN_VARIABLE}, found none" in said.err) == (1, True)
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        assert ask("top", server.url, "--once").status == 0


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("ftp://127.0.0.1", "--once"), 2, "found 'ftp://127.0.0.1'"),
        (("http://127.0.0.1:1", "--once"), 1, "does not answer"),
        (("http://127.0.0.1:1", "--json"), 2, "add --once"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(arguments: tuple[str, ...], status: int, reason: str) -> None:
    said = ask("top", *arguments)
    assert (said.status, said.err.count("\n")) == (status, 1)
    assert reason in said.err


def test_top_without_once_needs_a_terminal(url: str) -> None:
    said = ask("top", url)
    assert (said.status, "needs a terminal" in said.err) == (2, True)
