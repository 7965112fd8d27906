"""The server of a live page: who is let in, what is sent, and how it ends."""

import http.client
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import pytest

from tests.sources import ROOT
from tests.support.clock import ManualClock
from unified_cache.core.errors import ConfigError
from unified_cache.core.slowest import PERIOD_S, SLOWEST_MAX, Slowest
from unified_cache.observe.live.authenticator import OpenAuthenticator, TokenAuthenticator, View
from unified_cache.observe.live.figures import (
    ComponentFigures,
    FoundPages,
    LinkFigures,
    LiveFigures,
    OperationFigures,
    SlowFigures,
    SourceKind,
    StoreFigures,
    TenantFigures,
)
from unified_cache.observe.live.server import HEADERS, STREAMS_MAX, LiveAddress, LiveServer
from unified_cache.observe.live.updates import POINTS_MAX, LiveUpdates

ANSWER_S = 20.0
TOKEN = "a token that is long enough"
TENANT = TenantFigures("acme", 1, 2, 3, 4)
FIGURES = LiveFigures(
    *(SourceKind.SERVICE, "server", 1.5, (), FoundPages(1, 0, 2, 0, 0, 3), (), 0, (), (), None, (TENANT,))
)
FULL = replace(
    FIGURES,
    components=(ComponentFigures("device", "full", 1_000, 100, 300, 100, 500, 12_345),),
    links=(LinkFigures("load", 5, 1 << 20),),
    operations=(OperationFigures("load", 4, 3, 2, 1),),
    slowest=(SlowFigures("load", "done", 5, 0.25, 1.0),),
    store=StoreFigures("open", 9, 8, 7, 6, (("get", "hit", 5),)),
)
"""Figures of every kind."""


OPENED: list[http.client.HTTPConnection | http.client.HTTPResponse] = []
"""Connections and answers of a test, closed after it."""


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


@dataclass(frozen=True, slots=True)
class StillSource:
    """Source of the same figures at every moment."""

    shown: LiveFigures = FIGURES

    def figures(self) -> LiveFigures:
        return self.shown


class MovingSource:
    """Source of other figures at every moment, under a ``name`` so long as to fill the buffers of a connection."""

    def __init__(self, name: str = "cache") -> None:
        self._name = name
        self._numbers = count()

    def figures(self) -> LiveFigures:
        return replace(FIGURES, name=self._name, operations_live=next(self._numbers))


class TenantBlindAuthenticator:
    """Authenticator that shows everybody everything but tenants."""

    needs_token = False

    def view(self, token: str | None) -> View | None:
        return View.FIGURES


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer.open(StillSource(), LiveAddress("127.0.0.1", 0, every_s=0.01), OpenAuthenticator()) as opened:
        yield opened


@pytest.fixture
def moving() -> Iterator[LiveServer]:
    with LiveServer.open(MovingSource(), LiveAddress("127.0.0.1", 0, every_s=0.01), OpenAuthenticator()) as opened:
        yield opened


@pytest.fixture
def locked() -> Iterator[LiveServer]:
    with LiveServer.open(StillSource(), LiveAddress("127.0.0.1", 0, every_s=0.01), TokenAuthenticator(TOKEN)) as opened:
        yield opened


def asked(server: LiveServer, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_S)
    OPENED.append(connection)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers=named)
    answer = connection.getresponse()
    OPENED.append(answer)
    return answer


def event(answer: http.client.HTTPResponse) -> tuple[str, object]:
    """Read one event of a stream."""
    kind = answer.readline().decode().removeprefix("event: ").strip()
    value = json.loads(answer.readline().decode().removeprefix("data: "))
    assert answer.readline() == b"\n"
    return kind, value


@pytest.mark.threat("reading the live page")
@pytest.mark.parametrize("path", ["/", "/live.css", "/live.js", "/live.svg", "/figures.json", "/nothing"])
def test_every_answer_forbids_what_the_page_does_not_need(server: LiveServer, path: str) -> None:
    answer = asked(server, path)
    assert answer.status == (404 if path == "/nothing" else 200)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_the_figures_are_json(server: LiveServer) -> None:
    found = json.loads(asked(server, "/figures.json").read())
    assert (found["format"], found["name"], found["found"]["host"]) == (4, "server", 2)
    assert found["tenants"] == [TENANT._asdict()]


