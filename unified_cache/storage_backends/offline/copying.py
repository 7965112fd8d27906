"""Copies pages from one store to another: read, verify, put; KV before sidecars, a bounded batch at a time.

A copy keeps no state: the objects that the target holds are those already copied. An interrupted copy is resumed by
starting it again, and two copies may run at the same time. Whole identities are copied, or the prefixes of prompts,
which are named by tokens and namespace as an engine names them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import LayoutError
from unified_cache.core.page import PageKey, Prompt
from unified_cache.core.pool import ModelLayout
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_UNKNOWN, restorable_ends, window
from unified_cache.storage_backends.manifest import Description, manifest_of
from unified_cache.storage_backends.offline.listing import (
    FlawedObject,
    ObjectCount,
    ObjectPools,
    ReadObject,
    ReadOutcome,
    Watch,
    batches,
    empty_page,
    read_verified,
    take_inventory,
)
from unified_cache.storage_backends.protocol import Answer, Level, Store, StoredObject

CHUNK_PAGES = 64
"""Pages whose objects are copied together, one pool after the other: an interrupted copy leaves whole pages behind it,
and at most this many pages that have KV and no sidecars."""

LOOK_LABELS_MAX = 4096


class CopyTask(NamedTuple):
    """Objects of one page that are to be copied, or to be checked."""

    key: PageKey
    objects: int
    """A bit for each pool, see ``ObjectPools``."""


@dataclass(slots=True)
class CopyResult:
    """Counts of a copy: objects copied, skipped, gone, declined and flawed."""

    copied: ObjectCount = field(default_factory=ObjectCount)
    skipped: ObjectCount = field(default_factory=ObjectCount)
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

    def __init__(self, source: Store, target: Store, pools: ObjectPools, watch: Watch) -> None:
        self._source = source
        self._target = target
        self._watch = watch
        self._level = Level.DURABLE if target.capability().durable else Level.CACHED
        self.pools = pools
        self.result = CopyResult()
        self.sound: dict[PageKey, int] = {}
        """Objects of each page that the target holds and whose bytes were verified here."""

    def copy(self, tasks: Sequence[CopyTask]) -> None:
        """Copy the objects of a few pages, KV before sidecars; objects already found flawed are skipped."""
        for bit, batch in self._batches(tasks):
            new = [found for found in batch if found.label not in self.result.findings]
            readings = read_verified(self._source, list(map(empty_page, new)))
            self._store(bit, [reading for reading in readings if reading.outcome is ReadOutcome.SOUND])
            for reading in readings:
                self._count_fault(reading)
            self._watch(len(batch), sum(found.object_bytes for found in batch))

    def check(self, tasks: Sequence[CopyTask]) -> None:
        """Verify objects that the target seems to have and remove flawed ones; sound ones become recent there."""
        for bit, batch in self._batches(tasks):
            flawed: list[Label] = []
            for reading in read_verified(self._target, list(map(empty_page, batch))):
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

    def _batches(self, tasks: Sequence[CopyTask]) -> Iterator[tuple[int, list[StoredObject]]]:
        """Yield, pool by pool, the objects of the tasks that the target is not known to hold."""
        for bit in range(len(self.pools.specs)):
            keys = [task.key for task in tasks if (task.objects & ~self.sound.get(task.key, 0)) >> bit & 1]
            size = self.pools.object_bytes(bit)
            for batch in batches(StoredObject(self.pools.label(key, bit), size) for key in keys):
                yield bit, batch

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


def plan_identity(source: Store, target: Store, description: Description) -> CopyPlan:
    """Compare the objects of one identity in two stores. One scan each, no reads; some 400 bytes of memory a page.

    Objects that the target has at their right length are not copied, nor read: scrub the target if you doubt them.
    """
    identity = description.identity.digest(description.layout)
    # A service lists registered identities, and nothing else.
    target.register(manifest_of(description.identity, description.layout), {})
    have = take_inventory(source, identity, description.layout)
    there = take_inventory(target, identity, description.layout)
    todo, skipped = ObjectCount(), ObjectCount()
    tasks: list[CopyTask] = []
    for key, present in have.pages.items():
        held = there.pages.get(key, 0)
        if present & ~held:
            tasks.append(CopyTask(key, present & ~held))
        for bit in range(len(have.pools.specs)):
            if present >> bit & 1:
                (skipped if held >> bit & 1 else todo).add(have.pools.object_bytes(bit))
    stale = [found.label for found in there.misfits if found.label.key in have.pages]
    return CopyPlan(tasks, todo, skipped, have.misfits, stale)


def copy_identity(source: Store, target: Store, description: Description, plan: CopyPlan, watch: Watch) -> CopyResult:
    """Copy the objects of a plan. If that fails, what was copied stays: plan and copy again to go on."""
    identity = description.identity.digest(description.layout)
    copying = Copying(source, target, ObjectPools(identity, description.layout), watch)
    copying.result.skipped = plan.skipped
    for found in plan.misfits:
        reason = copying.pools.misfit(found) or ""
        copying.result.findings[found.label] = FlawedObject(found.label, ReadOutcome.FLAWED, reason)
    if plan.stale:
        target.remove(plan.stale)
    for chunk in chunks(plan.tasks):
        copying.copy(chunk)
    return copying.finish()


def chunks(tasks: Iterable[CopyTask]) -> Iterator[list[CopyTask]]:
    """Yield tasks in runs of ``CHUNK_PAGES``."""
    waiting = iter(tasks)
    while chunk := list(islice(waiting, CHUNK_PAGES)):
        yield chunk


def exist(storage: Store, labels: Sequence[Label]) -> list[Answer]:
    """Return for each label whether a store has it, asking for a bounded number at a time."""
    return [
        found
        for start in range(0, len(labels), LOOK_LABELS_MAX)
        for found in storage.exists(labels[start : start + LOOK_LABELS_MAX])
    ]


Presence = npt.NDArray[np.bool_]
"""Whether each object of a prompt is there, shape (pools with objects, pages)."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Restorable length of one prompt."""

    prompt_pages: int
    promised_pages: int
    """The longest prefix that both stores together seemed to have."""
    restorable_pages: int
    """The longest prefix that can be restored from the target now; all of it was verified."""


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Prompts, and the objects of their pages that two stores hold; no page was read."""

    source: Store
    target: Store
    description: Description
    pools: ObjectPools
    chains: Sequence["PromptChain"]
    objects_count: int
    """Objects to copy or, where the target has them, to check; those of several prompts counted once."""


def plan_backup(source: Store, target: Store, description: Description, prompts: Sequence[Prompt]) -> PrefixPlan:
    """Look for every page of the prompts' chains, in every pool, also beyond what can be restored.

    Raises:
        LayoutError: a pool's pages have another number of tokens, so that no key of a prompt names them.
    """
    plan = _looked_for(source, target, description, prompts)
    return replace(plan, objects_count=_union((chain, chain.in_source) for chain in plan.chains))


def plan_prefetch(source: Store, target: Store, description: Description, prompts: Sequence[Prompt]) -> PrefixPlan:
    """Look for the longest prefix of each prompt that both stores together can complete.

    Where a component's span is not known, all that there is of it within the prefix belongs to it, and what is missing
    does not shorten it: whether a resume can do without, only the engine knows. Raises as ``plan_backup``, and
    LayoutError where no component says which pages a resume needs.
    """
    if all(component.span == SPAN_UNKNOWN for component in description.layout.components):
        raise LayoutError(
            "expected a component that says which pages a resume needs, found spans that are unknown; "
            "a backup copies every page"
        )
    plan = _looked_for(source, target, description, prompts)
    return replace(plan, objects_count=_union((chain, chain.needed(chain.end)) for chain in plan.chains))


def backup_prefixes(plan: PrefixPlan, watch: Watch) -> CopyResult:
    """Copy the pages of the prompts. Objects that the target seems to have are read there, and replaced if flawed."""
    copying = _begun(plan, watch)
    for chain in plan.chains:
        chain.bring(copying, chain.in_source.copy(), stop_early=False)
    return copying.finish()


def prefetch_prefixes(plan: PrefixPlan, watch: Watch) -> tuple[list[Prefetched], CopyResult]:
    """Make the longest prefix of each prompt restorable from the target that both stores together can complete.

    Copies what a resume there needs and the target lacks: of Full every page, of every other component the window
    before the end. Where a page proves flawed, or finds no room, the next shorter prefix is taken instead.
    """
    copying = _begun(plan, watch)
    promised = [chain.end for chain in plan.chains]
    for chain in plan.chains:
        # A round that fails has found an object of this end to be nowhere, so the next round's end is another.
        while chain.end and not chain.bring(copying, chain.needed(chain.end), stop_early=True):
            pass
    result = copying.finish()
    found = [
        Prefetched(chain.prompt.pages_count, end, chain.longest(chain.presence(copying.sound)))
        for chain, end in zip(plan.chains, promised, strict=True)
    ]
    return found, result


class PromptChain:
    """Pages of one prompt, and the objects of them that two stores are known to hold."""

    def __init__(self, prompt: Prompt, layout: ModelLayout, pools: ObjectPools, source: Store, target: Store) -> None:
        self._layout = layout
        self._pools = pools
        self.prompt = prompt
        self.in_source = self._look(source)
        self.in_target = self._look(target)

    @property
    def end(self) -> int:
        """The longest prefix that both stores together can complete, in pages."""
        return self.longest(self.in_source | self.in_target)

    def longest(self, present: Presence) -> int:
        """Return the longest prefix that can be restored from these objects, in pages."""
        known = [
            (number, component.span)
            for number, component in enumerate(self._layout.components)
            if component.span != SPAN_UNKNOWN
        ]
        tombstones: list[npt.NDArray[np.bool_]] = [
            np.logical_not(present[self._pools.component_bits(number)].all(axis=0)) for number, _ in known
        ]
        ok = restorable_ends([span for _, span in known], tombstones, 0, self.prompt.pages_count, [0] * len(known))
        ends = np.flatnonzero(ok)
        return int(ends[-1]) + 1 if ends.size else 0

    def needed(self, end: int) -> Presence:
        """Return which objects a resume after ``end`` pages needs; of spans that are not known, all that there are."""
        needed = np.zeros_like(self.in_source)
        for number, component in enumerate(self._layout.components):
            bits = self._pools.component_bits(number)
            if component.span == SPAN_UNKNOWN:
                needed[bits, :end] = (self.in_source | self.in_target)[bits, :end]
            else:
                needed[bits, window(end, component.span) : end] = True
        return needed

    def bring(self, copying: Copying, wanted: Presence, *, stop_early: bool) -> bool:
        """Make the target hold what is wanted, or with ``stop_early`` as far as can be; return whether it holds all."""
        for chunk in chunks(self.tasks(wanted & self.in_target)):
            copying.check(chunk)
        # Of what is wanted, the target has what is verified by now, and nothing else.
        self.in_target = np.where(wanted, self.presence(copying.sound), self.in_target)
        missing = wanted & ~self.in_target
        if stop_early and (missing & ~self.in_source).any():
            return False
        for chunk in chunks(self.tasks(missing & self.in_source)):
            copying.copy(chunk)
            lacking = self.presence({task.key: task.objects & ~copying.sound.get(task.key, 0) for task in chunk})
            self.in_source &= ~lacking
            if stop_early and lacking.any():
                break
        self.in_target |= self.presence(copying.sound)
        return not (wanted & ~self.in_target).any()

    def presence(self, objects: dict[PageKey, int]) -> Presence:
        """Spread sets of objects by page over this prompt."""
        sets = np.array([objects.get(key, 0) for key in self.prompt.keys], np.int64)
        return np.array([sets >> bit & 1 for bit in range(len(self._pools.specs))], np.bool_).reshape(self._shape)

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self._pools.specs), self.prompt.pages_count

    def _look(self, storage: Store) -> Presence:
        labels = [self._pools.label(key, bit) for bit in range(len(self._pools.specs)) for key in self.prompt.keys]
        return np.array(exist(storage, labels), np.bool_).reshape(self._shape)

    def tasks(self, wanted: Presence) -> list[CopyTask]:
        """Return the copies wanted of this prompt, page by page; pages of which nothing is wanted are left out."""
        keys = self.prompt.keys
        weights = 1 << np.arange(len(wanted), dtype=np.int64)
        sets = (wanted * weights[:, None]).sum(axis=0).tolist()
        return [CopyTask(key, objects) for key, objects in zip(keys, sets, strict=True) if objects]


def _looked_for(source: Store, target: Store, description: Description, prompts: Sequence[Prompt]) -> PrefixPlan:
    layout = description.layout
    layout.check_page_sizes({pool.name for pool in layout.pools})
    pools = ObjectPools(description.identity.digest(layout), layout)
    target.register(manifest_of(description.identity, layout), {})
    chains = [PromptChain(prompt, layout, pools, source, target) for prompt in prompts]
    return PrefixPlan(source, target, description, pools, chains, 0)


def _union(chosen: Iterable[tuple[PromptChain, Presence]]) -> int:
    """Count the objects of several prompts; one that prompts share is one, as it is copied once."""
    objects: dict[PageKey, int] = {}
    for chain, wanted in chosen:
        for task in chain.tasks(wanted):
            objects[task.key] = objects.get(task.key, 0) | task.objects
    return sum(each.bit_count() for each in objects.values())


def _begun(plan: PrefixPlan, watch: Watch) -> Copying:
    return Copying(plan.source, plan.target, plan.pools, watch)
