"""One rank under a script: its steps follow from a seed that all ranks share, what befalls it from its own."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.cache import ToyEngine, toy_layout
from tests.support.cache_model import Census
from tests.support.components import SPAN_SETS
from tests.support.faulty_storage import FaultyStorage, SeededFaults, StorageFault
from tests.support.operations import SETTLE_S, engine, out_pages
from tests.support.ranks import Declining, digest_of
from tests.support.seeded_workers import SeededWorkers
from unified_cache.controller import NotStarted, Operation, OperationState
from unified_cache.controller.controller import Finished
from unified_cache.controller.jobs import FetchJob, ProbeJob
from unified_cache.controller.operation import Job
from unified_cache.controller.ranks import RankGroup
from unified_cache.core.config import WritePolicy
from unified_cache.core.errors import WaitTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Tier
from unified_cache.core.window import window
from unified_cache.storage_backends.memory import MemoryStorage

PAGE = 4
PROMPT_PAGES_MAX = 8
LAG = 0.4
"""How often a rank's workers have nothing to show for a call."""
DECLINE_RATE = 0.1
"""Per allocation of a transfer."""
LOSS_RATE = 0.03
"""Per object of a store that loses some."""
RATES = {
    StorageFault.FAIL: 0.05,
    StorageFault.SHORT_READ: 0.05,
    StorageFault.FLIPPED_BIT: 0.05,
    StorageFault.LOST_WRITE: 0.05,
}
WEIGHTS = {
    "serve": 18,
    "backup": 8,
    "load": 16,
    "prefetch": 24,
    "poll": 50,
    "lose": 3,
    "squeeze": 10,
    "cancel": 1,
    "conclude": 1,
    "settle": 6,
    "reset": 4,
}


@dataclass
class Probed:
    """Knowledge of one prefetch when it decided, and its decision."""

    pages_count: int
    known_end: int
    """What memory alone can resume."""
    held: list[list[int]]
    """By component: pages that memory holds, on the host or on the device."""
    present: list[list[int]]
    """By component: pages asked for that this rank's store has."""
    fetched: list[list[int]]
    """By component: pages that are read; an empty list if nothing is."""
    reached_end: int = 0
    """What memory alone can resume when the prefetch is told."""
    is_cancelled: bool = False

    def wanted(self, spans: Sequence[int], end: int) -> list[list[int]] | None:
        """Return by component the pages to read for a resume at ``end``; None if this rank could not."""
        wanted = [
            [page for page in range(window(end, span), end) if page not in held]
            for span, held in zip(spans, self.held, strict=True)
        ]
        if any(set(pages) - set(there) for pages, there in zip(wanted, self.present, strict=True)):
            return None
        return wanted


@dataclass(frozen=True)
class RankReport:
    """Record of one rank, by which ranks are compared."""

    spans: tuple[int, ...]
    digests: list[str]
    """After each step."""
    ends: list[str]
    """Outcome of each transfer, in the order in which they were told."""
    probed: list[Probed]


