"""Time of a replay with a live page open, at ten updates a second, over its time without; and what its thread takes.

python -m benchmarks.live_page [ROUNDS] [browser]

The page is read by curl, which does nothing with it: a browser is on another machine as a rule, and on this one it
takes its share of the processors from whatever runs here. With ``browser`` it is a browser on this machine.
"""

import gc
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from unified_cache.live.page import LivePage
from unified_cache.replay.player import Player
from unified_cache.replay.settings import ReplaySettings
from unified_cache.replay.trace import TraceRequest, read_trace
from unified_cache.storage_backends.memory import keys_only_storage

TRACE = Path(__file__).parent.parent / "traces" / "mooncake_conversation.jsonl.gz"
REQUESTS = 3_000
ROUNDS = 6
UPDATE_S = 0.1
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


def replayed_s(requests: Sequence[TraceRequest], reading: Reading | None) -> tuple[float, float]:
    """Replay in three tiers without bytes; return what ``served_s`` does."""
    settings = ReplaySettings(
        device_pages=2_000, host_pages=20_000, storage="memory:", storage_bytes=400_000_000, with_bytes=False
    )
    plan = settings.plan
    with Player.open(plan, keys_only_storage(plan.storage_bytes, plan.objects())) as player:
        if reading is None:
            return served_s(player, requests)
        with LivePage.start(player.cache, every_s=UPDATE_S) as page, reading(page.url):
            return served_s(player, requests)


def served_s(player: Player, requests: Sequence[TraceRequest]) -> tuple[float, float]:
    """Serve; return the seconds that it took, and the processor's seconds of the page's thread, if there is one."""
    gc.collect()
    started_s, page_s = time.perf_counter(), page_thread_s()
    for request in requests:
        player.serve(request)
    player.wait_all()
    return time.perf_counter() - started_s, page_thread_s() - page_s


def page_thread_s() -> float:
    """Return the processor's seconds that threads of live pages have taken so far."""
    idents = [each.ident for each in threading.enumerate() if each.name == "unified-cache-live"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


def main(rounds: int, reading: Reading) -> None:
    """Alternate runs with and without a page, and print the ratios of neighbours."""
    requests = read_trace(TRACE, REQUESTS)
    replayed_s(requests[:500], None)
    wall: list[float] = []
    page: list[float] = []
    for number in range(rounds):
        order = (None, reading) if number % 2 else (reading, None)
        times = {each is not None: replayed_s(requests, each) for each in order}
        wall.append(times[True][0] / times[False][0])
        page.append(times[True][1] / times[True][0])
        print(f"round {number}: without {times[False][0]:.3f} s, with {times[True][0]:.3f} s", flush=True)
    for name, ratios in (("time with a page over without", wall), ("share of the page's thread in it", page)):
        print(f"{name}: median {statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    numbers = [int(word) for word in words if word.isdecimal()]
    main(numbers[0] if numbers else ROUNDS, read_by_browser if "browser" in words else read_by_curl)
