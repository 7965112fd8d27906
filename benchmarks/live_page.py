"""Cost of a live page that is open at ten updates a second, to a replay: two caches in turns, a few requests at a time.

    python -m benchmarks.live_page [--rounds N] [--browser] [--json FILE]

Both caches serve the same requests, one with an open page and one without, in turns of a few milliseconds, and the one
that goes first is another in every turn: what else the machine does meets both alike. In each round the caches and the
page are new. Five figures, each a median over the rounds with its interval of 95 %:

    time ratio   time of the serving with a page over that of the serving without
    cpu ratio    the same of the processor's seconds of the process
    owner ratio  the same without what the page's thread took: what the cache's owner does for the page
    page share   the share of a processor that the page's thread takes of the time of the serving with a page
    updates      updates of the page in a second of the serving with it

The page's thread works whenever it is due, whoever is served just then. In the first two ratios all its seconds are
moved to the serving with a page, as if each of them had kept the owner waiting: more than it costs, if anything. Each
cache is served half of the time, so whatever is done by the clock is done half as often, which is as often in a second
of the serving that it is counted for: the page is brought up to date and the owner publishes five times in a second of
both, and explains a hit every two. What the owner may explain at once, when somebody opens a page after a while, an
eighth of a second in all, is left out: it is spent once, and not for as long as the page is open.

The page is read by curl, which does nothing with it: a browser is on another machine as a rule, and on this one it
takes its share of the processors from whatever runs here. With ``--browser`` it is a browser on this machine.
"""

import gc
import math
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import machine
from benchmarks.report import write_json
from unified_cache import stats
from unified_cache.cache import UnifiedCache
from unified_cache.explain import short_hits
from unified_cache.explain.short_hits import ShortHit
from unified_cache.live.page import LivePage
from unified_cache.replay.player import Player
from unified_cache.replay.settings import ReplaySettings
from unified_cache.replay.trace import TraceRequest, read_trace
from unified_cache.stats import Stats
from unified_cache.storage_backends.memory import keys_only_storage

TRACE = Path(__file__).parent.parent / "traces" / "mooncake_conversation.jsonl.gz"
KEPT = Path(__file__).parent / "results" / "live_page.json"
REQUESTS = 1_500
TURN_REQUESTS = 8
"""Requests that one cache serves before it is the other's turn."""
ROUNDS = 21
UPDATE_S = 0.1
"""Between two updates, in the time of the serving with a page."""
SERVED_SHARE = 0.5
"""Part of the time that a cache is served."""
RATIO_MAX = 1.01
"""An open page may take one part in a hundred."""
READER_START_S = 0.5
BROWSER_START_S = 4.0
"""Time for a browser to start and to open the page; then it is as busy as it stays."""


@contextmanager
def read_by_curl(url: str) -> Iterator[None]:
    """Keep a reader of the page's events that does nothing with them."""
    command = ["curl", "--silent", "--no-buffer", "--output", "/dev/null", f"{url}events"]
    running = subprocess.Popen(command)
    try:
        time.sleep(READER_START_S)
        yield
        assert running.poll() is None, "the reader has read all the time"
    finally:
        running.kill()
        running.wait()


@contextmanager
def read_by_browser(url: str) -> Iterator[None]:
    """Keep a browser open on the page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "a browser is needed: chromium or google-chrome"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
        command = [browser, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", url]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(BROWSER_START_S)
            yield
        finally:
            running.kill()
            running.wait()


Reading = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time between two readings of the clocks, or a sum of such times."""

    wall: float
    cpu: float
    """Of the process."""
    page: float
    """Of the processor, by the page's thread."""

    @classmethod
    def read(cls) -> "Seconds":
        """Read the clocks."""
        return cls(time.perf_counter(), time.process_time(), page_thread_s())

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu, self.page + other.page)

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall - other.wall, self.cpu - other.cpu, self.page - other.page)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Cost of an open page in one round."""

    time_ratio: float
    cpu_ratio: float
    owner_ratio: float
    page_share: float
    updates: float
    """Updates in a second."""

    @classmethod
    def of(cls, without: Seconds, with_page: Seconds, updates_count: int) -> "RoundCost":
        """Compare the serving without a page with that with one; the page's thread ran beside both."""
        moved = without.page
        return cls(
            (with_page.wall + moved) / (without.wall - moved),
            (with_page.cpu + moved) / (without.cpu - moved),
            (with_page.cpu - with_page.page) / (without.cpu - moved),
            (with_page.page + moved) / with_page.wall,
            updates_count / with_page.wall,
        )


