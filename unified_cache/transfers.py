"""The four ways between tiers, each as one life story: what is pinned, what is moved, what is published.

Each function is an operation's steps (see ``controller.operation``). A ``with`` block holds what the operation
holds; leaving it, on whatever way, gives everything back. Between two ``yield`` statements nothing else runs on
the owner's thread; across a ``yield`` the tree may have changed, and only what is pinned is still true.

What a rank finds out for itself, whether there was room, what storage has, what came, is agreed on before anything
is done about it; the rest follows from the tree, which is the same on every rank.
"""

from collections.abc import Generator, Mapping

from unified_cache.backup_request import BackupRequest
from unified_cache.backups import Backups
from unified_cache.controller import (
    LayerwiseLoad,
    LeftAlone,
    LeftOut,
    Operation,
    OperationState,
    PageTally,
    StorageTier,
    TransferKind,
)
from unified_cache.controller.jobs import ClearJob, LoadJob
from unified_cache.controller.layerwise import LayerProgress
from unified_cache.controller.operation import Job, Steps
from unified_cache.estimates import TransferSpeeds
from unified_cache.ledger import Ledger, TierTransfer
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import Tier
from unified_cache.prefetch import Prefetches
from unified_cache.ranks import LocalRanks, RankGroup, held_by_all
from unified_cache.storage_backends.protocol import Level
from unified_cache.traffic import TrafficCounts
from unified_cache.tree import Match

__all__ = ["Transfers"]


class Transfers:
    """Operations over one ledger, one memory and one storage tier."""

    __slots__ = (
        "_ledger",
        "_loads",
        "_memory",
        "_ranks",
        "backups",
        "prefetches",
        "speeds",
        "storage",
        "traffic",
    )

    def __init__(
        self,
        ledger: Ledger,
        memory: PageMemory,
        owners: Mapping[str, bytes],
        host_pages_max: int,
        speeds: TransferSpeeds,
        ranks: RankGroup = LocalRanks(),
    ) -> None:
        """Let prefetches fill at most ``host_pages_max`` host pages of the first component at a time.

        ``owners`` names by pool whose pages are sealed, see ``Identity.owners``; ``speeds`` chooses what is brought up.
        """
        self._ledger = ledger
        self._memory = memory
        self._ranks = ranks
        self._loads: dict[Job | None, tuple[TierTransfer, LayerProgress]] = {}
        """By job: what loads under way bring."""
        self.storage: StorageTier | None = None
        """Where backups go on to; None for nowhere."""
        self.traffic = TrafficCounts(ledger.layout)
        self.backups = Backups(ledger, memory, owners, ranks, self.traffic)
        self.prefetches = Prefetches(ledger, memory, host_pages_max, ranks, self.traffic, speeds)
        self.speeds = speeds

    def backup(self, prompt: Prompt, level: Level, tally: PageTally) -> Steps:
        """Back up all of a prompt, and on to storage where there is one; see ``Backups.backup``."""
        return self.backups.backup(prompt, self.storage, level, tally)

    def write(self, request: BackupRequest, tally: PageTally) -> Steps:
        """Back up for a write policy what of a prompt is not backed up or stored yet; see ``Backups.write``."""
        return self.backups.write(request, self.storage, tally)

    def note_use(self, found: Match) -> None:
        """Note that a request asks for what was matched; see ``Backups.note_use``."""
        if self.storage is not None:
            self.backups.note_use(found, self.storage)

    def left_alone(self, prompt: Prompt, stored_end: int) -> LeftAlone | None:
        """Return what this rank would leave alone of a prompt now, where storage completes its first pages."""
        return None if self.storage is None else self.prefetches.left_alone(prompt, self.storage, stored_end)

    def load(self, prompt: Prompt, tally: PageTally) -> Steps:
        """Copy what the device lacks of a prompt's restorable prefix and publish it.

        Where the device is short of room, the longest prefix that fits is loaded instead. Returns pages loaded.
        """
        found = self._ledger.tree.match(prompt)
        end = self._ledger.fitting_end(found, Tier.HOST, Tier.DEVICE)
        tally.asked = found.host_end - found.device_end
        tally.leave_out(LeftOut.DEVICE_FULL, found.host_end - max(end, found.device_end))
        if end <= found.device_end:
            return 0
        with self._ledger.moving(found, end, Tier.HOST, Tier.DEVICE) as held:
            moving = held_by_all(self._ranks, held)
            if moving is None:
                tally.leave_out(LeftOut.DEVICE_FULL, end - found.device_end)
                return 0
            if moving.parts:
                yield from self._copy_up(moving)
            tally.arrived = end - found.device_end
            return self.traffic.add(TransferKind.LOAD, moving.publish())

    def _copy_up(self, moving: TierTransfer) -> Generator[Job, Operation, None]:
        """Copy what a load moves."""
        job = LoadJob(self._memory, self._ledger.layout, moving.parts)
        self._loads[job] = moving, job.progress
        try:
            yield job
        finally:
            del self._loads[job]

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
        try:
            with storage.clearing.clear():
                yield job
        finally:
            self._ledger.fates.note_storage_cleared()
            self._ledger.forget_stored()
        return job.removed_count
