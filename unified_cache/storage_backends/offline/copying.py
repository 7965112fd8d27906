"""Copies pages from one store to another: read, verify, put; KV before sidecars, a bounded batch at a time.

A copy keeps no state: the objects that the target holds at their right length are those already copied. An interrupted
copy is resumed by starting it again, and two copies may run at the same time. Whole identities are copied, or the
prefixes of prompts, which are named by tokens and namespace as an engine names them. What the target holds is not read:
scrub it if you doubt it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import LayoutError
from unified_cache.core.page import PageKey, Prompt
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_UNKNOWN, restorable_ends, window
from unified_cache.storage_backends.manifest import Description, manifest_of
from unified_cache.storage_backends.offline.listing import (
    Findings,
    ListedPage,
    ObjectCount,
    ObjectPools,
    ReadObject,
    Watch,
    batches,
    count_objects,
    empty_page,
    pages_of,
    read_verified,
    total_of,
)
from unified_cache.storage_backends.protocol import NAMES_MAX, Answer, Level, Store, StoredObject

CHUNK_PAGES = 64
"""Pages whose objects are copied together, one pool after the other: an interrupted copy leaves whole pages behind it,
and at most this many pages that have KV and no sidecars."""

Held = Mapping[PageKey, int]
"""Objects of each page that a store holds, or that are to be copied: a bit for each pool, see ``ObjectPools``."""


@dataclass(slots=True)
class CopyResult:
    """Counts of a copy: objects copied, skipped, gone, declined and flawed."""

    copied: ObjectCount = field(default_factory=ObjectCount)
    skipped: ObjectCount = field(default_factory=ObjectCount)
    gone_count: int = 0
    """Objects that the source evicted while the copy ran; no failure."""
    declined_count: int = 0
    """Objects that the target had no room for, or evicted before the copy ended."""
    findings: Findings = field(default_factory=Findings)
    """Objects of the source; none of them was copied."""

    @property
    def is_complete(self) -> bool:
        """Whether the target holds all requested objects that the source still has."""
        return not self.declined_count and not self.findings.total


class Copying:
    """Copies objects of one identity between two stores and counts them."""

    def __init__(self, source: Store, target: Store, pools: ObjectPools, watch: Watch) -> None:
        self._source = source
        self._target = target
        self._watch = watch
        self._level = Level.DURABLE if target.capability().durable else Level.CACHED
        self.pools = pools
        self.result = CopyResult()
        self.copied: Counter[PageKey] = Counter()
        """Objects of each page that were copied."""

    def copy(self, tasks: Held) -> None:
        """Copy the objects of a few pages, KV before sidecars."""
        for bit in range(len(self.pools.specs)):
            size = self.pools.object_bytes(bit)
            wanted = (StoredObject(self.pools.label(key, bit), size) for key, bits in tasks.items() if bits >> bit & 1)
            for batch in batches(wanted):
                readings = read_verified(self._source, list(map(empty_page, batch)))
                self._store(bit, [reading for reading in readings if reading.outcome is Answer.HIT])
                for reading in readings:
                    self._count_fault(reading)
                self._watch(len(batch), sum(found.object_bytes for found in batch))

    def finish(self) -> CopyResult:
        """Ask the target again for what was copied: under a cap it may have evicted the first objects for the last."""
        there = held(self._target, self.pools, self.copied)
        for key, objects in self.copied.items():
            self.result.declined_count += (objects & ~there.get(key, 0)).bit_count()
        return self.result

    def _store(self, bit: int, readings: Sequence[ReadObject]) -> None:
        stored = self._target.put([reading.page for reading in readings], self._level) if readings else []
        for reading, ok in zip(readings, stored, strict=True):
            if ok:
                self.copied[reading.page.label.key] |= 1 << bit
                self.result.copied.add(reading.object_bytes)
            else:
                self.result.declined_count += 1

    def _count_fault(self, reading: ReadObject) -> None:
        if reading.outcome is Answer.MISS:
            self.result.gone_count += 1
        elif reading.outcome is not Answer.HIT:
            self.result.findings.add(reading.page.label, reading.outcome, reading.reason)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Difference between two stores for some prompts: the objects to copy, and those that need no copy."""

    pools: ObjectPools
    tasks: Held
    todo: ObjectCount
    skipped: ObjectCount


