"""Nothing keeps a translation past the call that made it: every attribute of everything that translates is looked at.

A translation that was kept by address and length of its argument returned slots that had changed hands (sglang
#25889), so the rule is not "clear it in time" but "there is none".
"""

import ast
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.sources import python_sources
from tests.support.forward import CPU, PAGE_SIZE, allocate, batch_of, diverged, mirrored, shared
from unified_cache.core import slots as slots_module
from unified_cache.core.pool import Slots
from unified_cache.core.slots import PairedAllocator
from unified_cache.forward import (
    GraphBucket,
    GraphBuffers,
    HybridGraphBuffers,
    LayerKind,
    SwaTranslation,
    batch,
    graph,
    init_metadata,
    metadata,
    translation,
    write_locs,
)

BUCKET = GraphBucket.decode(8, 1)
MakeTranslation = Callable[[PairedAllocator], SwaTranslation]

MODULES: tuple[ModuleType, ...] = (batch, graph, metadata, translation, slots_module)

HOLDS_ONE_FORWARD = {
    "AttentionMetadata": "made for one forward and dropped with it; asks whether it is current before it is used",
    "HybridAttentionMetadata": "the same; this is where a forward's translation lives",
    "HybridGraphBuffers": "a graph reads a fixed address; all of it is overwritten before each replay",
}
"""Classes that may hold a translation, with the reason."""

HOLDS_NOTHING = frozenset({"ForwardMode", "LayerKind", "MapChange", "StoredSlots"})
"""Enums, what the tree tells the map, which nobody keeps, and marks of host slots, which no map leads to."""


@dataclass(frozen=True)
class Scene:
    """One of everything that lives longer than a forward, after a forward was translated, and what that gave."""

    residents: tuple[object, ...]
    translated: tuple[torch.Tensor, ...]


def scene(made: SwaTranslation, allocator: PairedAllocator, full: Slots) -> Scene:
    forward = batch_of([int(slot) * PAGE_SIZE + 3 for slot in full], [full[i : i + 1] for i in range(len(full))])
    built = init_metadata(forward, made)
    rebound = replace(forward, out_cache_loc=forward.out_cache_loc.clone())
    translated = (
        built.swa_out_cache_loc,
        built.swa_page_table,
        write_locs(LayerKind.SWA, rebound, built, made),
        made.translate_pages(forward.page_table[:, 0]),
    )
    buffers = GraphBuffers(BUCKET, CPU)
    buffers.refill(forward)
    residents = (made, allocator, allocator.map, allocator.full, forward, buffers, BUCKET)
    return Scene(residents, translated)


def held(roots: tuple[object, ...]) -> Iterator[object]:
    """Yield everything reachable from ``roots``: attributes, slots, containers, closures, class attributes, caches.

    Stops at modules, at classes and globals that are not ours, and at arrays, which are what is looked for.
    """
    seen: set[int] = {id(vars(module)) for module in MODULES}
    kept: list[object] = []
    waiting: list[object] = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, ModuleType):
            continue
        seen.add(id(item))
        kept.append(item)
        yield item
        if isinstance(item, torch.Tensor | np.ndarray):
            continue
        if isinstance(item, FunctionType):
            seen.add(id(item.__globals__))
        if not isinstance(item, type) or item.__module__ in {*(module.__name__ for module in MODULES), __name__}:
            waiting.extend(gc.get_referents(item))


def numbers(item: object) -> list[int]:
    """Return what ``item`` holds if it could be a translation in any dress: a tensor, an array, numbers in a row."""
    if isinstance(item, torch.Tensor):
        return [] if item.is_floating_point() else [int(number) for number in item.flatten().tolist()]
    if isinstance(item, np.ndarray):
        return [int(number) for number in item.flatten().tolist()] if item.dtype.kind in "iu" else []
    if isinstance(item, list | tuple) and all(isinstance(each, int) for each in item):
        return list(item)
    return []


def keeps(roots: tuple[object, ...], translated: tuple[torch.Tensor, ...]) -> bool:
    """Tell whether anything reachable contains one of the translations, number by number, whatever its type."""
    wanted = [numbers(tensor) for tensor in translated]
    for item in held(roots):
        found = numbers(item)
        for want in wanted:
            if any(found[i : i + len(want)] == want for i in range(len(found) - len(want) + 1)):
                return True
    return False


def spread(allocator: PairedAllocator) -> Slots:
    """Return Full slots whose peers, in their order, stand side by side nowhere: neither in the map nor a stack."""
    full = allocate(allocator, 6)[[4, 0, 3, 1, 5]]
    peers = allocator.map.peers(full)
    assert len(set(peers.tolist())) == len(peers)
    return full