class WatchedWorkers(SeededWorkers):
    """Seeded workers that lag, and write down what every prefetch saw and did."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.probed: dict[Operation, Probed] = {}
        self.probes: dict[Operation, ProbeJob] = {}
        self.undecided: set[Operation] = set()
        """Prefetches that have not gone on yet after their look into the store."""
        self.rank: Rank
        """Whose workers these are; set before the first job."""

    def submit(self, operation: Operation, job: Job) -> None:
        if isinstance(job, ProbeJob):
            self.probes[operation] = job
            self.probed[operation] = Probed(job._prompt.pages_count, *self.rank.held(job._prompt), [], [])
            self.undecided.add(operation)
        elif operation in self.undecided:
            probed = self.probed[operation]
            probed.known_end, probed.held = self.rank.held(self.probes[operation]._prompt)
            self.undecided.remove(operation)
        if isinstance(job, FetchJob):
            self.probed[operation].fetched = [part.pages.tolist() for part in job._parts]
        super().submit(operation, job)

    def finished(self, timeout_s: float) -> list[Finished]:
        return [] if self._rng.random() < LAG else super().finished(timeout_s)


@dataclass
class Rank:
    """One rank under a script."""

    seed: int
    ranks: RankGroup
    troubled: bool
    """Whether stores fail and allocations are declined; otherwise only presence and lag differ."""
    toy: ToyEngine = field(init=False)
    digests: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.script = random.Random(self.seed)
        self.own = random.Random(self.seed * 64 + self.ranks.rank + 1)
        self.spans = SPAN_SETS[self.seed % len(SPAN_SETS)]
        roomy = not self.troubled
        device = tuple(40 if roomy else 14 for _ in self.spans)
        host = tuple(400 if roomy else 18 for _ in self.spans)
        self.store = MemoryStorage()
        self.workers = WatchedWorkers(self.own)
        self.workers.rank = self
        layout, write = toy_layout(self.spans, PAGE), WritePolicy.THROUGH
        self.toy = engine(layout=layout, device=device, host=host, workers=self.workers, ranks=self.ranks, write=write)
        self.cache = self.toy.cache
        self.cache.attach(self.store)
        if self.troubled:
            tier = self.cache._storage
            assert tier is not None
            tier.backend._backend = FaultyStorage(self.store, SeededFaults(RATES, self.own), self.own)
        self.declining = Declining(self.own, DECLINE_RATE if self.troubled else 0.0)
        self.declining.install(self.cache)
        self.live: list[Operation] = []
        self.known: list[list[int]] = [[]]

    # ---- the script ----------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Take so many steps, each as every other rank does."""
        for _ in range(steps):
            (kind,) = self.script.choices(list(WEIGHTS), list(WEIGHTS.values()))
            self.step(kind)
            self.cache.check()
            self.digests.append(digest_of(self.cache))

    def step(self, kind: str) -> None:
        """Take one step."""
        cache = self.cache
        draw = self.script.randrange(1 << 30)
        if kind in ("backup", "load", "prefetch"):
            start = {"backup": cache.backup, "load": cache.load, "prefetch": cache.prefetch}
            with self.declining.armed():
                self.watch(start[kind](self.prompt(draw)))
        elif kind in ("poll", "settle"):
            with self.declining.armed():
                self.tell(cache.poll() if kind == "poll" else self.settled())
        elif kind == "serve":
            lock = self.toy.serve(self.new_prompt(draw))
            if lock is not None:
                cache.release(lock)
        elif kind == "lose":
            self.lose()
        elif kind == "squeeze":
            self.squeeze(draw)
        elif kind in ("cancel", "conclude") and self.live:
            operation = self.live[draw % len(self.live)]
            if kind == "cancel":
                cache.cancel(operation)
            else:
                cache.finish_early(operation)
        elif kind == "reset":
            with self.declining.armed():
                self.tell(self.settled())
            cache.reset()
            self.lose()

    def new_prompt(self, draw: int) -> Prompt:
        """Make a prompt that goes on from a known one, or from some page of it."""
        rng = random.Random(draw)
        known = rng.choice(self.known)
        pages = known[: rng.randrange(len(known) + 1)]
        pages = [*pages, *(rng.randrange(3) for _ in range(rng.randrange(1, 5)))][:PROMPT_PAGES_MAX]
        self.known = [*self.known[-8:], pages]
        return self.prompt_of(pages)

    def prompt(self, draw: int) -> Prompt:
        return self.prompt_of(self.known[draw % len(self.known)])

    def prompt_of(self, pages: Sequence[int]) -> Prompt:
        """Make a prompt of pages; every other length leaves a token to compute."""
        return self.cache.prompt(np.repeat(np.array(pages, np.int32), PAGE), whole=len(pages) % 2 == 0)

    def lose(self) -> None:
        """Have this rank's store lose some of what it has."""
        held = list(self.store._pages)
        self.store.remove([label for label in held if self.own.random() < LOSS_RATE])

    def squeeze(self, draw: int) -> None:
        """Have somebody else need room."""
        tier, component = Tier(draw % 2), draw // 2 % len(self.spans)
        ledger = self.cache._ledger
        capacity = ledger.capacity(tier, component)
        share = capacity if draw // 16 % 3 == 0 else capacity // 2
        slots = ledger.allocate(tier, component, share)
        if slots is not None:
            ledger.free(tier, component, slots)

    def watch(self, operation: Operation | NotStarted) -> None:
        if not operation:
            self.ends.append("declined")
        else:
            self.live.append(operation)

    def tell(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.ends.append(f"{operation.kind.value} {operation.state.value} {operation.pages_count}")
            if operation in self.live:
                self.live.remove(operation)
            if operation in self.workers.probed:
                probe, probed = self.workers.probes[operation], self.workers.probed[operation]
                probed.present = [
                    asked[there].tolist() for asked, there in zip(probe._pages, probe.present, strict=True)
                ]
                probed.reached_end, _ = self.held(probe._prompt)
                probed.is_cancelled = operation.state is OperationState.CANCELLED

    def settled(self) -> list[Operation]:
        try:
            return self.cache.wait_all(SETTLE_S)
        except WaitTimeoutError as error:
            raise AssertionError("nothing may hang") from error

    # ---- what is looked at ---------------------------------------------------------------------------------------

    def held(self, prompt: Prompt) -> tuple[int, list[list[int]]]:
        """Return what memory alone can resume of a prompt, and by component the pages that it holds."""
        census = Census.take(self.cache._ledger.tree)
        held = [
            [
                page
                for page, key in enumerate(prompt.keys)
                if any(key in census.held[census.tier_component(tier, component)] for tier in Tier)
            ]
            for component in range(len(self.spans))
        ]
        return census.longest(prompt, list(Tier)), held

    def close(self) -> None:
        """Let everything come to rest, and see that nothing is left."""
        self.tell(self.settled())
        assert not self.live, "a transfer was never told"
        for pages in self.known:
            prompt = self.prompt_of(pages)
            found = self.cache.match(prompt)
            lock = self.cache.lock(found)
            self.toy.verify(prompt, lock)
            self.cache.release(lock)
        self.tell(self.settled())  # what a store has failed is tried again when it is used
        assert out_pages(self.cache) == 0, "slots leaked"
        self.cache._ledger.check([])
        self.digests.append(digest_of(self.cache))
        assert self.cache.close() == []

    def report(self) -> RankReport:
        """Return what it is compared by."""
        return RankReport(self.spans, self.digests, self.ends, list(self.workers.probed.values()))


def covers(fetched: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> bool:
    """Tell whether all wanted pages are among those fetched, component by component."""
    return all(set(pages) <= set(read) for pages, read in zip(wanted, fetched, strict=True))


def compare(reports: Sequence[RankReport], *, troubled: bool) -> Counter[str]:
    """Assert that ranks agree after every step, and went for what all could restore; count what happened.

    Between ranks that differ in presence and lag alone, every prefetch goes for the longest such prefix.
    """
    first, spans = reports[0], reports[0].spans
    for rank, other in enumerate(reports):
        for found, expected in ((other.digests, first.digests), (other.ends, first.ends)):
            at = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
            assert at is None, f"rank {rank} differs from rank 0 at {at}: {found[at]} and {expected[at]}"
            assert len(found) == len(expected)
    happened = Counter({"prefetches": 0, "fetches": 0, "disagreed": 0})
    for probes in zip(*(report.probed for report in reports), strict=True):
        ends = range(probes[0].known_end + 1, probes[0].pages_count + 1)
        views_of = [{end: probe.wanted(spans, end) for end in ends} for probe in probes]
        sets = [{end for end, wanted in view.items() if wanted is not None} for view in views_of]
        common = set.intersection(*sets)
        fetched = probes[0].fetched
        assert all(probe.fetched == fetched for probe in probes), "ranks fetch different pages"
        wanted = {end: pages for end, pages in views_of[0].items() if end in common and pages is not None}
        whole = [end for end, pages in wanted.items() if fetched and covers(fetched, pages)]
        assert bool(fetched) == bool(whole), "some rank could not resume there"
        if fetched:
            useful = [set().union(*(pages[number] for pages in wanted.values())) for number in range(len(spans))]
            assert all(set(pages) <= used for pages, used in zip(fetched, useful, strict=True)), "of use to nobody"
            assert fetched[0] == wanted[max(whole)][0], "pages after the end that is read for"
        if not troubled and not probes[0].is_cancelled and common:
            reached = probes[0].reached_end >= max(common)  # another prefetch has brought it
            assert reached if not fetched else max(common) in whole, "not the longest"
        happened["prefetches"] += 1
        happened["fetches"] += bool(fetched)
        happened["disagreed"] += len({max(each, default=0) for each in sets}) > 1
    return happened