def copy_identity(source: Store, target: Store, description: Description, watch: Watch) -> CopyResult:
    """Copy the objects of one identity that the target does not have at their length. If that fails, copy again.

    Both stores are listed side by side, a few pages at a time. Objects of the source that no engine could use are
    findings; objects of the target at a wrong length are replaced.
    """
    identity = description.identity.digest(description.layout)
    # A service lists registered identities, and nothing else.
    target.register(manifest_of(description.identity, description.layout), {})
    pools = ObjectPools(identity, description.layout)
    copying = Copying(source, target, pools, watch)
    result = copying.result
    there = ObjectCount()

    def count(objects_count: int, object_bytes: int) -> None:
        there.objects_count += objects_count

    pairs = _pairs(pages_of(source, identity, pools), pages_of(target, identity, pools, count))
    while some := list(islice(pairs, CHUNK_PAGES)):
        stale: list[Label] = []
        tasks: dict[PageKey, int] = {}
        skipped = ObjectCount()
        for have, found in some:
            for misfit in have.misfits:
                result.findings.add(misfit.label, Answer.FLAWED, pools.misfit(misfit) or "")
            if have.present & ~found.present:
                tasks[have.key] = have.present & ~found.present
            if have.present:
                stale += [misfit.label for misfit in found.misfits]
            for bit in range(len(pools.specs)):
                if have.present & found.present & 1 << bit:
                    skipped.add(pools.object_bytes(bit))
        if skipped.objects_count:
            result.skipped.add_all(skipped)
            watch(skipped.objects_count, skipped.object_bytes)
        if stale:
            there.objects_count -= target.remove(stale)
        copying.copy(tasks)
        copying.copied.clear()
    # Under a cap the target may have evicted the first objects for the last.
    left = total_of([count_objects(target, identity)]).objects_count
    result.declined_count += max(there.objects_count + result.copied.objects_count - left, 0)
    return result


def _pairs(source: Iterator[ListedPage], target: Iterator[ListedPage]) -> Iterator[tuple[ListedPage, ListedPage]]:
    """Yield every page of the source beside what the target has of it; both come in the order of their keys."""
    end = None
    there = next(target, end)
    for have in source:
        while there is not None and there.key < have.key:
            there = next(target, end)
        yield have, there if there is not None and there.key == have.key else ListedPage(have.key, 0, ())
    for _ in target:
        pass  # counted, too


def plan_prompts(source: Store, target: Store, description: Description, prompts: Sequence[Prompt]) -> CopyPlan:
    """Look for every page of some prompts, in every pool, also beyond what can be restored; no reads.

    Raises:
        LayoutError: a pool's pages have another number of tokens, so that no key of a prompt names them.
    """
    pools = _pools_of(description)
    target.register(manifest_of(description.identity, description.layout), {})
    keys = list(dict.fromkeys(key for prompt in prompts for key in prompt.keys))
    return _difference(pools, held(source, pools, keys), held(target, pools, keys))


def copy_planned(source: Store, target: Store, plan: CopyPlan, watch: Watch) -> CopyResult:
    """Copy the objects of a plan. If that fails, what was copied stays: plan and copy again to go on."""
    copying = Copying(source, target, plan.pools, watch)
    copying.result.skipped = plan.skipped
    for chunk in _chunks(plan.tasks):
        copying.copy(chunk)
    return copying.finish()


def held(storage: Store, pools: ObjectPools, keys: Iterable[PageKey]) -> dict[PageKey, int]:
    """Return which objects of some pages a store has, asking for a bounded number at a time."""
    labels = ((bit, pools.label(key, bit)) for bit in range(len(pools.specs)) for key in keys)
    found: Counter[PageKey] = Counter()
    while some := list(islice(labels, NAMES_MAX)):
        for (bit, label), there in zip(some, storage.exists([label for _, label in some]), strict=True):
            if there:
                found[label.key] |= 1 << bit
    return dict(found)


def _pools_of(description: Description) -> ObjectPools:
    layout = description.layout
    layout.check_page_sizes({pool.name for pool in layout.pools})
    return ObjectPools(description.identity.digest(layout), layout)


def _difference(pools: ObjectPools, have: Held, there: Held) -> CopyPlan:
    todo, skipped = ObjectCount(), ObjectCount()
    tasks: dict[PageKey, int] = {}
    for key, present in have.items():
        at_target = there.get(key, 0)
        if present & ~at_target:
            tasks[key] = present & ~at_target
        for bit in range(len(pools.specs)):
            if present >> bit & 1:
                (skipped if at_target >> bit & 1 else todo).add(pools.object_bytes(bit))
    return CopyPlan(pools, tasks, todo, skipped)


