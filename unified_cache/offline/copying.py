"""Copies pages from one store to another: read, verify, put; KV before sidecars, a bounded batch at a time.

A copy keeps no state: the objects that the target holds are those already copied. An interrupted copy is resumed by
starting it again, and two copies may run at the same time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from unified_cache.offline.listing import ObjectCount, ObjectPools, batches, take_inventory
from unified_cache.offline.reading import FlawedObject, ReadObject, ReadOutcome, empty_page, read_verified
from unified_cache.offline.upkeep import Watch
from unified_cache.page import PageKey
from unified_cache.seal import Label
from unified_cache.storage_backends.manifest import Description, manifest_of
from unified_cache.storage_backends.protocol import Answer, Level, StorageBackend, StorageReader, StoredObject

__all__ = ["CopyPlan", "CopyResult", "CopyTask", "Copying", "chunks", "copy_identity", "exist", "plan_identity"]

CHUNK_PAGES = 64
"""Pages whose objects are copied together, one pool after the other: an interrupted copy leaves whole pages behind it,
and at most this many pages that have KV and no sidecars."""

LOOK_LABELS_MAX = 4096
"""Labels in one call of ``exists``."""


class CopyTask(NamedTuple):
    """Objects of one page that are to be copied, or to be checked."""

    key: PageKey
    parent: PageKey | None
    """Key of the page before it; None for the first page, and where it is unknown, because a listing does not tell."""
    objects: int
    """A bit for each pool, see ``ObjectPools``."""


@dataclass(slots=True)
class CopyResult:
    """Counts of a copy: objects copied, skipped, gone, declined and flawed."""

    copied: ObjectCount = field(default_factory=ObjectCount)
    """Objects that the target took."""
    skipped: ObjectCount = field(default_factory=ObjectCount)
    """Objects that the target had."""
    gone_count: int = 0
    """Objects that the source evicted while the copy ran; no failure."""
    declined_count: int = 0
    """Objects that the target had no room for, or evicted before the copy ended."""
    findings: dict[Label, FlawedObject] = field(default_factory=dict)
    """Objects of the source that are flawed or cannot be read; none of them was copied."""

    @property
    def is_complete(self) -> bool:
        """Whether the target holds all requested objects that the source still has."""
        return not self.declined_count and not self.findings


class Copying:
    """Copies objects of one identity between two stores and counts them."""

    __slots__ = ("_level", "_source", "_target", "_watch", "pools", "result", "sound")

    def __init__(self, source: StorageReader, target: StorageBackend, pools: ObjectPools, watch: Watch) -> None:
        self._source = source
        self._target = target
        self._watch = watch
        self._level = Level.DURABLE if target.capability().durable else Level.CACHED
        self.pools = pools
        self.result = CopyResult()
        self.sound: dict[PageKey, int] = {}
        """Objects of each page that the target holds and whose bytes were verified here."""

    def copy(self, tasks: Sequence[CopyTask]) -> None:
        """Copy the objects of a few pages, KV before sidecars; objects already found flawed are skipped.

        Raises:
            StorageError: either store fails. What was copied so far stays.
        """
        for bit, batch, parents in self._batches(tasks):
            new = [found for found in batch if found.label not in self.result.findings]
            readings = read_verified(self._source, [empty_page(found, parents[found.label]) for found in new])
            self._store(bit, [reading for reading in readings if reading.outcome is ReadOutcome.SOUND])
            for reading in readings:
                self._count_fault(reading)
            self._watch(len(batch), sum(found.object_bytes for found in batch))

    def check(self, tasks: Sequence[CopyTask]) -> None:
        """Verify objects that the target seems to have and remove flawed ones; sound ones become recent there.

        Raises:
            StorageError: the target fails.
        """
        for bit, batch, _ in self._batches(tasks):
            flawed: list[Label] = []
            for reading in read_verified(self._target, [empty_page(found) for found in batch]):
                label = reading.page.label
                if reading.outcome is ReadOutcome.SOUND:
                    self.sound[label.key] = self.sound.get(label.key, 0) | 1 << bit
                    self.result.skipped.add(reading.object_bytes)
                elif reading.outcome is not ReadOutcome.GONE:
                    flawed.append(label)
            if flawed:
                self._target.remove(flawed)
            self._watch(len(batch), sum(found.object_bytes for found in batch))

    def finish(self) -> CopyResult:
        """Ask the target again for everything: under a cap it may have evicted the first objects for the last."""
        placed = [
            (self.pools.label(key, bit), bit)
            for key, objects in self.sound.items()
            for bit in range(len(self.pools.specs))
            if objects >> bit & 1
        ]
        there = exist(self._target, [label for label, _ in placed])
        for (label, bit), found in zip(placed, there, strict=True):
            if not found:
                self.sound[label.key] &= ~(1 << bit)
                self.result.declined_count += 1
        return self.result

    def _batches(
        self, tasks: Sequence[CopyTask]
    ) -> Iterator[tuple[int, list[StoredObject], dict[Label, PageKey | None]]]:
        """Yield, pool by pool, the objects of the tasks that the target is not known to hold, with parent keys."""
        for bit in range(len(self.pools.specs)):
            parents = {
                self.pools.label(task.key, bit): task.parent
                for task in tasks
                if (task.objects & ~self.sound.get(task.key, 0)) >> bit & 1
            }
            size = self.pools.object_bytes(bit)
            for batch in batches(StoredObject(label, size) for label in parents):
                yield bit, batch, parents

    def _store(self, bit: int, readings: Sequence[ReadObject]) -> None:
        stored = self._target.put([reading.page for reading in readings], self._level) if readings else []
        for reading, ok in zip(readings, stored, strict=True):
            if ok:
                key = reading.page.label.key
                self.sound[key] = self.sound.get(key, 0) | 1 << bit
                self.result.copied.add(reading.object_bytes)
            else:
                self.result.declined_count += 1

    def _count_fault(self, reading: ReadObject) -> None:
        if reading.outcome is ReadOutcome.GONE:
            self.result.gone_count += 1
        elif reading.outcome is not ReadOutcome.SOUND:
            label = reading.page.label
            self.result.findings[label] = FlawedObject(label, reading.outcome, reading.reason)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Difference between two stores for one identity: the objects to copy, and those that need no copy."""

    tasks: Sequence[CopyTask]
    todo: ObjectCount
    skipped: ObjectCount
    misfits: Sequence[StoredObject]
    """Objects of the source that no engine could use; they are not copied."""
    stale: Sequence[Label]
    """Objects of the target with a wrong length, to be replaced by objects that are copied."""


