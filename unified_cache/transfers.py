"""The four ways between tiers, each as one life story: what is pinned, what is moved, what is published.

Each function is an operation's steps (see ``controller.operation``). A ``with`` block holds what the operation
holds; leaving it, on whatever way, gives everything back. Between two ``yield`` statements nothing else runs on
the owner's thread; across a ``yield`` the tree may have changed, and only what is pinned is still true.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.controller import StorageTier
from unified_cache.controller.jobs import BackupJob, FetchJob, LoadJob, ProbeJob, StoreJob
from unified_cache.controller.operation import Leg, Steps
from unified_cache.errors import StorageError
from unified_cache.ledger import Ledger, Staging
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import Part, Slots, Tier
from unified_cache.storage_backends.protocol import Level
from unified_cache.tree import Match
from unified_cache.window import restorable_ends, window

__all__ = ["Traffic", "Transfers"]


@dataclass(slots=True)
class Traffic:
    """What went one way since the cache was opened.

    To storage: pages new on the host. Those put again only to stay recent are looked up there, not moved.
    """

    component_pages: list[int]
    """By component."""
    payload_bytes: int = 0

    @property
    def pages(self) -> int:
        """Pages of all components together."""
        return sum(self.component_pages)


class Transfers:
    """Operations over one ledger, one memory and one storage tier."""

    __slots__ = ("_host_pages_left", "_identity", "_ledger", "_memory", "storage", "traffic")

    def __init__(self, ledger: Ledger, memory: PageMemory, identity: bytes, host_pages_max: int) -> None:
        """Let prefetches fill at most ``host_pages_max`` host pages of the first component at a time."""
        self._ledger = ledger
        self._memory = memory
        self._identity = identity
        self._host_pages_left = host_pages_max
        self.storage: StorageTier | None = None
        """Where backups go on to; None for nowhere."""
        self.traffic = {leg: Traffic([0 for _ in ledger.layout.components]) for leg in Leg}

    def backup(self, prompt: Prompt, level: Level) -> Steps:
        """Copy what the host lacks of a prompt's device prefix and publish it; then put all of it into storage.

        Pages that storage has already are put again: that costs it a look-up and keeps them recent there, where
        hits in memory are not seen. The host pages stay pinned until storage has answered.
        Where the host is short of room, the longest prefix that fits is backed up. Returns the pages copied to it.
        """
        found = self._ledger.tree.match(prompt)
        while found.device_end:
            with self._ledger.moving(found, found.device_end, Tier.DEVICE, Tier.HOST) as moving:
                if moving is not None:
                    if moving.parts:
                        yield BackupJob(self._memory, self._ledger.layout, self._identity, prompt, moving.parts)
                    taken = moving.publish()
                    copied = self._count(Leg.BACKUP, taken)
                    if self.storage is not None:
                        store = StoreJob(self.storage, prompt, moving.held(), level)
                        yield store
                        self._count(Leg.STORE, _among(store.stored, taken))
                    return copied
            found = self._shorter(prompt, found.device_end, Tier.HOST)
        return 0

    def load(self, prompt: Prompt) -> Steps:
        """Copy what the device lacks of a prompt's restorable prefix and publish it.

        Where the device is short of room, the longest prefix that fits is loaded instead. Returns pages loaded.
        """
        found = self._ledger.tree.match(prompt)
        while found.any_end > found.device_end:
            with self._ledger.moving(found, found.any_end, Tier.HOST, Tier.DEVICE) as moving:
                if moving is not None:
                    if moving.parts:
                        yield LoadJob(self._memory, self._ledger.layout, moving.parts)
                    return self._count(Leg.LOAD, moving.publish())
            found = self._shorter(prompt, found.any_end, Tier.DEVICE)
        return 0

    def _shorter(self, prompt: Prompt, end: int, tier: Tier) -> Match:
        """Match less than ``end`` pages, only as far as ``tier`` has room for Full; windows follow from the new end."""
        tree = self._ledger.tree
        room_end = tree.full_end(tree.match(prompt), tier) + self._ledger.free_count(tier, 0)
        return tree.match(prompt.head(min(room_end, end - 1)))

    def prefetch(self, prompt: Prompt, storage: StorageTier) -> Steps:
        """Read the longest prefix that storage can complete into host memory, and graft it there.

        It continues the host's own Full prefix, which stays pinned. Returns the pages of prompt brought.
        """
        tree = self._ledger.tree
        found = tree.match(prompt)
        start = tree.full_end(found, Tier.HOST)
        if start == prompt.pages_count:
            return 0
        holes_before = self._host_holes_before(found, start)
        with self._ledger.pinned(found, start, Tier.HOST):
            probe = ProbeJob(storage, prompt, start)
            yield probe
            affordable = min(prompt.pages_count, start + self._host_pages_left)
            end = _longest(self._spans, probe.missing, start, affordable, holes_before)
            while end > start:
                with (
                    self._budgeted(end - start),
                    self._ledger.staging(Tier.HOST, self._wanted(start, end)) as staging,
                ):
                    if staging is not None:
                        parts = self._parts(start, end, staging)
                        fetch = FetchJob(storage, prompt, parts)
                        failure: StorageError | None = None
                        try:
                            yield fetch
                        except StorageError as error:  # what came before it is as good as ever
                            failure = error
                        count = self._graft(prompt, start, holes_before, staging, fetch, parts)
                        if failure is not None:
                            raise failure
                        return count
                room = self._ledger.free_count(Tier.HOST, 0)
                end = _longest(self._spans, probe.missing, start, min(start + room, end - 1), holes_before)
        return 0

    @contextmanager
    def _budgeted(self, pages: int) -> Iterator[None]:
        """Take so much of what prefetches may fill, for the length of a ``with`` block."""
        self._host_pages_left -= pages
        try:
            yield
        finally:
            self._host_pages_left += pages

    @property
    def _spans(self) -> list[int]:
        return [component.span for component in self._ledger.layout.components]

    def _host_holes_before(self, found: Match, start: int) -> list[int]:
        """Return by component one more than the last page before ``start`` that the host lacks; 0 if none."""
        holes = [0]
        for component, span in enumerate(self._spans[1:], 1):
            first = window(start, span)
            slots = self._ledger.tree.slots(found, Tier.HOST, component, first, start)
            missing = np.flatnonzero(slots < 0)
            holes.append(first + int(missing[-1]) + 1 if missing.size else 0)
        return holes

    def _wanted(self, start: int, end: int) -> list[int]:
        """Return by component the pages to fetch for a resume at ``end``, of those from ``start`` on."""
        return [end - max(start, window(end, span)) for span in self._spans]

    def _parts(self, start: int, end: int, staging: Staging) -> list[Part]:
        return [
            Part(component, np.arange(end - len(slots), end), slots, slots)
            for component, slots in enumerate(staging.slots)
        ]

    def _graft(
        self,
        prompt: Prompt,
        start: int,
        holes_before: list[int],
        staging: Staging,
        fetch: FetchJob,
        parts: Sequence[Part],
    ) -> int:
        """Put what arrived into the tree, as far as it can be resumed from."""
        count = len(parts[0])
        missing: list[npt.NDArray[np.bool_]] = []
        for part, arrived in zip(parts, fetch.arrived, strict=True):
            holes = np.ones(count, np.bool_)
            holes[part.pages[arrived] - start] = False
            missing.append(holes)
        end = _longest(self._spans, missing, start, start + count, holes_before)
        if end == start:
            return 0
        kept: list[Part] = []
        slots: list[Slots] = []
        for part, arrived in zip(parts, fetch.arrived, strict=True):
            keep = part.where(arrived & (part.pages < end))
            given = np.full(end - start, -1, np.int32)
            given[keep.pages - start] = keep.target
            kept.append(keep)
            slots.append(given)
        staging.insert(prompt.head(end), start, slots)
        self._count(Leg.PREFETCH, kept)
        return end - start

    def _count(self, leg: Leg, parts: Sequence[Part]) -> int:
        """Book what went one way; return the pages."""
        traffic = self.traffic[leg]
        for part in parts:
            component = self._ledger.layout.components[part.component]
            traffic.payload_bytes += len(part) * sum(pool.page_bytes for pool in component.pools)
            traffic.component_pages[part.component] += len(part)
        return sum(len(part) for part in parts)


def _among(parts: Sequence[Part], others: Sequence[Part]) -> list[Part]:
    """Return of ``parts`` the pages that are in ``others`` too."""
    pages = {part.component: part.pages for part in others}
    return [part.where(np.isin(part.pages, pages[part.component])) for part in parts if part.component in pages]


def _longest(
    spans: Sequence[int], missing: Sequence[npt.NDArray[np.bool_]], start: int, end: int, holes_before: Sequence[int]
) -> int:
    """Return the largest restorable end in (start, end]; ``start`` if there is none."""
    count = end - start
    if count <= 0:
        return start
    ok = restorable_ends(spans, [holes[:count] for holes in missing], start, count, holes_before)
    ends = np.flatnonzero(ok)
    return start + int(ends[-1]) + 1 if ends.size else start
