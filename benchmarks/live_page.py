"""Cost of a live page that is open at ten updates a second, to a replay: many short rounds with and without, in turns.

    python -m benchmarks.live_page [--rounds N] [--browser] [--json FILE]

Three figures, each a median with its interval of 95 %: the replay's time with a page over its time without, the same of
the processor's seconds of the whole process, and the share of a processor that the page's thread takes. Others who use
the machine move the first most and the last least: what the thread does not compute, it cannot cost, but for the
moments in which the interpreter goes from one thread to the other, and these are in the first.

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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import machine
from benchmarks.report import write_json
from unified_cache.live.page import LivePage
from unified_cache.replay.player import Player
from unified_cache.replay.settings import ReplaySettings
from unified_cache.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.memory import keys_only_storage

TRACE = Path(__file__).parent.parent / "traces" / "mooncake_conversation.jsonl.gz"
KEPT = Path(__file__).parent / "results" / "live_page.json"
REQUESTS = 700
ROUNDS = 41
UPDATE_S = 0.1
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
class RoundSeconds:
    """Seconds of one replay."""

    wall: float
    cpu: float
    """Of the whole process."""
    page_cpu: float
    """Of the page's thread; 0 without one."""


def replayed(requests: Sequence[TraceRequest], reading: Reading | None) -> RoundSeconds:
    """Replay in three tiers without bytes, with an open page or without one."""
    settings = ReplaySettings(
        device_pages=2_000, host_pages=20_000, storage="memory:", storage_bytes=400_000_000, with_bytes=False
    )
    plan = settings.plan
    with Player.open(plan, keys_only_storage(plan.storage_bytes, plan.objects())) as player:
        if reading is None:
            return served(player, requests)
        with LivePage.start(player.cache, every_s=UPDATE_S) as page, reading(page.url):
            return served(player, requests)


def served(player: Player, requests: Sequence[TraceRequest]) -> RoundSeconds:
    """Serve, and take the time of that alone."""
    gc.collect()
    wall_s, cpu_s, page_s = time.perf_counter(), time.process_time(), page_thread_s()
    for request in requests:
        player.serve(request)
    player.wait_all()
    return RoundSeconds(time.perf_counter() - wall_s, time.process_time() - cpu_s, page_thread_s() - page_s)


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
    rounds: Annotated[int, typer.Option(metavar="N", help="Pairs of replays.")] = ROUNDS,
    browser: Annotated[bool, typer.Option("--browser", help="Read the page with a browser on this machine.")] = False,
    json_file: Annotated[Path, typer.Option("--json", metavar="FILE", help="Figures are kept here.")] = KEPT,
) -> None:
    """Measure what an open page costs."""
    reading: Reading = read_by_browser if browser else read_by_curl
    requests = read_trace(TRACE, REQUESTS)
    replayed(requests, None)
    pairs: list[tuple[RoundSeconds, RoundSeconds]] = []
    for number in range(rounds):
        order = (None, reading) if number % 2 else (reading, None)
        by_page = {each is not None: replayed(requests, each) for each in order}
        pairs.append((by_page[False], by_page[True]))
    shown = {
        "time_ratio": interval([with_page.wall / without.wall for without, with_page in pairs]),
        "cpu_ratio": interval([with_page.cpu / without.cpu for without, with_page in pairs]),
        "page_share": interval([with_page.page_cpu / with_page.wall for _, with_page in pairs]),
    }
    for name, (median, low, high) in shown.items():
        print(f"{name.replace('_', ' ')}: median {median:.4f}, {low:.4f} to {high:.4f}", flush=True)
    found: dict[str, object] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine()),
        "updates_per_s": 1 / UPDATE_S,
        "requests": REQUESTS,
        "rounds": rounds,
        "reader": "browser" if browser else "curl",
        "time_ratio_wanted": RATIO_MAX,
    }
    for name, (median, low, high) in shown.items():
        found[name] = {"median": median, "low": low, "high": high}
    write_json(found, json_file)


if __name__ == "__main__":
    typer.run(main)
