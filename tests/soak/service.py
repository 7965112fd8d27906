"""``python -m tests.soak.service [--seconds N] [--clients N]``: a service under load, over a store that has bad times.

One server process over a file store, seven tenants that use pages as engines do, and one that floods it with look-ups.
Prints its figures as JSON; exit status 1 where a bar was missed.
"""

import argparse
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock, Thread

import psutil

from tests.soak.faults import BadTimes
from tests.sources import ROOT
from tests.support.cluster import ServeProcess
from tests.support.running_service import read_metrics
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.errors import StorageError
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.core.settings.service import Role
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.tokens import add_token, new_token
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import blank_page, bytes_of

TENANTS = (*(f"engine-{number}" for number in range(7)), "flood")
SUCCESS_MIN = 0.99
RSS_GROWTH_MAX = 0.10
"""Largest accepted growth of the median from the third to the last fifth of the run, as a share of the former."""
FDS_GROWTH_MAX = 8
STEADY_S = 60.0
"""Time in which connections and allocator fill; in a shorter fifth, growth says nothing."""

JOIN_S = 60.0
PAUSE_S = 0.2
"""Mean time between two calls of an engine."""
RECONNECT_SHARE = 0.02
"""Share of calls after which a client connects again."""
PERIOD_S_MAX = 30.0
"""Longest period of the store's bad times, each a sixth of it."""
SAMPLES = 200
CONFIG = """\
storage = "tests.soak.faults:open_url:{times.period_s},{times.bad_s}:{directory}/kv"
storage_bytes = "256MiB"
[access]
tokens = "{directory}/tokens"
[audit]
file = "{directory}/audit"
[guard]
deadline_s = 0.5
"""
FAULTS = ("unified_cache_storage_errors_total", "unified_cache_service_flawed_pages_total")
"""Series that tell what came of the injected faults."""

PROMPTS, PAGES = 24, 16
PAYLOAD_BYTES = {"kv": 48 << 10, "swa": 16 << 10}
LAYOUT = ModelLayout(
    16,
    (
        Full((PoolSpec("kv", PAYLOAD_BYTES["kv"]),)),
        SlidingWindow(64, 16, (PoolSpec("swa", PAYLOAD_BYTES["swa"]),)),
    ),
)
MANIFEST = manifest_of(Identity("soak"), LAYOUT)


