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
import re
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple
from urllib.request import urlopen

import psutil

from tests.soak.clients import ClientConnection, RogueClient, SoakClient
from tests.soak.faults import BadTimes
from tests.soak.slow_flood import FloodFigures, FloodSize, SlowFlood
from tests.soak.tally import CallFigures, CallTally
from tests.sources import ROOT
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
COMMAND = (sys.executable, "-c", "from unified_cache.cli.main import main; main()")
LOW_LIMIT = 'ulimit -S -n 1024; exec "$0" "$@"'
"""Usual limit of descriptors, for whatever machine this runs on."""
CONFIG = """\
listen = "127.0.0.1:0"
storage = "tests.soak.faults:open_url:{times.period_s},{times.bad_s}:{directory}/kv"
storage_bytes = "256MiB"
reflection = false
[access]
tokens = "{directory}/tokens"
[metrics]
listen = "127.0.0.1:0"
[guard]
deadline_s = 0.5
[quota.tenants.rogue]
stored_bytes_max = "4MiB"
calls_max = 4
"""


PERIOD_S_MAX = 30.0
"""Longest period of the store's bad times, each a sixth of it."""

PORTS = 2
"""Those of calls and of metrics."""

SAMPLES = 200
SAMPLES_SHOWN = 20
FAULTS = ("unified_cache_storage_errors_total", "unified_cache_service_flawed_pages_total")
"""Series that tell what came of the injected faults."""


class Sample(NamedTuple):
    """Resources of the server at one moment."""

    rss_bytes: int
    fds_count: int


@dataclass(frozen=True, slots=True)
class ServiceSoakReport:
    """The result of one run."""

    seconds: float
    clients: int
    figures: CallFigures
    flood: FloodFigures
    samples: Sequence[Sample]
    """Samples of the server, at equal distances."""
    faults: Mapping[str, int]
    """Store metrics of the server: failed calls by kind, and pages that did not verify."""
    exit_status: int

    @property
    def rss_bytes(self) -> tuple[int, int]:
        """Medians of the third fifth of the run, in which the slow flood is over, and of the last."""
        return _early_and_late([each.rss_bytes for each in self.samples])

    @property
    def fds_count(self) -> tuple[int, int]:
        """Medians of the third fifth of the run, in which the slow flood is over, and of the last."""
        return _early_and_late([each.fds_count for each in self.samples])

    @property
    def rss_growth(self) -> float:
        """Growth of memory from the early to the late part of the run, as a share."""
        early, late = self.rss_bytes
        return late / early - 1

    @property
    def missed(self) -> list[str]:
        """Name the bars that were missed."""
        figures = self.figures
        fds_growth = self.fds_count[1] - self.fds_count[0]
        is_steady = self.seconds / 5 >= STEADY_S
        bars = {
            "availability": figures.availability >= AVAILABILITY_MIN,
            "success": figures.success >= SUCCESS_MIN,
            "wrong pages": figures.wrong_pages == 0,
            "memory": not is_steady or self.rss_growth <= RSS_GROWTH_MAX,
            "descriptors": not is_steady or fds_growth <= FDS_GROWTH_MAX,
            "p99 in the slow flood": not is_steady or figures.p99_flooded_s <= FLOODED_P99_MAX * figures.p99_s,
            "exit status": self.exit_status == 0,
        }
        return [name for name, is_met in bars.items() if not is_met]

    def json(self) -> str:
        """Write it, a figure a line."""
        figures = self.figures
        shares = {"availability": figures.availability, "success": figures.success}
        found = {
            "seconds": self.seconds,
            "clients": self.clients,
            **shares,
            **figures._asdict(),
            "flood": asdict(self.flood),
            "rss_bytes": self.rss_bytes,
            "fds_count": self.fds_count,
            "samples": self.samples[:: max(1, len(self.samples) // SAMPLES_SHOWN)],
            "faults": self.faults,
            "exit_status": self.exit_status,
            "missed": self.missed,
        }
        return json.dumps(found, indent=1)


def soak(seconds: float, clients: int, size: FloodSize = FLOOD) -> ServiceSoakReport:
    """Run a server under load for so long; ``clients`` is a multiple of the number of tenants."""
    period_s = min(PERIOD_S_MAX, seconds / 2)
    times = BadTimes(period_s, period_s / 6)
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory), times) as server:
        began_s = time.monotonic()
        flood_s = (began_s + 0.1 * seconds, began_s + 0.4 * seconds)
        flood = SlowFlood(int(server.address.rpartition(":")[2]), server.tokens[TENANTS[-1]], size, *flood_s)
        tally, stopped = CallTally(times, flood_s), Event()
        runs = [flood.run_until_stopped, *(_client(number, server, tally) for number in range(clients))]
        threads = [Thread(target=run, args=(stopped,)) for run in runs]
        for thread in threads:
            thread.start()
        samples = list(_samples(psutil.Process(server.child.pid), seconds))
        faults = server.faults()
        stopped.set()
        ends_s = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        server.child.terminate()
        return ServiceSoakReport(
            seconds, clients, tally.figures(), flood.figures, samples, faults, server.child.wait(JOIN_S)
        )


