"""Run seeds and say in one line what came of it."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from unittest.mock import patch

from tests.sim.schedule import TRANSFERS
from tests.sim.simulation import CHECK_EVERY, SimTally, Simulation
from tests.support.ranks import ThreadRanks, digest_of, in_threads
from unified_cache.controller import jobs
from unified_cache.core.errors import CacheError

SECONDS_A_MINUTE = 60
BATCH_OBJECTS = 12
"""Objects per call to the store."""


def is_faulty(seed: int) -> bool:
    """Tell whether a seed has faults: two out of three have, of every component set."""
    return seed // 6 % 3 != 0


@dataclass(frozen=True)
class Violation:
    """A promise broken, and how to see it again."""

    seed: int
    operations: int
    """So many lead to it; the last one shows it, or the end of the run after it."""
    what: str

    def __str__(self) -> str:
        return (
            f"seed {self.seed}, operation {self.operations}: {self.what}\n"
            f"    replay: python -m tests.sim --seed {self.seed} --ops {self.operations} --seeds 1"
        )


@dataclass
class SimReport(SimTally):
    """Totals of several simulations."""

    seeds: int = 0
    faulty_seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    """By seed: of everything that happened, in its order."""
    cpu_s: float = 0.0

    @property
    def operations_count(self) -> int:
        return self.operations.total()

    @property
    def transfers_share(self) -> float:
        return sum(self.operations[kind] for kind in TRANSFERS) / max(1, self.operations_count)

    @property
    def nodes_median(self) -> float:
        return statistics.median(self.nodes or [0])

    @property
    def fill_median(self) -> float:
        return statistics.median(self.fill or [0])

    def add(self, seed: int, simulation: Simulation) -> None:
        """Add what one seed did."""
        tally = simulation.tally
        self.seeds += 1
        self.faulty_seeds += is_faulty(seed)
        self.operations += tally.operations
        self.happened += tally.happened
        self.faults += Counter({fault.value: count for fault, count in simulation.store.fired_count.items()})
        self.faults += simulation.faults.fired
        self.nodes += tally.nodes
        self.fill += tally.fill
        self.hashes[seed] = simulation.trace.hexdigest()

    def last_line(self) -> str:
        """Operations, seeds, faults fired by kind, violations, operations per minute; and what they were done to."""
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults.items())) or "none"
        rate = self.operations_count / max(self.cpu_s, 1e-9) * SECONDS_A_MINUTE
        return (
            f"{self.operations_count} operations ({self.transfers_share:.0%} of transfers), {self.seeds} seeds "
            f"({self.faulty_seeds} with faults), median tree {self.nodes_median:.0f} nodes, "
            f"median fill of the emptiest tier {self.fill_median:.0%}, faults fired: {faults}; "
            f"{len(self.violations)} violations, {rate:,.0f} operations per minute of one core"
        )


def run_seed(seed: int, operations: int, report: SimReport) -> None:
    """Run one seed into a report; a broken promise ends the seed and stands in the report.

    Jobs call the store for a few objects at a time, so that other jobs come between.
    """
    with patch.object(jobs, "BATCH_OBJECTS", BATCH_OBJECTS):
        _run_seed(seed, operations, report)


def _run_seed(seed: int, operations: int, report: SimReport) -> None:
    simulation = Simulation(seed, faulty=is_faulty(seed))
    began_s = time.process_time()
    done = operations
    try:
        for number in range(operations):
            done = number + 1
            simulation.step(number)
        simulation.wait_all()
    except (AssertionError, CacheError) as error:
        what = f"{simulation.cell.name}: {type(error).__name__}: {error}"
        report.violations.append(Violation(seed, done, what))
    except Exception as error:
        error.add_note(str(Violation(seed, done, simulation.cell.name)))
        raise
    finally:
        report.cpu_s += time.process_time() - began_s
        report.add(seed, simulation)


def run_ranks(seed: int, operations: int, size: int) -> int:
    """Run a seed on several ranks, each with luck and a store of its own; return how many prefetches ended well.

    Their trees, slots, pins and marks are the same after every few operations, and what they tell of transfers is.
    """

    def live(ranks: ThreadRanks) -> tuple[list[str], Counter[str]]:
        simulation = Simulation(seed, faulty=is_faulty(seed), ranks=ranks)
        digests: list[str] = []
        for number in range(operations):
            simulation.step(number)
            if number % CHECK_EVERY == 0:
                digests.append(digest_of(simulation.cache))
        simulation.wait_all()
        told = {kind: count for kind, count in simulation.tally.happened.items() if kind.startswith("prefetch")}
        return digests, Counter(told)

    with patch.object(jobs, "BATCH_OBJECTS", BATCH_OBJECTS):
        found = in_threads(size, live)
    for rank, (digests, told) in enumerate(found):
        at = next((at for at, pair in enumerate(zip(digests, found[0][0], strict=True)) if len(set(pair)) > 1), None)
        assert at is None, f"rank {rank} differs from rank 0 after operation {at * CHECK_EVERY} of seed {seed}"
        assert told == found[0][1], f"rank {rank} tells of other transfers than rank 0"
    return found[0][1]["prefetch done"]


def run_seeds(
    seeds: Iterable[int],
    operations_each: int,
    on_seed: Callable[[SimReport], object] = lambda _: None,
    *,
    first_violation: bool = False,
) -> SimReport:
    """Run seeds one after the other, or until the ``first_violation``; give each report so far to ``on_seed``."""
    gc.collect()
    gc.freeze()  # what was imported will never be garbage; looking at it again and again takes a fifth of the time
    report = SimReport()
    for seed in seeds:
        run_seed(seed, operations_each, report)
        on_seed(report)
        if first_violation and report.violations:
            break
    return report
