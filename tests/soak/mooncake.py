"""Two engines over a cluster whose nodes die:

    python -m tests.soak.mooncake [--minutes M] [--round-s S] [--json FILE].

In the middle of every round one of three nodes is killed, and started again a twelfth of a round later. A line for
every round, a table and JSON at the end; exit status 1 unless every byte was right, every engine had hits from storage
in every round, no slot leaked, and, over rounds enough to tell, memory and threads of the engines stayed flat.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression

from tests.soak.mooncake_engine import Account, serve_orders
from tests.support.mooncake import LocalCluster

ENGINES = 2
NODES = 3
SEGMENT_BYTES = 64 << 20
"""The shared prompts take a third of the cluster; fresh ones fill it within two minutes."""

REPORT_TIMEOUT_S = 60.0
"""An engine answers between two requests, each of which may wait for a few calls that hang until their deadline."""

WARM_ROUNDS = 2
"""Memory is still being touched for the first time."""
FLAT_ROUNDS_MIN = 5
"""Fewer say nothing about a slope."""
RESIDENT_SLOPE_MAX = 1 << 20
"""Bytes a round: an engine at 40 requests/s that kept a page of every request would grow by 70 MiB in 60 s."""
THREADS_SLOPE_MAX = 0.5
"""A round; in each a node, and so a connection, is lost and another comes."""


class SoakProcess:
    """An engine's process, asked for its account round by round."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders
        self.accounts: list[Account] = []

    @classmethod
    @contextmanager
    def running(cls, url: str, seed: int) -> Iterator["SoakProcess"]:
        """Start one that serves; it ends by itself when orders can come no more."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        child = spawn.Process(target=serve_orders, args=(url, seed, theirs), daemon=True)
        child.start()
        theirs.close()
        try:
            with ours:
                engine = cls(ours)
                engine.note()
                yield engine
        finally:
            child.join(REPORT_TIMEOUT_S)
            child.kill()

    def ask(self) -> None:
        """Ask for an account, to be noted with ``note``."""
        self._orders.send_bytes(b"account")

    def note(self) -> None:
        """Wait for an account and keep it.

        Raises:
            TimeoutError: none came in time.
            EOFError: the engine is dead.
        """
        if not self._orders.poll(REPORT_TIMEOUT_S):
            raise TimeoutError(f"an engine did not answer within {REPORT_TIMEOUT_S:g} s")
        self.accounts.append(self._orders.recv())

    def per_round(self, count: Callable[[Account], int]) -> list[int]:
        """Return how much a count grew in each round."""
        counts = [count(account) for account in self.accounts]
        return [after - before for before, after in pairwise(counts)]

    def slope(self, size: Callable[[Account], int]) -> float | None:
        """Return the growth of a size a round once warm; None after too few rounds to tell."""
        sizes = [size(account) for account in self.accounts[1 + WARM_ROUNDS :]]
        return linear_regression(range(len(sizes)), sizes).slope if len(sizes) >= FLAT_ROUNDS_MIN else None


@dataclass(frozen=True)
class SoakOutcome:
    """Figures of a soak, by engine where a figure is an engine's."""

    round_s: float
    requests: list[list[int]] = field(default_factory=list)
    """Requests by engine and round, as the next two."""
    hit_pages: list[list[int]] = field(default_factory=list)
    storage_pages: list[list[int]] = field(default_factory=list)
    wrong_pages: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    leaked_slots: list[int] = field(default_factory=list)
    resident_bytes: list[list[int]] = field(default_factory=list)
    """Resident bytes by engine, at the start and after every round, as the next."""
    threads: list[list[int]] = field(default_factory=list)
    resident_slopes: list[float | None] = field(default_factory=list)
    """Growth in bytes a round; None after too few rounds to tell, as for the next."""
    thread_slopes: list[float | None] = field(default_factory=list)

    @classmethod
    def of(cls, engines: Sequence[SoakProcess], round_s: float) -> "SoakOutcome":
        """Sum up what engines told."""
        last = [engine.accounts[-1] for engine in engines]
        return cls(
            round_s,
            [engine.per_round(lambda account: account.requests) for engine in engines],
            [engine.per_round(lambda account: account.hit_pages) for engine in engines],
            [engine.per_round(lambda account: account.storage_pages) for engine in engines],
            [account.wrong_pages for account in last],
            [account.failures for account in last],
            [account.leaked_slots for account in last],
            [[account.resident_bytes for account in engine.accounts] for engine in engines],
            [[account.threads for account in engine.accounts] for engine in engines],
            [engine.slope(lambda account: account.resident_bytes) for engine in engines],
            [engine.slope(lambda account: account.threads) for engine in engines],
        )

    @property
    def complaints(self) -> list[str]:
        """Say what must not be; nothing if all is well."""
        found = [f"{count} pages held wrong bytes" for count in self.wrong_pages if count]
        found += [f"{count} slots leaked" for count in self.leaked_slots if count]
        for number, rounds in enumerate(self.storage_pages):
            found += [
                f"no hit from storage in round {at} of engine {number}" for at, hits in enumerate(rounds) if not hits
            ]
        for name, slopes, most in (
            ("resident bytes", self.resident_slopes, RESIDENT_SLOPE_MAX),
            ("threads", self.thread_slopes, THREADS_SLOPE_MAX),
        ):
            found += [f"{name} grow by {slope:,.1f} a round" for slope in slopes if slope is not None and slope > most]
        return found

    def table(self) -> str:
        """Return a line for every engine, and what is wrong."""
        lines = [
            "engine  requests  hit pages  from storage  least a round  wrong  failed  RSS MiB  slope  threads  slope"
        ]
        for number, requests in enumerate(self.requests):
            storage, resident, threads = self.storage_pages[number], self.resident_bytes[number], self.threads[number]
            resident_slope, thread_slope = self.resident_slopes[number], self.thread_slopes[number]
            lines.append(
                f"{number:6d}{sum(requests):10,d}{sum(self.hit_pages[number]):11,d}"
                f"{sum(storage):14,d}{min(storage):15,d}"
                f"{self.wrong_pages[number]:7d}{self.failures[number]:8d}{resident[-1] / (1 << 20):9.1f}"
                f"{'' if resident_slope is None else f'{resident_slope / (1 << 20):.2f}':>7}"
                f"{threads[-1]:9d}{'' if thread_slope is None else f'{thread_slope:.2f}':>7}"
            )
        return "\n".join([*lines, *(f"not well: {complaint}" for complaint in self.complaints)])