def test_the_figures_have_the_fields_of_the_document() -> None:
    with LiveServer.open(StillSource(FULL), LiveAddress("127.0.0.1", 0), OpenAuthenticator()) as opened:
        found = json.loads(asked(opened, "/figures.json").read())
    parts = [value for value in found.values() if isinstance(value, dict)]
    parts += [each for value in found.values() if isinstance(value, list) for each in value if isinstance(each, dict)]
    fields = {*found, *(field for part in parts for field in part)}
    document = (ROOT / "docs" / "live.md").read_text(encoding="utf-8")
    assert [field for field in fields if f"`{field}`" not in document] == []


def test_events_bring_the_history_and_then_the_figures_again_and_again(moving: LiveServer) -> None:
    answer = asked(moving, "/events")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    kind, points = event(answer)
    assert (kind, isinstance(points, list)) == ("history", True)
    kinds = {event(answer)[0] for _ in range(5)}
    assert kinds == {"figures"}
    answer.close()


def test_figures_that_have_not_changed_are_sent_only_with_a_new_point_of_the_history(server: LiveServer) -> None:
    answer = asked(server, "/events")
    points = [value["point"] for _, value in (event(answer) for _ in range(4)) if isinstance(value, dict)]
    assert len(points) == 3
    assert None not in points[1:], "at a hundred updates a second, one of a hundred has a point"
    answer.close()


def test_a_reader_that_does_not_read_keeps_nobody_waiting() -> None:
    source = MovingSource("x" * 1_000_000)
    with LiveServer.open(source, LiveAddress("127.0.0.1", 0, every_s=0.01), OpenAuthenticator()) as opened:
        idle, reading = asked(opened, "/events"), asked(opened, "/events")
        numbers = [
            value["operations_live"] for _, value in (event(reading) for _ in range(8)) if isinstance(value, dict)
        ]
        assert numbers == sorted(set(numbers))
        assert len(numbers) == 7
        kind, _ = event(idle)
        assert kind == "history", "what it had not read is still there"
        idle.close()
        reading.close()


def test_who_may_not_know_tenants_is_not_shown_them() -> None:
    with LiveServer.open(StillSource(), LiveAddress("127.0.0.1", 0), TenantBlindAuthenticator()) as opened:
        text = asked(opened, "/figures.json").read()
        assert json.loads(text)["tenants"] is None
        assert b"acme" not in text


@pytest.mark.parametrize("path", ["/figures.json", "/events"])
@pytest.mark.parametrize("header", [None, "Bearer another token", f"Basic {TOKEN}", "Bearer \xff"])
def test_without_the_token_nothing_is_reported(locked: LiveServer, path: str, header: str | None) -> None:
    answer = asked(locked, path) if header is None else asked(locked, path, Authorization=header)
    assert (answer.status, b"acme" in answer.read()) == (401, False)


def test_the_token_opens_the_figures(locked: LiveServer) -> None:
    assert asked(locked, "/figures.json", Authorization=f"Bearer {TOKEN}").status == 200


@pytest.mark.parametrize("path", ["/", "/figures.json", "/events"])
def test_a_browser_is_asked_to_sign_in_with_the_token_as_its_password(locked: LiveServer, path: str) -> None:
    refused = asked(locked, path)
    assert refused.status == 401
    assert refused.headers["WWW-Authenticate"].startswith("Basic realm=")
    answers = {f":{TOKEN}": 200, f"anybody:{TOKEN}": 200, TOKEN: 401, f"{TOKEN}:another": 401}
    for shown, status in answers.items():
        assert asked(locked, path, Authorization=f"Basic {b64encode(shown.encode()).decode()}").status == status


@pytest.mark.threat("reading the live page")
def test_a_page_of_elsewhere_whose_name_leads_here_is_refused(server: LiveServer) -> None:
    assert asked(server, "/figures.json", Host="evil.example").status == 403
    assert asked(server, "/", Host="evil.example").status == 403
    for name in ("localhost", "127.0.0.1", "[::1]"):
        assert asked(server, "/figures.json", Host=f"{name}:{server.port}").status == 200


def test_one_page_more_than_there_is_room_for_is_told_to_come_back(server: LiveServer) -> None:
    streams = [asked(server, "/events") for _ in range(STREAMS_MAX)]
    for stream in streams:
        event(stream)
    answer = asked(server, "/events")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
    for stream in streams:
        stream.close()