def _chunks(tasks: Held) -> Iterator[Held]:
    """Yield tasks in runs of ``CHUNK_PAGES``."""
    waiting = iter(tasks.items())
    while chunk := dict(islice(waiting, CHUNK_PAGES)):
        yield chunk


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Restorable length of one prompt."""

    prompt_pages: int
    promised_pages: int
    """The longest prefix that both stores together seemed to have."""
    restorable_pages: int
    """The longest prefix that can be restored from the target now, as far as is known without reading there."""


class PrefixPrefetch:
    """Makes the longest prefix of each prompt restorable from the target that both stores together can complete.

    Copies what a resume there needs and the target lacks: of Full every page, of every other component the window
    before the end. Where a page proves flawed, or finds no room, the next shorter prefix is taken instead. Where a
    component's span is not known, all that there is of it within the prefix belongs to it, and what is missing does not
    shorten it: whether a resume can do without, only the engine knows.
    """

    def __init__(self, source: Store, target: Store, description: Description, prompts: Sequence[Prompt]) -> None:
        """Look which pages the stores have; no reads.

        Raises:
            LayoutError: as ``plan_prompts``, or no component says which pages a resume needs.
        """
        self._components = description.layout.components
        if all(component.span == SPAN_UNKNOWN for component in self._components):
            raise LayoutError(
                "expected a component that says which pages a resume needs, found spans that are unknown; "
                "a backup copies every page"
            )
        self._source, self._target, self._prompts = source, target, prompts
        self._pools = _pools_of(description)
        target.register(manifest_of(description.identity, description.layout), {})
        keys = list(dict.fromkeys(key for prompt in prompts for key in prompt.keys))
        self._have, self._there = held(source, self._pools, keys), held(target, self._pools, keys)
        self._promised = list(map(self._end, prompts))
        needed: Counter[PageKey] = Counter()
        for prompt, end in zip(prompts, self._promised, strict=True):
            for key, objects in self._needed(prompt, end).items():
                needed[key] |= objects
        self.plan = _difference(self._pools, needed, self._there)

    def run(self, watch: Watch) -> tuple[list[Prefetched], CopyResult]:
        """Copy; return what can be restored of each prompt, and the counts."""
        copying = Copying(self._source, self._target, self._pools, watch)
        copying.result.skipped = self.plan.skipped
        for prompt in self._prompts:
            # A round that fails has found an object of this end to be nowhere, so the next round's end is another.
            while (end := self._end(prompt)) and not self._bring(copying, self._needed(prompt, end)):
                pass
        result = copying.finish()
        self._there = held(self._target, self._pools, dict.fromkeys(key for each in self._prompts for key in each.keys))
        found = [
            Prefetched(prompt.pages_count, end, self._longest(prompt, self._there))
            for prompt, end in zip(self._prompts, self._promised, strict=True)
        ]
        return found, result

    def _bring(self, copying: Copying, needed: Held) -> bool:
        """Copy what is needed and not there until something cannot be had; return whether all is there."""
        for chunk in _chunks(_difference(self._pools, needed, self._there).tasks):
            copying.copy(chunk)
            is_short = False
            for key, objects in chunk.items():
                self._there[key] = self._there.get(key, 0) | copying.copied[key]
                lacking = objects & ~self._there[key]
                self._have[key] = self._have.get(key, 0) & ~lacking
                is_short |= bool(lacking)
            if is_short:
                return False
        return True

    def _end(self, prompt: Prompt) -> int:
        both = {key: self._have.get(key, 0) | self._there.get(key, 0) for key in prompt.keys}
        return self._longest(prompt, both)

    def _longest(self, prompt: Prompt, present: Held) -> int:
        """Return the longest prefix that can be restored from these objects, in pages."""
        sets = np.array([present.get(key, 0) for key in prompt.keys], np.int64)
        masks = [self._pools.component_bits(number) for number in range(len(self._components))]
        tombstones: list[npt.NDArray[np.bool_]] = [sets & mask != mask for mask in masks]
        ok = restorable_ends([each.span for each in self._components], tombstones, prompt.pages_count)
        ends = np.flatnonzero(ok)
        return int(ends[-1]) + 1 if ends.size else 0

    def _needed(self, prompt: Prompt, end: int) -> dict[PageKey, int]:
        """Return which objects a resume after ``end`` pages needs; of spans that are not known, all that there are."""
        needed: Counter[PageKey] = Counter()
        for number, component in enumerate(self._components):
            bits = self._pools.component_bits(number)
            if component.span == SPAN_UNKNOWN:
                for key in prompt.keys[:end]:
                    needed[key] |= (self._have.get(key, 0) | self._there.get(key, 0)) & bits
            else:
                for key in prompt.keys[window(end, component.span) : end]:
                    needed[key] |= bits
        return dict(needed)
