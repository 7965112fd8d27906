"""``python -m tests.soak.service [--seconds N] [--clients N]``: a service under a mixed load that goes wrong.

One server process over a file store that has bad times, seven tenants of engines, and one that misbehaves, an eighth of
all clients each. From a tenth to four tenths of the run strangers and the misbehaving tenant flood it with calls of
headers alone, trickled puts and idle connections, more than the descriptors that the server may have by default.
Prints its figures as JSON; exit status 1 where a bar was missed.
"""

import argparse
import json
import os
import random
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from urllib.request import urlopen

import psutil

from tests.soak.clients import ClientConnection, RogueClient, SoakClient
from tests.soak.faults import BadTimes
from tests.soak.slow_flood import FloodFigures, FloodSize, SlowFlood
from tests.soak.tally import CallTally
from tests.sources import ROOT
from tests.support.cluster import ServeProcess
from unified_cache.core.settings.service import Role
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.tokens import add_token, new_token

TENANTS = (*(f"engine-{number}" for number in range(7)), "rogue")
AVAILABILITY_MIN = 0.999
SUCCESS_MIN = 0.99
RSS_GROWTH_MAX = 0.10
"""Largest accepted growth of the median from the third to the last fifth of the run, as a share of the former."""
FDS_GROWTH_MAX = 8
FLOODED_P99_MAX = 2.0
"""Largest accepted p99 during the slow flood, as a multiple of that without it."""
FLOOD = FloodSize(half_open=500, trickled=16, idle=2_000)
STEADY_S = 60.0
"""Time in which connections and allocator fill; in a shorter fifth, growth says nothing."""

JOIN_S = 60.0
FDS_MAX = 1024
"""Usual limit of descriptors, for whatever machine this runs on."""
CONFIG = """\
storage = "tests.soak.faults:open_url:{times.period_s},{times.bad_s}:{directory}/kv"
storage_bytes = "256MiB"
reflection = false
[access]
tokens = "{directory}/tokens"
[audit]
file = "{directory}/audit"
[guard]
deadline_s = 0.5
[quota.tenants.rogue]
stored_bytes_max = "4MiB"
calls_max = {calls_max}
"""
"""The tenant that misbehaves may have half as many calls in flight as it has clients, so that some are refused."""

PERIOD_S_MAX = 30.0
"""Longest period of the store's bad times, each a sixth of it."""

SAMPLES = 200
FAULTS = ("unified_cache_storage_errors_total", "unified_cache_service_flawed_pages_total")
"""Series that tell what came of the injected faults."""


@dataclass(frozen=True, slots=True)
class ServiceSoakReport:
    """The result of one run."""

    seconds: float
    tally: CallTally
    flood: FloodFigures
    rss_bytes: tuple[int, int]
    """Medians of the third fifth of the run, in which the slow flood is over, and of the last."""
    fds_count: tuple[int, int]
    """The same of descriptors."""
    faults: Mapping[str, int]
    """Store metrics of the server: failed calls by kind, and pages that did not verify."""
    exit_status: int

    @property
    def missed(self) -> list[str]:
        """Name the bars that were missed."""
        tally = self.tally
        is_steady = self.seconds / 5 >= STEADY_S
        bars = {
            "availability": tally.availability >= AVAILABILITY_MIN,
            "success": tally.success >= SUCCESS_MIN,
            "wrong pages": tally.wrong_pages == 0,
            "memory": not is_steady or self.rss_bytes[1] <= (1 + RSS_GROWTH_MAX) * self.rss_bytes[0],
            "descriptors": not is_steady or self.fds_count[1] - self.fds_count[0] <= FDS_GROWTH_MAX,
            "p99 in the slow flood": not is_steady or tally.p99_s(flooded=True) <= FLOODED_P99_MAX * tally.p99_s(),
            "exit status": self.exit_status == 0,
        }
        return [name for name, is_met in bars.items() if not is_met]

    def json(self) -> str:
        """Write it, a figure a line."""
        flood = {"flood": asdict(self.flood), "rss_bytes": self.rss_bytes, "fds_count": self.fds_count}
        found = {**self.tally.figures(), **flood, "faults": self.faults, "missed": self.missed}
        return json.dumps(found, indent=1)


def soak(seconds: float, clients: int, size: FloodSize = FLOOD) -> ServiceSoakReport:
    """Run a server under load for so long; ``clients`` is a multiple of twice the number of tenants."""
    period_s = min(PERIOD_S_MAX, seconds / 2)
    times = BadTimes(period_s, period_s / 6)
    with tempfile.TemporaryDirectory() as name:
        directory, tokens = Path(name), dict[str, str]()
        for tenant in TENANTS:
            tokens[tenant], entry = new_token(Caller(tenant, Role.WRITER), None, secrets.token_bytes)
            add_token(directory / "tokens", entry)
        config = directory / "service.toml"
        config.write_text(
            CONFIG.format(times=times, directory=directory, calls_max=clients // (2 * len(TENANTS))), encoding="utf-8"
        )
        with _limited_server(config) as server:
            began_s = time.monotonic()
            flood_s = (began_s + 0.1 * seconds, began_s + 0.4 * seconds)
            flood = SlowFlood(server.port, tokens[TENANTS[-1]], size, *flood_s)
            tally, stopped = CallTally(times, flood_s), Event()
            runs = [flood.run_until_stopped]
            for number in range(clients):
                tenant = TENANTS[number % len(TENANTS)]
                behaves = tenant != TENANTS[-1]
                line = ClientConnection(server.address, tenant, tokens[tenant], tally, behaves=behaves)
                kind = SoakClient if behaves else RogueClient
                runs.append(kind(line, random.Random(number)).run_until_stopped)
            threads = [Thread(target=run, args=(stopped,)) for run in runs]
            for thread in threads:
                thread.start()
            rss_bytes, fds_count = _sampled(psutil.Process(server.child.pid), seconds)
            faults = _faults(server)
            stopped.set()
            ends_s = time.monotonic() + JOIN_S
            for thread in threads:
                thread.join(max(0.0, ends_s - time.monotonic()))
            server.child.terminate()
            status, _ = server.ended()
    return ServiceSoakReport(seconds, tally, flood.figures, rss_bytes, fds_count, faults, status)


def _limited_server(config: Path) -> ServeProcess:
    """Run ``unified-cache serve``; it inherits the usual limit of descriptors, and reads it at its start."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FDS_MAX, hard_limit))
    try:
        return ServeProcess("--config", str(config), variables={}, directory=ROOT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


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
    with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=JOIN_S) as answer:
        lines = answer.read().decode().splitlines()
    series = (line.rsplit(" ", 1) for line in lines if line.startswith(FAULTS))
    return {name.partition("unified_cache_")[2]: int(float(count)) for name, count in series if float(count)}


def main(arguments: Sequence[str]) -> int:
    """Run, print, and say whether every bar was met."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.service", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64, help="a multiple of 16")
    given = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if given.seconds <= 0 or given.clients < 2 * len(TENANTS) or given.clients % (2 * len(TENANTS)):
        parser.error(f"expected some seconds and a multiple of {2 * len(TENANTS)} clients")
    report = soak(given.seconds, given.clients)
    sys.stdout.write(f"{report.json()}\n")
    return 1 if report.missed else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(main(sys.argv[1:]))
