"""Load: what the host holds of a prompt, copied to the device and published there.

    pin both ends, allocate device slots, copy layer by layer, publish

An engine may read the pages layer by layer before they are in the tree: see ``LayerwiseLoad``.
"""

from unified_cache.controller import LayerwiseLoad, LeftOut, Operation, OperationState, PageTally, TransferKind
from unified_cache.controller.jobs import LoadJob
from unified_cache.controller.operation import Job, Steps
from unified_cache.ledger import Ledger, TierTransfer
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import Tier
from unified_cache.ranks import RankGroup, held_by_all
from unified_cache.traffic import TrafficCounts

__all__ = ["Loads"]


class Loads:
    """Loads of one cache."""

    __slots__ = ("_ledger", "_memory", "_ranks", "_traffic", "_under_way")

    def __init__(self, ledger: Ledger, memory: PageMemory, ranks: RankGroup, traffic: TrafficCounts) -> None:
        """Take the parts of one cache."""
        self._ledger = ledger
        self._memory = memory
        self._ranks = ranks
        self._traffic = traffic
        self._under_way: dict[Job | None, tuple[TierTransfer, LoadJob]] = {}
        """By job: what loads under way bring."""

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
                job = LoadJob(self._memory, self._ledger.layout, moving.parts)
                self._under_way[job] = moving, job
                try:
                    yield job
                finally:
                    del self._under_way[job]
            tally.arrived = end - found.device_end
            return self._traffic.add(TransferKind.LOAD, moving.publish())

    def layerwise(self, operation: Operation) -> LayerwiseLoad | None:
        """Return the pages of a load under way by layer; None if it is over or another load brings part of it."""
        if operation.job not in self._under_way or operation.state is not OperationState.RUNNING:
            return None
        moving, job = self._under_way[operation.job]
        slots = moving.coming()
        if any((given < 0).any() for given in slots):
            return None
        return LayerwiseLoad(operation, moving.end, slots, moving.parts, job.progress)