class CountedStats:
    """Publisher of the figures of a cache that counts how often they were new to the page; a ``StatsPublisher``."""

    def __init__(self, cache: UnifiedCache) -> None:
        self._cache = cache
        self._latest = cache.published_stats()
        self.count = 0

    def published_stats(self) -> Stats:
        """Return the figures published last."""
        latest = self._cache.published_stats()
        if latest is not self._latest:
            self._latest = latest
            self.count += 1
        return latest

    def recent_explanations(self) -> tuple[ShortHit, ...]:
        """Return the cache's."""
        return self._cache.recent_explanations()

    def look_at_explanations(self) -> None:
        """Have the cache explain."""
        self._cache.look_at_explanations()


def opened() -> Player:
    """Open a replay in three tiers without bytes."""
    plan = ReplaySettings(
        device_pages=2_000, host_pages=20_000, storage="memory:", storage_bytes=400_000_000, with_bytes=False
    ).plan
    return Player.open(plan, keys_only_storage(plan.storage_bytes, plan.objects()))


def measured(requests: Sequence[TraceRequest], reading: Reading) -> RoundCost:
    """Serve the requests twice, in turns: by a cache without a page, and by one whose page is open."""
    with opened() as plain, opened() as shown:
        published = CountedStats(shown.cache)
        with LivePage.start(published, every_s=UPDATE_S / SERVED_SHARE) as page, reading(page.url):
            return served(requests, plain, shown, published)


def slow_down_owners() -> None:
    """Have caches of this process publish and explain as often in their share of the time as they do in all of it."""
    stats.LOOKED_AT_EVERY_S = UPDATE_S / SERVED_SHARE
    short_hits.EXPLAINED_EVERY_S /= SERVED_SHARE
    short_hits.EXPLAINING_SHARE *= SERVED_SHARE
    short_hits.SAVED_S = 0.0


def served(requests: Sequence[TraceRequest], plain: Player, shown: Player, published: CountedStats) -> RoundCost:
    """Serve the requests in turns, a page of one of them being open."""
    spent = {plain: Seconds(0, 0, 0), shown: Seconds(0, 0, 0)}
    gc.collect()
    first_count = published.count
    turns = [requests[start : start + TURN_REQUESTS] for start in range(0, len(requests), TURN_REQUESTS)]
    for number, turn in enumerate(turns):
        for player in (plain, shown) if number % 2 else (shown, plain):
            before = Seconds.read()
            for request in turn:
                player.serve(request)
            spent[player] += Seconds.read() - before
    return RoundCost.of(spent[plain], spent[shown], published.count - first_count)


def page_thread_s() -> float:
    """Return the processor's seconds that threads of live pages have taken so far."""
    idents = [each.ident for each in threading.enumerate() if each.name == "unified-cache-live"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the bounds that the true one lies between with 95 %, whatever the distribution."""
    ordered = sorted(values)
    count = len(ordered)
    outside, rank = 0.0, 0
    while rank < count // 2 and 2 * (outside + math.comb(count, rank) / 2**count) <= 0.05:
        outside += math.comb(count, rank) / 2**count
        rank += 1
    rank = max(rank - 1, 0)
    return statistics.median(ordered), ordered[rank], ordered[count - 1 - rank]


def main(
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds, each with new caches.")] = ROUNDS,
    browser: Annotated[bool, typer.Option("--browser", help="Read the page with a browser on this machine.")] = False,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE", help="Figures are kept here.")] = KEPT,
) -> None:
    """Measure what an open page costs."""
    reading: Reading = read_by_browser if browser else read_by_curl
    requests = read_trace(TRACE, REQUESTS)
    slow_down_owners()
    measured(requests[: len(requests) // 4], reading)  # the first makes pages of memory, and imports
    costs = [measured(requests, reading) for _ in range(rounds)]
    shown = {each.name: interval([getattr(cost, each.name) for cost in costs]) for each in fields(RoundCost)}
    for name, (median, low, high) in shown.items():
        print(f"{name.replace('_', ' ')}: median {median:.4f}, {low:.4f} to {high:.4f}", flush=True)
    found: dict[str, object] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine()),
        "updates_per_s": 1 / UPDATE_S,
        "requests": REQUESTS,
        "turn_requests": TURN_REQUESTS,
        "rounds": rounds,
        "reader": "browser" if browser else "curl",
        "time_ratio_wanted": RATIO_MAX,
    }
    for name, (median, low, high) in shown.items():
        found[name] = {"median": median, "low": low, "high": high}
    write_json(found, json_file)


if __name__ == "__main__":
    typer.run(main)