def test_open_pages_do_not_keep_a_server_from_closing(server: LiveServer) -> None:
    answer = asked(server, "/events")
    event(answer)
    server.close()
    server.close()
    assert "unified-cache-live" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ConnectionRefusedError):
        asked(server, "/figures.json")


@pytest.mark.threat("reading the live page")
def test_other_machines_are_let_in_only_with_a_token() -> None:
    with pytest.raises(ConfigError, match=r"needs a token, found 0\.0\.0\.0 and none"):
        LiveServer.open(StillSource(), LiveAddress("0.0.0.0", 0), OpenAuthenticator())
    with pytest.raises(ConfigError, match="at least 16 characters, found 5"):
        TokenAuthenticator("short")
    with LiveServer.open(StillSource(), LiveAddress("0.0.0.0", 0), TokenAuthenticator(TOKEN)) as opened:
        answer = asked(opened, "/figures.json", Host="cache.example", Authorization=f"Bearer {TOKEN}")
        assert answer.status == 200


def test_an_address_that_is_taken_is_an_error_and_no_thread_stays(server: LiveServer) -> None:
    with pytest.raises(ConfigError, match="cannot be served at 127"):
        LiveServer.open(StillSource(), LiveAddress("127.0.0.1", server.port), OpenAuthenticator())
    assert [thread.name for thread in threading.enumerate()].count("unified-cache-live") == 1


@pytest.mark.parametrize(
    ("values", "match"), [((70_000, 1.0), "port"), ((0, 0.0), "every 0.01 to 60"), ((0, float("nan")), "every 0.01")]
)
def test_an_address_makes_sense_or_is_refused(values: tuple[int, float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LiveAddress("127.0.0.1", *values)


# Updates of a page say what their figures say, and make again only what has changed


SLOW = SlowFigures("load", "done", 5, 0.25, 1.0)
UPDATED = LiveFigures(
    *(SourceKind.CACHE, "cache", 1.5, (), FoundPages(1, 0, 2, 0, 0, 3), (), 0, (), (SLOW,), None, None)
)


class GivenSource:
    """Source of the figures that it was given last."""

    def __init__(self) -> None:
        self.given = UPDATED

    def figures(self) -> LiveFigures:
        return self.given


def test_an_update_says_what_its_figures_say() -> None:
    source = GivenSource()
    updates = LiveUpdates(source)
    for live, slowest in ((1, (SLOW,)), (2, ()), (3, (SLOW, SLOW))):
        source.given = replace(UPDATED, operations_live=live, slowest=slowest)
        assert updates.read()
        told = json.loads(updates.latest.text(View.EVERYTHING))
        assert told["operations_live"] == live
        assert told["slowest"] == [each.as_json() for each in slowest]
        assert told["found"]["missed"] == 3


def test_a_history_keeps_one_point_a_second_of_the_last_ten_minutes() -> None:
    clock = ManualClock()
    updates = LiveUpdates(GivenSource(), clock)
    made = [updates.latest.point]
    for tenth in range(1, 10_000):
        clock.now_s = tenth / 10
        updates.read()
        made.append(updates.latest.point)
    assert sum(point is not None for point in made) == 1_000
    assert len(updates.points) == POINTS_MAX
    assert updates.points[-1] == [999.0, *UPDATED.found]


def test_what_was_not_published_again_is_no_news() -> None:
    updates = LiveUpdates(GivenSource())
    assert updates.latest.point is not None
    assert not updates.read()


# The slowest of what ended in the last minutes


def test_the_slowest_of_this_period_and_the_one_before_are_kept() -> None:
    slowest: Slowest[str] = Slowest(0.0)
    numbers = count()
    for second in range(int(PERIOD_S)):
        seconds = float(second % 50)
        if slowest.is_slow(seconds, float(second)):
            slowest.record(seconds, f"{seconds} {next(numbers)}")
    assert [text.split()[0] for text in slowest.latest()] == ["49.0"] * 6 + ["48.0"] * 2
    assert slowest.is_slow(0.5, PERIOD_S + 1)
    slowest.record(0.5, "0.5 late")
    assert len(slowest.latest()) == SLOWEST_MAX, "those of the period before are still told of"
    assert slowest.is_slow(0.1, 4 * PERIOD_S)
    slowest.record(0.1, "0.1 later")
    assert slowest.latest() == ("0.1 later",)