class SoakServer(NamedTuple):
    """A server process that listens."""

    child: "subprocess.Popen[str]"
    address: str
    metrics_port: int
    tokens: Mapping[str, str]
    """One of each tenant."""

    def faults(self) -> dict[str, int]:
        """Read from its metrics the faults of its store."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=JOIN_S) as answer:
            lines = answer.read().decode().splitlines()
        series = (line.rsplit(" ", 1) for line in lines if line.startswith(FAULTS))
        return {name.partition("unified_cache_")[2]: int(float(count)) for name, count in series if float(count)}


@contextmanager
def serving(directory: Path, times: BadTimes) -> Iterator[SoakServer]:
    """Run ``unified-cache serve`` with a token for each tenant."""
    tokens: dict[str, str] = {}
    for tenant in TENANTS:
        tokens[tenant], entry = new_token(Caller(tenant, Role.WRITER), None, secrets.token_bytes)
        add_token(directory / "tokens", entry)
    config = directory / "service.toml"
    config.write_text(CONFIG.format(times=times, directory=directory), encoding="utf-8")
    with (directory / "log").open("w+", encoding="utf-8") as log:
        command = ["sh", "-c", LOW_LIMIT, *COMMAND, "serve", "--config", str(config)]
        with subprocess.Popen(command, stderr=log, text=True, cwd=ROOT) as child:
            try:
                port, metrics_port = _ports(child, directory / "log")
                yield SoakServer(child, f"127.0.0.1:{port}", metrics_port, tokens)
            finally:
                child.kill()


def _ports(child: "subprocess.Popen[str]", log: Path) -> list[int]:
    """Wait for the line in which the server says where it listens."""
    pause = Event()
    while child.poll() is None:
        said = [line for line in log.read_text(encoding="utf-8").splitlines() if '"serving"' in line]
        found = re.findall(r"127\.0\.0\.1:(\d+)", "".join(said))
        if len(found) == PORTS:
            return [int(port) for port in found]
        pause.wait(0.05)
    raise ChildProcessError(f"the server did not start: {log.read_text(encoding='utf-8')}")


def _client(number: int, server: SoakServer, tally: CallTally) -> Callable[[Event], None]:
    tenant = TENANTS[number % len(TENANTS)]
    behaves = tenant != TENANTS[-1]
    line = ClientConnection(server.address, tenant, server.tokens[tenant], tally, behaves=behaves)
    kind = SoakClient if behaves else RogueClient
    return kind(line, random.Random(number)).run_until_stopped


def _early_and_late(values: Sequence[int]) -> tuple[int, int]:
    fifth = max(1, len(values) // 5)
    early, late = sorted(values[2 * fifth : 3 * fifth]), sorted(values[-fifth:])
    return early[len(early) // 2], late[len(late) // 2]


def _samples(server: psutil.Process, seconds: float) -> Iterator[Sample]:
    """Sample the server ``SAMPLES`` times in ``seconds``."""
    pause = Event()
    for _ in range(SAMPLES):
        pause.wait(seconds / SAMPLES)
        with server.oneshot():
            yield Sample(server.memory_info().rss, server.num_fds())


def main(arguments: Sequence[str]) -> int:
    """Run, print, and say whether every bar was met."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.service", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64, help="a multiple of 8")
    given = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if given.seconds <= 0 or given.clients < len(TENANTS) or given.clients % len(TENANTS):
        parser.error(f"expected some seconds and a multiple of {len(TENANTS)} clients")
    report = soak(given.seconds, given.clients)
    sys.stdout.write(f"{report.json()}\n")
    return 1 if report.missed else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(main(sys.argv[1:]))
