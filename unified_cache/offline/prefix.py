"""Copies the prefixes of single prompts: the chains of their pages in one namespace.

A page key is a digest over namespace and tokens, and no store can tell the namespace of a digest. So a prefix is named
by its tokens and its namespace, as an engine would, and its keys are computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from unified_cache.errors import LayoutError
from unified_cache.offline.copying import Copying, CopyResult, CopyTask, chunks, exist
from unified_cache.offline.listing import ObjectPools
from unified_cache.offline.upkeep import Watch
from unified_cache.page import PageKey, Prompt
from unified_cache.pool import ModelLayout
from unified_cache.storage_backends.manifest import Description, manifest_of
from unified_cache.storage_backends.protocol import StorageBackend, StorageReader
from unified_cache.window import SPAN_UNTOLD, restorable_ends, window

__all__ = ["Prefetched", "PrefixPlan", "backup_prefixes", "plan_backup", "plan_prefetch", "prefetch_prefixes"]

Presence = npt.NDArray[np.bool_]
"""Whether each object of a prompt is there, shape (pools with objects, pages)."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Restorable length of one prompt."""

    prompt_pages: int
    """Whole pages of the prompt."""
    promised_pages: int
    """The longest prefix that both stores together seemed to have."""
    restorable_pages: int
    """The longest prefix that can be restored from the target now; all of it was verified."""


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Prompts, and the objects of their pages that two stores hold; no page was read."""

    source: StorageReader
    target: StorageBackend
    description: Description
    pools: ObjectPools
    chains: Sequence["PromptChain"]
    objects_count: int
    """Objects to copy or, where the target has them, to check; those of several prompts counted once."""


def plan_backup(
    source: StorageReader, target: StorageBackend, description: Description, prompts: Sequence[Prompt]
) -> PrefixPlan:
    """Look for every page of the prompts' chains, in every pool, also beyond what can be restored.

    Raises:
        LayoutError: a pool's pages have another number of tokens, so that no key of a prompt names them.
        StorageError: either store fails.
    """
    plan = _looked_for(source, target, description, prompts)
    return replace(plan, objects_count=_union((chain, chain.in_source) for chain in plan.chains))


def plan_prefetch(
    source: StorageReader, target: StorageBackend, description: Description, prompts: Sequence[Prompt]
) -> PrefixPlan:
    """Look for the longest prefix of each prompt that both stores together can complete.

    Where a component's span is not told, all that there is of it within the prefix belongs to it, and what is missing
    does not shorten it: whether a resume can do without, only the engine knows.

    Raises:
        LayoutError: no component says which pages a resume needs; or as ``plan_backup``.
        StorageError: either store fails.
    """
    if all(component.span == SPAN_UNTOLD for component in description.layout.components):
        raise LayoutError(
            "expected a component that says which pages a resume needs, found spans that are not told; "
            "a backup copies every page"
        )
    plan = _looked_for(source, target, description, prompts)
    return replace(plan, objects_count=_union((chain, chain.needed(chain.end)) for chain in plan.chains))


def backup_prefixes(plan: PrefixPlan, watch: Watch) -> CopyResult:
    """Copy the pages of the prompts. Objects that the target seems to have are read there, and replaced if flawed.

    Raises:
        StorageError: either store fails. What was copied so far stays; the same plan goes on.
    """
    copying = _begun(plan, watch)
    for chain in plan.chains:
        chain.bring(copying, chain.in_source.copy(), stop_early=False)
    return copying.finish()


def prefetch_prefixes(plan: PrefixPlan, watch: Watch) -> tuple[list[Prefetched], CopyResult]:
    """Make the longest prefix of each prompt restorable from the target that both stores together can complete.

    Copies what a resume there needs and the target lacks: of Full every page, of every other component the window
    before the end. Where a page proves flawed, or finds no room, the next shorter prefix is taken instead.

    Raises:
        StorageError: either store fails. What was copied so far stays; the same plan goes on.
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

    __slots__ = ("_layout", "_pools", "in_source", "in_target", "prompt")

    def __init__(
        self, prompt: Prompt, layout: ModelLayout, pools: ObjectPools, source: StorageReader, target: StorageBackend
    ) -> None:
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
        told = [
            (number, component.span)
            for number, component in enumerate(self._layout.components)
            if component.span != SPAN_UNTOLD
        ]
        holes: list[npt.NDArray[np.bool_]] = [
            np.logical_not(present[self._pools.component_bits(number)].all(axis=0)) for number, _ in told
        ]
        ok = restorable_ends([span for _, span in told], holes, 0, self.prompt.pages_count, [0] * len(told))
        ends = np.flatnonzero(ok)
        return int(ends[-1]) + 1 if ends.size else 0

    def needed(self, end: int) -> Presence:
        """Tell which objects a resume after ``end`` pages needs; of spans that are not told, all that there are."""
        needed = np.zeros_like(self.in_source)
        for number, component in enumerate(self._layout.components):
            bits = self._pools.component_bits(number)
            if component.span == SPAN_UNTOLD:
                needed[bits, :end] = (self.in_source | self.in_target)[bits, :end]
            else:
                needed[bits, window(end, component.span) : end] = True
        return needed

    def bring(self, copying: Copying, wanted: Presence, *, stop_early: bool) -> bool:
        """Make the target hold what is wanted, and strike what proves not to be there; True where it holds all now.

        With ``stop_early`` it ends at the first pages that cannot be had.
        """
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

    def _look(self, storage: StorageReader) -> Presence:
        labels = [self._pools.label(key, bit) for bit in range(len(self._pools.specs)) for key in self.prompt.keys]
        return np.array(exist(storage, labels), np.bool_).reshape(self._shape)

    def tasks(self, wanted: Presence) -> list[CopyTask]:
        """Say page by page what of this prompt is wanted; pages of which nothing is wanted are left out."""
        keys = self.prompt.keys
        weights = 1 << np.arange(len(wanted), dtype=np.int64)
        sets = (wanted * weights[:, None]).sum(axis=0).tolist()
        return [
            CopyTask(keys[page], keys[page - 1] if page else None, objects)
            for page, objects in enumerate(sets)
            if objects
        ]


def _looked_for(
    source: StorageReader, target: StorageBackend, description: Description, prompts: Sequence[Prompt]
) -> PrefixPlan:
    layout = description.layout
    layout.check_page_sizes({pool.name for pool in layout.pools})
    pools = ObjectPools(description.identity.digest(layout), layout)
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
    plan.target.register(manifest_of(plan.description.identity, plan.description.layout), {})
    return Copying(plan.source, plan.target, plan.pools, watch)