def soak(rounds: int, round_s: float, say: Callable[[str], object]) -> SoakOutcome:
    """Run that many rounds, and ``say`` a line after each."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster.running(NODES, SEGMENT_BYTES))
        engines = [stack.enter_context(SoakProcess.running(cluster.url, seed)) for seed in range(ENGINES)]
        for number in range(rounds):
            time.sleep(round_s / 2)
            node = cluster.nodes[number % NODES]
            node.kill()
            time.sleep(round_s / 12)
            cluster.replace_node(node)
            time.sleep(round_s / 2 - round_s / 12)
            for engine in engines:
                engine.ask()
            for engine in engines:
                engine.note()
            say(_line(number, engines))
        return SoakOutcome.of(engines, round_s)


def _line(number: int, engines: Sequence[SoakProcess]) -> str:
    before, after = ([engine.accounts[at] for engine in engines] for at in (-2, -1))
    return (
        f"round {number}: {_sum(after, 'requests') - _sum(before, 'requests'):,} requests, "
        f"{_sum(after, 'storage_pages') - _sum(before, 'storage_pages'):,} pages from storage, "
        f"{_sum(after, 'wrong_pages')} wrong, {_sum(after, 'failures') - _sum(before, 'failures')} transfers failed; "
        f"RSS {', '.join(f'{account.resident_bytes / (1 << 20):.1f}' for account in after)} MiB, "
        f"threads {', '.join(str(account.threads) for account in after)}"
    )


def _sum(accounts: Sequence[Account], name: str) -> int:
    return sum(asdict(account)[name] for account in accounts)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.mooncake", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="how long")
    parser.add_argument("--round-s", type=float, default=60, help="a node dies once in so many seconds")
    parser.add_argument("--json", type=Path, help="where the outcome goes as JSON, beside standard output")
    given = parser.parse_args()
    rounds = int(given.minutes * 60 / given.round_s)
    if rounds < 1 or given.round_s <= 0:
        parser.error("expected at least one round")
    outcome = soak(rounds, given.round_s, _say)
    text = json.dumps({**asdict(outcome), "complaints": outcome.complaints})
    sys.stdout.write(f"{outcome.table()}\n{text}\n")
    if given.json is not None:
        given.json.write_text(f"{text}\n", encoding="utf-8")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
