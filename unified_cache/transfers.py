"""The four ways between tiers, each as one life story: what is pinned, what is moved, what is published.

Each function is an operation's steps (see ``controller.operation``). A ``with`` block holds what the operation
holds; leaving it, on whatever way, gives everything back. Between two ``yield`` statements nothing else runs on
the owner's thread; across a ``yield`` the tree may have changed, and only what is pinned is still true.

What a rank finds out for itself, whether there was room, what storage has, what came, is agreed on before anything
is done about it; the rest follows from the tree, which is the same on every rank.
"""

from collections.abc import Generator, Mapping

import numpy as np
import numpy.typing as npt

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
from unified_cache.errors import RankLostError
from unified_cache.estimates import Candidates, TransferSpeeds
from unified_cache.ledger import Ledger, TierTransfer
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import Tier
from unified_cache.prefetch_steps import PrefetchSteps
from unified_cache.prefetches import Prefetches
from unified_cache.ranks import LocalRanks, RankGroup, held_by_all
from unified_cache.storage_backends.protocol import Level
from unified_cache.traffic import TrafficCounts
from unified_cache.tree import Match
from unified_cache.window import window

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
        shared = PrefetchSteps(ledger, memory, host_pages_max, ranks, self.traffic, speeds)
        self.prefetches = Prefetches(shared)
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

    def better_computed(self, prompt: Prompt) -> LeftAlone | None:
        """Return what the host adds to the device of a prompt, if computing it is faster; None if it is to be loaded.

        All of it or nothing: what copying costs a page is the same everywhere, and what computing it costs grows.
        """
        candidates = self._loads_of(prompt) if self.speeds.is_choosing else None
        if candidates is None:
            return None
        try:
            left_alone = self.speeds.choose(TransferKind.LOAD, candidates)[1]
        except RankLostError:  # nothing is loaded any more, and the next poll says so
            return None
        self.speeds.note(left_alone)
        return left_alone

    def left_alone(self, prompt: Prompt, stored_end: int) -> tuple[LeftAlone, ...]:
        """Return what this rank would leave alone of a prompt now, where storage completes its first pages."""
        if not self.speeds.is_choosing:
            return ()
        looks = (
            (TransferKind.LOAD, self._loads_of(prompt)),
            (TransferKind.PREFETCH, self.prefetches.candidates(prompt, stored_end)),
        )
        found = (self.speeds.look(kind, candidates) for kind, candidates in looks if candidates is not None)
        return tuple(left_alone for left_alone in found if left_alone is not None)

    def _loads_of(self, prompt: Prompt) -> Candidates | None:
        """Return loading nothing of a prompt and all that there is room for; None if that is nothing."""
        tree = self._ledger.tree
        found = tree.peek(prompt)
        end = self._ledger.fitting_end(found, Tier.HOST, Tier.DEVICE)
        if end <= found.device_end:
            return None
        copied: list[npt.NDArray[np.int64]] = []
        for number, component in enumerate(self._ledger.layout.components):
            lacks = tree.slots(found, Tier.DEVICE, number, window(end, component.span), end) < 0
            copied.append(np.array([0, np.count_nonzero(lacks)]))
        return Candidates(np.array([found.device_end, end]), prompt.pages_count, [each * 0 for each in copied], copied)

    def load_nothing(self) -> Steps:
        """Load nothing: for what is better computed."""
        return 0
        yield

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
        """Copy what a load moves, and note how long it took."""
        leg = self.speeds.legs[TransferKind.LOAD]
        job = LoadJob(self._memory, self._ledger.layout, moving.parts, leg.clock)
        pages = [0 for _ in self._ledger.layout.components]
        for part in moving.parts:
            pages[part.component] += len(part)
        payload_bytes = self.speeds.payload_bytes(pages)
        self._loads[job] = moving, job.progress
        try:
            with leg.moving(payload_bytes) as moved:
                yield job
                leg.note(moved, payload_bytes, job.ended_s)
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