def page_of(tenant: str, label: Label) -> PageIO:
    """Make the page that a tenant has under a name that all tenants use."""
    seed = sha256(tenant.encode() + label.key + label.pool.encode()).digest()
    content = memoryview(bytearray(HEADER_BYTES) + seed * (PAYLOAD_BYTES[label.pool] // len(seed)))
    seal_buffers((content,), label)
    return PageIO(label, (content,))


class CallTally:
    """Counts of what all clients have called and what came of it. Thread-safe."""

    def __init__(self, times: BadTimes) -> None:
        self._times = times
        self._guard = Lock()
        self.counts: Counter[str] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one call; it is clean where no injected fault can have touched it."""
        began_s, failed = time.monotonic(), ""
        try:
            yield
        except StorageError as error:
            failed = str(error).partition(": ")[2]
        is_clean = not self._times.touches(began_s, time.monotonic())
        with self._guard:
            self.counts["calls"] += 1
            self.counts["clean"] += is_clean
            if failed and is_clean:
                self.counts["failed"] += 1
                self.counts[failed] += 1

    def page(self, *, is_right: bool) -> None:
        """Count a page that came; right are the bytes that were put under its name."""
        with self._guard:
            self.counts["pages"] += 1
            self.counts["wrong_pages"] += not is_right


class SoakClient:
    """A client that looks up, gets, puts and now and then removes pages of its tenant's prompts."""

    def __init__(self, url: str, tenant: str, tally: CallTally, rng: random.Random) -> None:
        self._url = url
        self._tenant = tenant
        self._tally = tally
        self._rng = rng

    def run_until_stopped(self, stopped: Event) -> None:
        """Call until it is told to stop, over one connection after another."""
        while not stopped.is_set():
            with closing(open_storage(self._url)) as storage:
                with self._tally.counted():
                    storage.register(MANIFEST, {})
                is_last = False
                while not is_last and not stopped.wait(self._rng.expovariate(1 / PAUSE_S)):
                    with self._tally.counted():
                        self._call(storage)
                    is_last = self._rng.random() < RECONNECT_SHARE

    def _call(self, storage: Store) -> None:
        if self._tenant == TENANTS[-1]:
            names = [Label(MANIFEST.identity, self._rng.randbytes(32), "kv") for _ in range(1000)]
            for _ in range(20):
                storage.exists(names)
            return
        prompt, start = self._rng.randrange(PROMPTS), self._rng.randrange(PAGES)
        pool, end = self._rng.choice(tuple(PAYLOAD_BYTES)), min(PAGES, start + self._rng.randrange(1, 6))
        keys = [sha256(b"%d %d" % (prompt, number)).digest() for number in range(start, end)]
        labels = [Label(MANIFEST.identity, key, pool) for key in keys]
        match self._rng.choices(("get", "put", "exists", "remove"), (40, 25, 23, 2))[0]:
            case "get":
                pages = [blank_page(label, HEADER_BYTES + PAYLOAD_BYTES[pool]) for label in labels]
                for page, answer in zip(pages, storage.get(pages), strict=True):
                    if answer is Answer.HIT:
                        self._tally.page(is_right=bytes_of(page) == bytes_of(page_of(self._tenant, page.label)))
            case "put":
                level = self._rng.choice(list(Level))
                storage.put([page_of(self._tenant, label) for label in labels], level)
            case "exists":
                storage.exists(labels)
            case _:
                storage.remove(labels)


@dataclass(frozen=True, slots=True)
class ServiceSoakReport:
    """The result of one run."""

    seconds: float
    counts: Mapping[str, int]
    rss_bytes: tuple[int, int]
    """Medians of the third fifth of the run and of the last."""
    fds_count: tuple[int, int]
    """The same of descriptors."""
    faults: Mapping[str, int]
    """Store metrics of the server: failed calls by kind, and pages that did not verify."""
    exit_status: int

    @property
    def missed(self) -> list[str]:
        """Name the bars that were missed."""
        is_steady = self.seconds / 5 >= STEADY_S
        bars = {
            "success": self.counts["failed"] <= (1 - SUCCESS_MIN) * self.counts["clean"],
            "wrong pages": self.counts["wrong_pages"] == 0,
            "memory": not is_steady or self.rss_bytes[1] <= (1 + RSS_GROWTH_MAX) * self.rss_bytes[0],
            "descriptors": not is_steady or self.fds_count[1] - self.fds_count[0] <= FDS_GROWTH_MAX,
            "exit status": self.exit_status == 0,
        }
        return [name for name, is_met in bars.items() if not is_met]

    def json(self) -> str:
        """Write it, a figure a line."""
        figures = {"rss_bytes": self.rss_bytes, "fds_count": self.fds_count, "faults": self.faults}
        return json.dumps({**self.counts, **figures, "missed": self.missed}, indent=1)


def soak(seconds: float, clients: int) -> ServiceSoakReport:
    """Run a server under the load of so many clients of all tenants for so long."""
    period_s = min(PERIOD_S_MAX, seconds / 2)
    times = BadTimes(period_s, period_s / 6)
    tally, stopped = CallTally(times), Event()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for tenant in TENANTS:
            token, entry = new_token(Caller(tenant, Role.WRITER), None, secrets.token_bytes)
            add_token(directory / "tokens", entry)
            (directory / tenant).write_text(token, encoding="utf-8")
        config = directory / "service.toml"
        config.write_text(CONFIG.format(times=times, directory=directory), encoding="utf-8")
        with ServeProcess("--config", str(config), variables={}, directory=ROOT) as server:
            threads: list[Thread] = []
            for number in range(clients):
                tenant = TENANTS[number % len(TENANTS)]
                url = f"grpc://{server.address}?timeout_s=15&token_file={directory / tenant}"
                client = SoakClient(url, tenant, tally, random.Random(number))
                threads.append(Thread(target=client.run_until_stopped, args=(stopped,)))
                threads[-1].start()
            rss_bytes, fds_count = _sampled(psutil.Process(server.child.pid), seconds)
            faults = _faults(server)
            stopped.set()
            for thread in threads:
                thread.join(JOIN_S)
            server.child.terminate()
            status, _ = server.ended()
    return ServiceSoakReport(seconds, tally.counts, rss_bytes, fds_count, faults, status)


def _sampled(server: psutil.Process, seconds: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sample a server for so long; return its memory and its descriptors, each early and late."""
    pause, memory, descriptors = Event(), list[int](), list[int]()
    for _ in range(SAMPLES):
        pause.wait(seconds / SAMPLES)
        with server.oneshot():
            memory.append(server.memory_info().rss)
            descriptors.append(server.num_fds())
    return _early_and_late(memory), _early_and_late(descriptors)


def _early_and_late(values: Sequence[int]) -> tuple[int, int]:
    fifth = len(values) // 5
    early, late = sorted(values[2 * fifth : 3 * fifth]), sorted(values[-fifth:])
    return early[len(early) // 2], late[len(late) // 2]


def _faults(server: ServeProcess) -> dict[str, int]:
    """Read from its metrics the faults of a server's store."""
    found = read_metrics(server.metrics_port).items()
    return {
        name.partition("unified_cache_")[2]: int(count) for name, count in found if name.startswith(FAULTS) and count
    }


def main(arguments: Sequence[str]) -> int:
    """Run, print, and say whether every bar was met."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.service", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64)
    given = parser.parse_args(arguments)
    report = soak(given.seconds, given.clients)
    sys.stdout.write(f"{report.json()}\n")
    return 1 if report.missed else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(main(sys.argv[1:]))