@pytest.mark.parametrize("make", [shared, mirrored])
def test_after_a_forward_nothing_that_outlives_it_holds_a_translation(make: MakeTranslation) -> None:
    allocator = diverged(24, 12)
    made = make(allocator)
    after = scene(made, allocator, spread(allocator))
    assert not keeps((*after.residents, *(vars(module) for module in MODULES)), after.translated)


def test_a_class_that_appears_is_looked_at_or_says_why_not() -> None:
    allocator = diverged(24, 12)
    looked_at = {type(item).__name__ for item in scene(shared(allocator), allocator, spread(allocator)).residents}
    ours = {
        node.name
        for source in python_sources()
        if source.path.startswith("unified_cache/forward/") or source.path == "unified_cache/core/slots.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }
    assert ours - HOLDS_NOTHING - set(HOLDS_ONE_FORWARD) == looked_at
    assert (HOLDS_NOTHING | set(HOLDS_ONE_FORWARD)) <= ours


def test_no_instance_can_grow_an_attribute_that_its_class_does_not_name() -> None:
    allocator = diverged(24, 12)
    for item in scene(shared(allocator), allocator, spread(allocator)).residents:
        assert "__dict__" not in dir(item)


@pytest.mark.parametrize("make", [shared, mirrored])
def test_what_was_translated_dies_with_its_last_user(make: MakeTranslation) -> None:
    allocator = diverged()
    made = make(allocator)
    full = allocate(allocator, 2)
    forward = batch_of([int(full[0]) * PAGE_SIZE], [full])
    locs, pages = made.translate_locs(forward.out_cache_loc), made.translate_pages(forward.page_table)
    gone = [weakref.ref(locs), weakref.ref(pages)]
    del locs, pages
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_two_calls_never_return_the_same_memory() -> None:
    allocator = diverged()
    made = shared(allocator)
    locs = torch.tensor([12, 13])
    first, second = made.translate_locs(locs), made.translate_locs(locs)
    assert first.data_ptr() != second.data_ptr()
    assert first.tolist() == second.tolist()


class KeepsByAddress(SwaTranslation):
    """As it was once: remembers by address and length."""

    __slots__ = ("_kept",)

    def translate_locs(self, locs: torch.Tensor) -> torch.Tensor:
        self._kept = {(locs.data_ptr(), locs.numel()): super().translate_locs(locs)}
        return next(iter(self._kept.values()))


class KeepsACopy(SwaTranslation):
    """Remembers in a list of another kind of array."""

    __slots__ = ("_kept",)

    def translate_locs(self, locs: torch.Tensor) -> torch.Tensor:
        result = super().translate_locs(locs)
        self._kept = [("last", result.numpy().astype(np.int64))]
        return result


class KeepsNumbers(SwaTranslation):
    """Remembers no array at all."""

    __slots__ = ("_kept",)

    def translate_pages(self, slots: torch.Tensor) -> torch.Tensor:
        result = super().translate_pages(slots)
        self._kept = tuple(result.flatten().tolist())
        return result


class KeepsOnTheClass(SwaTranslation):
    """Remembers where no instance shows it."""

    __slots__ = ()
    kept: ClassVar[dict[int, torch.Tensor]] = {}

    def translate_locs(self, locs: torch.Tensor) -> torch.Tensor:
        return self.kept.setdefault(0, super().translate_locs(locs))


class KeepsInACache(SwaTranslation):
    """Remembers by what the library offers for it."""

    __slots__ = ()

    @functools.lru_cache  # noqa: B019 - the mistake under test
    def translate_locs(self, locs: torch.Tensor) -> torch.Tensor:
        return super().translate_locs(locs)


class KeepsInAClosure(SwaTranslation):
    """Remembers in a function."""

    __slots__ = ("_last",)

    def translate_locs(self, locs: torch.Tensor) -> torch.Tensor:
        result = super().translate_locs(locs)
        self._last = lambda: result
        return result


MISTAKES = (KeepsByAddress, KeepsACopy, KeepsNumbers, KeepsOnTheClass, KeepsInACache, KeepsInAClosure)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_translation_that_is_kept_is_found(mistake: type[SwaTranslation]) -> None:
    allocator = diverged(24, 12)
    made = mistake.of(allocator, PAGE_SIZE, CPU)
    after = scene(made, allocator, spread(allocator))
    assert keeps(after.residents, after.translated)


def test_what_may_hold_a_translation_for_one_forward_is_found_as_well() -> None:
    allocator = diverged(24, 12)
    made = shared(allocator)
    full = spread(allocator)
    after = scene(made, allocator, full)
    buffers = HybridGraphBuffers(BUCKET, made)
    assert not keeps((buffers,), after.translated)
    buffers.refill(batch_of([int(slot) * PAGE_SIZE + 3 for slot in full], [full[i : i + 1] for i in range(len(full))]))
    assert keeps((buffers,), after.translated)
