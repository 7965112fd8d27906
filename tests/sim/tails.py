"""Tails of prompts in a simulation: read from their end while requests compute their heads, joined to them or lost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.sim.audit import Audit, Claim, Numbers
from tests.sim.memory import Contents
from tests.sim.workers import ScheduledJob
from tests.support.cache_model import flow_of
from unified_cache.cache import UnifiedCache
from unified_cache.controller import Operation, OperationState
from unified_cache.page import Prompt
from unified_cache.pool import PageCopies, Pages, Tier
from unified_cache.tails import LandedTail


@dataclass(eq=False)
class SimTail:
    """A tail from its first look-up until nobody brings any of it."""

    operation: Operation
    prompt: Prompt
    numbers: Contents
    """Of its pages."""
    joining: Operation | None = None
    came: list[PageCopies] = field(default_factory=list)
    """What it was joined with, by component."""
    needs_copy: bool = False
    """Whether the host lacked a page of the head when it was joined."""


class SimTails:
    """Every tail of one simulation that somebody may still join, or is joining."""

    def __init__(self, cache: UnifiedCache, audit: Audit, happened: Counter[str]) -> None:
        self._cache = cache
        self._audit = audit
        self._happened = happened
        self._components = len(cache.layout.components)
        self._begun: dict[Operation, SimTail] = {}
        self._joined: list[SimTail] = []
        """Of which nobody has looked yet whether it is in the tree."""

    @property
    def count(self) -> int:
        return len(self._begun)

    def begin(self, operation: Operation, prompt: Prompt, numbers: Contents) -> None:
        """Note a tail that is read."""
        self._begun[operation] = SimTail(operation, prompt, numbers)

    def is_joining(self, operation: Operation) -> bool:
        """Tell whether an operation puts a tail onto its head: what it copies of that others may bring as well."""
        return any(tail.joining is operation for tail in self._begun.values())

    def forget_all(self) -> None:
        """Note that the cache has given up all tails."""
        self._begun.clear()
        self._joined.clear()

    def prune(self, under_way: set[Operation]) -> None:
        """Forget the tails that nobody brings any more."""
        self._begun = {
            operation: tail
            for operation, tail in self._begun.items()
            if operation in under_way or (tail.joining is not None and not tail.joining.is_released)
        }

    def landed(self) -> list[tuple[SimTail, LandedTail]]:
        """Return the tails that may be joined, and how much of each has come."""
        found = ((tail, self._cache.landed_tail(operation)) for operation, tail in self._begun.items())
        return [(tail, landed) for tail, landed in found if landed is not None]

    def headless(self) -> list[tuple[SimTail, LandedTail]]:
        """Return those that have come in part, and their head has not."""
        return [
            (tail, landed) for tail, landed in self.landed() if self.full_end(tail.numbers) < landed.start < landed.end
        ]

    def joinable(self, held: Sequence[ScheduledJob]) -> list[tuple[SimTail, LandedTail]]:
        """Return those that have come up to their head, and those of which nothing came, with a job among ``held``."""
        over = {task.operation for task in held}
        return [
            (tail, landed)
            for tail, landed in self.landed()
            if (tail.operation in over if landed.start == landed.end else landed.start <= self.full_end(tail.numbers))
        ]

    def join(self, tail: SimTail, task: ScheduledJob, landed: LandedTail) -> Operation:
        """Join a tail that a job reads, or has read."""
        parts = flow_of(task.job, tail.prompt).parts
        came = self._came(parts, landed)
        first = int(came[0].pages[0]) if len(came[0]) else landed.end
        host_end = self.full_end(tail.numbers, Tier.HOST)
        meets = any(map(len, came)) and first <= self.full_end(tail.numbers)
        self._check_bytes(tail, came)
        joining = self._cache.join_tail(tail.operation)
        self._happened["head in the middle"] += 0 < landed.start < landed.end
        self._happened["tail joined while it is read"] += task.turns is not None and not task.has_run
        assert joining is not None, "a tail that has landed cannot be joined"
        assert self._cache.landed_tail(tail.operation) is None, "a tail can be joined twice"
        if meets:
            tail.joining, tail.came, tail.needs_copy = joining, came, host_end < first
            self._joined.append(tail)
        else:
            assert joining.is_released, "a tail is joined that has no head"
            assert joining.pages_count == 0, "a tail is resumed from that has no head"
        return joining

    def check_waiting(self, gone_on: list[ScheduledJob], waited: list[tuple[SimTail, LandedTail]]) -> None:
        """A tail neither goes on nor gives anything back before it is joined or left."""
        operations = {tail.operation for tail, _ in waited}
        assert not any(task.operation in operations for task in gone_on), "a tail went on before its head was there"

    def check_published(self, copied: set[Operation], *, may_be_gone: bool) -> None:
        """What was joined is in the tree, unless the host had no room for its head or others have made room."""
        for tail in self._joined.copy():
            joining = tail.joining
            assert joining is not None
            if not joining.is_released:
                continue
            self._joined.remove(tail)
            if joining.state is not OperationState.DONE or may_be_gone:
                continue
            if tail.needs_copy and joining not in copied:
                self._happened["no room for a head"] += 1
                continue
            self._happened["tail joined"] += 1
            for part in tail.came:
                held = self._audit.picture.slot_of[self._components + part.component, tail.numbers[part.pages]] >= 0
                assert held.all(), "a page of a tail was joined and is not in the tree"

    def full_end(self, numbers: Contents, tier: Tier | None = None) -> int:
        """Return how far Full goes of these pages, on a tier or on both together."""
        picture = self._audit.picture
        on_device, on_host = (picture.held(lane, numbers) for lane in (0, self._components))
        held: Pages = on_host if tier is Tier.HOST else on_device | on_host
        return len(held) if held.all() else int(np.argmin(held))

    def claims(self) -> list[Claim]:
        """Return the slots of what was joined until it is in the tree: another operation has them now."""
        return [
            Claim(out=self._slots(tail.came))
            for tail in self._begun.values()
            if tail.joining is not None and not tail.joining.is_released
        ]

    def without_joined(self, operation: Operation, out: Numbers) -> Numbers:
        """Return the slots that an operation still has of those it had, after what it has read was joined."""
        tail = self._begun.get(operation)
        return out if tail is None or not tail.came else np.setdiff1d(out, self._slots(tail.came))

    def _came(self, parts: Sequence[PageCopies], landed: LandedTail) -> list[PageCopies]:
        """Return by component the pages that have come of those to be read."""
        full, *windows = parts
        if landed.start == landed.end:
            return [part.where(np.zeros(len(part), np.bool_)) for part in parts]
        return [full.where(full.pages >= landed.start), *windows]

    def _check_bytes(self, tail: SimTail, came: list[PageCopies]) -> None:
        memory = self._audit.memory
        for component, part in zip(self._cache.layout.components, came, strict=True):
            for pool in component.pools:
                if pool.page_bytes:
                    found = memory.host[memory.on_host(pool, part.target)]
                    assert (found == memory.contents(pool, tail.numbers[part.pages])).all(), "wrong bytes in a tail"

    def _slots(self, parts: list[PageCopies]) -> Numbers:
        bases = self._audit.bases
        return np.concatenate([part.target + bases[self._components + part.component] for part in parts])