def plan_identity(source: StorageReader, target: StorageBackend, description: Description) -> CopyPlan:
    """Compare the objects of one identity in two stores. One scan each, no reads; some 400 bytes of memory a page.

    Objects that the target has at their right length are not copied, nor read: scrub the target if you doubt them.

    Raises:
        StorageError: either store cannot be listed.
    """
    identity = description.identity.digest(description.layout)
    have = take_inventory(source, identity, description.layout)
    there = take_inventory(target, identity, description.layout)
    todo, skipped = ObjectCount(), ObjectCount()
    tasks: list[CopyTask] = []
    for key, present in have.pages.items():
        held = there.pages.get(key, 0)
        if present & ~held:
            tasks.append(CopyTask(key, None, present & ~held))
        for bit in range(len(have.pools.specs)):
            if present >> bit & 1:
                (skipped if held >> bit & 1 else todo).add(have.pools.object_bytes(bit))
    stale = [found.label for found in there.misfits if found.label.key in have.pages]
    return CopyPlan(tasks, todo, skipped, have.misfits, stale)


def copy_identity(
    source: StorageReader, target: StorageBackend, description: Description, plan: CopyPlan, watch: Watch
) -> CopyResult:
    """Copy the objects of a plan.

    Raises:
        StorageError: either store fails. What was copied so far stays; plan and copy again to go on.
    """
    identity = description.identity.digest(description.layout)
    copying = Copying(source, target, ObjectPools(identity, description.layout), watch)
    copying.result.skipped = plan.skipped
    for found in plan.misfits:
        reason = copying.pools.misfit(found) or ""
        copying.result.findings[found.label] = FlawedObject(found.label, ReadOutcome.FLAWED, reason)
    target.register(manifest_of(description.identity, description.layout), {})
    if plan.stale:
        target.remove(plan.stale)
    for chunk in chunks(plan.tasks):
        copying.copy(chunk)
    return copying.finish()


def chunks(tasks: Iterable[CopyTask]) -> Iterator[list[CopyTask]]:
    """Cut tasks into runs of pages that are copied together."""
    waiting = iter(tasks)
    while chunk := list(islice(waiting, CHUNK_PAGES)):
        yield chunk


def exist(storage: StorageReader, labels: Sequence[Label]) -> list[Answer]:
    """Return for each label whether a store has it, asking for a bounded number at a time."""
    return [
        found
        for start in range(0, len(labels), LOOK_LABELS_MAX)
        for found in storage.exists(labels[start : start + LOOK_LABELS_MAX])
    ]
