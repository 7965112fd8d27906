"""The four ways between tiers, each as one life story: what is pinned, what is moved, what is published.

Each function is an operation's steps (see ``controller.operation``). A ``with`` block holds what the operation
holds; leaving it, on whatever way, gives everything back. Between two ``yield`` statements nothing else runs on
the owner's thread; across a ``yield`` the tree may have changed, and only what is pinned is still true.

What a rank finds out for itself, whether there was room, what storage has, what came, is agreed on before anything
is done about it; the rest follows from the tree, which is the same on every rank.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from unified_cache.controller import LayerwiseLoad, Operation, OperationState, StorageTier, TransferKind
from unified_cache.controller.jobs import BackupJob, ClearJob, LoadJob, StoreJob
from unified_cache.controller.layerwise import LayerProgress
from unified_cache.controller.operation import Job, Steps
from unified_cache.ledger import Ledger, TierTransfer
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import PageCopies, Pages, Tier
from unified_cache.prefetches import Prefetches
from unified_cache.ranks import LocalRanks, RankGroup, held_by_all, true_for_all
from unified_cache.storage_backends.protocol import Level
from unified_cache.traffic import TrafficCounts
from unified_cache.tree import Match
from unified_cache.window import restorable_ends, window

__all__ = ["Transfers"]


class Transfers:
    """Operations over one ledger, one memory and one storage tier."""

    __slots__ = (
        "_ledger",
        "_loads",
        "_memory",
        "_owners",
        "_ranks",
        "prefetches",
        "storage",
        "traffic",
    )

    def __init__(
        self,
        ledger: Ledger,
        memory: PageMemory,
        owners: Mapping[str, bytes],
        host_pages_max: int,
        ranks: RankGroup = LocalRanks(),
    ) -> None:
        """Let prefetches fill at most ``host_pages_max`` host pages of the first component at a time.

        ``owners`` names by pool whose pages are sealed, see ``Identity.owners``.
        """
        self._ledger = ledger
        self._memory = memory
        self._owners = owners
        self._ranks = ranks
        self._loads: dict[Job | None, tuple[TierTransfer, LayerProgress]] = {}
        """By job: what loads under way bring."""
        self.storage: StorageTier | None = None
        """Where backups go on to; None for nowhere."""
        self.traffic = TrafficCounts(ledger.layout)
        self.prefetches = Prefetches(ledger, memory, host_pages_max, ranks, self.traffic)

    def backup(self, prompt: Prompt, level: Level) -> Steps:
        """Copy what the host lacks of a prompt's device prefix and publish it; then put all of it into storage.

        First what a resume at its end needs, then the windows that were kept at other ends, for other resumes. Pages
        that storage has already are put again: that costs it a look-up and keeps them recent there, where hits in
        memory are not seen. The host pages stay pinned until storage has answered.
        Where the host is short of room, the longest prefix that fits is backed up. Returns the pages copied to it.
        """
        tree = self._ledger.tree
        found = tree.match(prompt)
        kept_ends = self._kept_ends(found)
        copied = 0
        end = self._ledger.fitting_end(found, Tier.DEVICE, Tier.HOST)
        if end:
            with self._ledger.moving(found, end, Tier.DEVICE, Tier.HOST) as held:
                moving = held_by_all(self._ranks, held)
                if moving is not None:
                    copied = yield from self._back_up(prompt, moving, moving.held, level)
        for end in kept_ends:
            found = tree.match(prompt.head(end))
            if found.device_end != end or tree.full_end(found, Tier.HOST) < end:
                continue
            with self._ledger.moving(found, end, Tier.DEVICE, Tier.HOST) as held:
                moving = held_by_all(self._ranks, held)
                if moving is not None:
                    copied += yield from self._back_up(prompt, moving, moving.held_windows, level)
        return copied

    def _kept_ends(self, found: Match) -> list[int]:
        """Return the ends before a match's own, descending, at which the device keeps windows that the host lacks."""
        spans = [component.span for component in self._ledger.layout.components]
        holes: list[Pages | None] = [None]
        lacking: list[tuple[int, Pages]] = []
        for component, span in enumerate(spans[1:], 1):
            on_device, on_host = (
                self._ledger.tree.slots(found, tier, component, 0, found.device_end)
                for tier in (Tier.DEVICE, Tier.HOST)
            )
            holes.append(on_device < 0)
            lacks = (on_device >= 0) & (on_host < 0)
            lacks[window(found.device_end, span) :] = False
            lacking.append((span, lacks))
        if not any(lacks.any() for _, lacks in lacking):
            return []
        resumable = restorable_ends(spans, holes, 0, found.device_end, [0 for _ in spans])
        ends: set[int] = set()
        for span, lacks in lacking:
            for page in np.flatnonzero(lacks)[::-1].tolist():
                if not lacks[page]:
                    continue  # covered by an end that was found before
                later = np.flatnonzero(resumable[page : page + span])
                if later.size:
                    end = page + int(later[0]) + 1
                    ends.add(end)
                    for other_span, others in lacking:
                        others[window(end, other_span) : end] = False
        return sorted(ends, reverse=True)

    def _back_up(
        self, prompt: Prompt, moving: TierTransfer, held: Callable[[], list[PageCopies]], level: Level
    ) -> Steps:
        """Copy and publish what moves; then put what ``held`` says is on the host. Return the pages copied."""
        if moving.parts:
            yield BackupJob(self._memory, self._ledger.layout, self._owners, prompt, moving.parts)
        taken = moving.publish()
        copied = self.traffic.add(TransferKind.BACKUP, taken)
        if self.storage is not None:
            parts = held()
            store = StoreJob(self.storage, prompt, parts, level)
            yield store
            stored = zip(parts, true_for_all(self._ranks, store.stored), strict=True)
            self.traffic.add(TransferKind.STORE, _among([part.where(whole) for part, whole in stored], taken))
        return copied

    def load(self, prompt: Prompt) -> Steps:
        """Copy what the device lacks of a prompt's restorable prefix and publish it.

        Where the device is short of room, the longest prefix that fits is loaded instead. Returns pages loaded.
        """
        found = self._ledger.tree.match(prompt)
        end = self._ledger.fitting_end(found, Tier.HOST, Tier.DEVICE)
        if end <= found.device_end:
            return 0
        with self._ledger.moving(found, end, Tier.HOST, Tier.DEVICE) as held:
            moving = held_by_all(self._ranks, held)
            if moving is None:
                return 0
            if moving.parts:
                job = LoadJob(self._memory, self._ledger.layout, moving.parts)
                self._loads[job] = moving, job.progress
                try:
                    yield job
                finally:
                    del self._loads[job]
            return self.traffic.add(TransferKind.LOAD, moving.publish())

    def layerwise_load(self, operation: Operation) -> LayerwiseLoad | None:
        """Return the pages of a load under way by layer; None if it is over or another load brings part of it."""
        if operation.job not in self._loads or operation.state is not OperationState.RUNNING:
            return None
        moving, progress = self._loads[operation.job]
        slots = moving.coming()
        if any((given < 0).any() for given in slots):
            return None
        return LayerwiseLoad(operation, moving.end, slots, moving.parts, progress)

    def clear(self, storage: StorageTier) -> Steps:
        """Remove from storage what this rank has put there; no backup puts anything meanwhile. Returns objects."""
        job = ClearJob(storage)
        with storage.clearing.clear():
            yield job
        return job.removed_count


def _among(parts: Sequence[PageCopies], others: Sequence[PageCopies]) -> list[PageCopies]:
    """Return of ``parts`` the pages that are in ``others`` too."""
    pages = {part.component: part.pages for part in others}
    return [part.where(np.isin(part.pages, pages[part.component])) for part in parts if part.component in pages]
