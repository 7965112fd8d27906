"""Pages of the linker's host tier by the engine's hashes: where they lie, who has pinned them, in what order they go.

SGLang tells its linker the hashes of a prompt's tail, and neither tokens nor parents, so there is no tree to walk: each
page stands for itself. What a prompt can be resumed from is a question of windows (``core.window``), as everywhere.

    reserved      slots of pages that are on their way; nobody finds them
    held          pages that are complete, found by key; the least recent goes first
    pinned        held pages that do not go: of a look-up, a load under way, a write to the store

A look-up pins what it has reported, since SGLang may load that; it replaces the pins of the same request's look-up
before. Nothing tells when a request is given up, so these pins end after ``LOOKUP_PIN_S``, and the oldest of them go
where they are more than a part of the tier.

Of a prompt the last pages go before its head, without which they are worth nothing: whatever makes a page recent makes
those before it more so, as far as a look-up or an offload has shown which they are. The device may keep the head of a
prompt for long, so that nobody asks for it here.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock

import numpy as np
import numpy.typing as npt

from unified_cache.core.pool import Slots, numbers_of
from unified_cache.core.slots import SlotAllocator
from unified_cache.core.window import SPAN_ALL, restorable_ends, window

LOOKUP_PIN_S = 30.0
"""Longest time that a look-up keeps pages. SGLang loads in the step of the last look-up, or looks up again."""

LOOKUP_PIN_PARTS = 2
"""Look-ups of all requests together may pin one page in so many of a component; the last one may pin what it found."""

PARENTS_PARTS = 2
"""Pages whose order is remembered, for each page that the leading component can hold."""

ComponentKeys = Mapping[str, Sequence[str]]
"""By component: hashes of pages."""

ComponentSlots = Mapping[str, Slots]
"""By component: slots of pages."""


class _ComponentPages:
    """Pages of one component. Under the guard of the tier."""

    __slots__ = ("allocator", "keys", "pins", "slots")

    def __init__(self, pages_max: int) -> None:
        self.allocator = SlotAllocator(pages_max)
        self.slots: OrderedDict[str, int] = OrderedDict()
        """Of the pages held, least recent first."""
        self.keys: list[str | None] = [None] * (pages_max + 1)
        """By slot: key of the page held there."""
        self.pins: npt.NDArray[np.int32] = np.zeros(pages_max + 1, np.int32)

    def has_room(self, count: int) -> bool:
        """Evict until ``count`` slots are free; False where too many pages are pinned."""
        short = count - self.allocator.free_count
        if short <= 0:
            return True
        victims: list[int] = []
        passed: list[tuple[str, int]] = []
        while len(victims) < short and self.slots:
            key, slot = self.slots.popitem(last=False)
            if self.pins[slot]:
                passed.append((key, slot))
            else:
                victims.append(slot)
                self.keys[slot] = None
        self.slots.update(passed)  # they are in use, so the most recent
        self.allocator.free(np.array(victims, np.int32))
        return len(victims) >= short

    def hold(self, key: str, slot: int) -> None:
        """Make a page the most recent of those held, in this slot or the one that held it before."""
        held = self.slots.setdefault(key, slot)
        self.slots.move_to_end(key)
        if held != slot:
            self.allocator.free(np.array([slot], np.int32))
        self.keys[held] = key

    def touch(self, keys: Sequence[str]) -> None:
        """Make pages recent, the first of them most of all."""
        for key in reversed(keys):
            self.slots.move_to_end(key)

    def pin_held(self, keys: Sequence[str]) -> tuple[list[str], Slots]:
        """Pin those of these pages that are held; return their keys and slots."""
        held = [key for key in keys if key in self.slots]
        slots: Slots = np.array([self.slots[key] for key in held], np.int32)
        self.pins[slots] += 1
        return held, slots

    def unpin(self, slots: Slots) -> None:
        """Take a pin from each; free those whose pages are not held any more."""
        self.pins[slots] -= 1
        gone = [slot for slot in slots[self.pins[slots] == 0].tolist() if self.keys[slot] is None]
        self.allocator.free(np.array(gone, np.int32))

    def forget_all(self) -> None:
        """Hold no page any more; slots that are pinned are freed with their last pin."""
        unpinned = [slot for slot in self.slots.values() if not self.pins[slot]]
        for slot in self.slots.values():
            self.keys[slot] = None
        self.slots.clear()
        self.allocator.free(np.array(unpinned, np.int32))


@dataclass(frozen=True, slots=True)
class _LookupPins:
    slots: ComponentSlots
    since_s: float


class LinkerHostTier:
    """Index of the pages in host memory; the bytes are the caller's. Thread-safe, and no call waits for more."""

    def __init__(self, pages_max: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """Take the slots of each component, numbered from 1; the first component is the one all others depend on."""
        self._pages = {name: _ComponentPages(pages) for name, pages in pages_max.items()}
        self._lookups: OrderedDict[str, _LookupPins] = OrderedDict()
        """By request, the latest last."""
        self._lookup_pins = dict.fromkeys(pages_max, 0)
        self._leading = next(iter(self._pages.values()))
        self._parents: OrderedDict[str, str] = OrderedDict()
        """By page the one before it, of the pages that were last asked for or held."""
        self._clock = clock
        self._guard = Lock()
        self.clears_count = 0
        """Times that all was forgotten: what was on its way before is not held afterwards."""

    def lookup(self, rid: str, keys: Sequence[str], spans: Mapping[str, int]) -> list[int]:
        """Return every number of pages from which the request can be resumed, ascending, and pin these pages.

        ``spans`` says by component how many pages before an end a resume needs.
        """
        with self._guard:
            self._record_chain(keys)
            count = self._prefix(keys, spans)
            lacking = [None if span >= SPAN_ALL else self._lacking(name, keys[:count]) for name, span in spans.items()]
            mask = restorable_ends(list(spans.values()), lacking, count)
            ends: list[int] = (numbers_of(mask) + 1).tolist()
            # Pinned before the older pins go, so that a request keeps what it was answered.
            older = self._lookups.pop(rid, None)
            if ends:
                self._pin_lookup(rid, keys[: ends[-1]], spans)
            if older is not None:
                self._unpin_lookup(older)
            self._touch_before(keys)
            self._end_lookups()
            return ends

    def held_prefix(self, keys: Sequence[str], spans: Mapping[str, int]) -> int:
        """Return how many pages from the start are held by every component that needs all of them."""
        with self._guard:
            return self._prefix(keys, spans)

    def lacking(self, component: str, keys: Sequence[str]) -> list[str]:
        """Return those of these pages that a component does not hold; the others become recent, and stay for them."""
        with self._guard:
            pages = self._pages[component]
            pages.touch([key for key in keys if key in pages.slots])
            return [key for key in keys if key not in pages.slots]

    def take(self, rid: str, keys: ComponentKeys) -> ComponentSlots | None:
        """Pin pages for a load, in the place of the request's look-up; None if one of them is not held."""
        with self._guard:
            is_whole = self._holds(keys)
            slots = {name: self._pages[name].pin_held(of)[1] for name, of in keys.items()} if is_whole else None
            older = self._lookups.pop(rid, None)
            if older is not None:
                self._unpin_lookup(older)
            return slots

    def reserve(self, counts: Mapping[str, int]) -> ComponentSlots | None:
        """Return slots for pages that are on their way, evicting others; None where there is no room for all."""
        with self._guard:
            if not all(self._pages[name].has_room(count) for name, count in counts.items()):
                return None
            reserved = {name: self._pages[name].allocator.allocate(count) for name, count in counts.items()}
            return {name: slots for name, slots in reserved.items() if slots is not None}

    def free(self, slots: ComponentSlots) -> None:
        """Take back reserved slots."""
        with self._guard:
            for name, of in slots.items():
                self._pages[name].allocator.free(of)

    def publish(self, keys: ComponentKeys, slots: ComponentSlots, clears_count: int) -> bool:
        """Hold pages whose bytes are complete in reserved slots, all at once; False if all was forgotten meanwhile."""
        with self._guard:
            for name, of in slots.items():
                pages = self._pages[name]
                if clears_count != self.clears_count:
                    pages.allocator.free(of)
                    continue
                for key, slot in reversed(list(zip(keys[name], of.tolist(), strict=True))):
                    pages.hold(key, slot)
            return clears_count == self.clears_count

    def holds(self, keys: ComponentKeys) -> bool:
        """Return whether all these pages are held, those of each component a chain; they become recent then."""
        with self._guard:
            is_whole = self._holds(keys)
            if is_whole:
                for name, of in keys.items():
                    self._pages[name].touch(of)
                    self._record_chain(of)
                    self._touch_before(of)
            return is_whole

    def pin_held(self, component: str, keys: Sequence[str]) -> tuple[list[str], Slots]:
        """Pin those of these pages that a component holds; return their keys and slots."""
        with self._guard:
            return self._pages[component].pin_held(keys)

    def unpin(self, slots: ComponentSlots) -> None:
        """Take a pin from each page."""
        with self._guard:
            for name, of in slots.items():
                self._pages[name].unpin(of)

    def clear(self) -> None:
        """Hold nothing any more, and end the pins of all look-ups; other pins end when their owners say so."""
        with self._guard:
            self.clears_count += 1
            for pages in self._pages.values():
                pages.forget_all()
            while self._lookups:
                self._unpin_lookup(self._lookups.popitem()[1])

    def pages_counts(self) -> dict[str, tuple[int, int]]:
        """Return by component how many pages are held, and how many slots are free."""
        with self._guard:
            return {name: (len(pages.slots), pages.allocator.free_count) for name, pages in self._pages.items()}

    def _record_chain(self, keys: Sequence[str]) -> None:
        """Record which page comes before which."""
        if keys and keys[-1] not in self._parents:
            self._parents.update((key, parent) for parent, key in pairwise(keys))
            while len(self._parents) > PARENTS_PARTS * self._leading.allocator.capacity:
                self._parents.popitem(last=False)

    def _touch_before(self, keys: Sequence[str]) -> None:
        """Make what comes before these pages more recent than they are, as far as it is known and held."""
        key = keys[0] if keys else ""
        for _ in range(len(self._leading.slots)):
            parent = self._parents.get(key)
            if parent is None or parent not in self._leading.slots:
                break
            self._leading.slots.move_to_end(parent)
            key = parent

    def _prefix(self, keys: Sequence[str], spans: Mapping[str, int]) -> int:
        count = len(keys)
        for name, span in spans.items():
            if span >= SPAN_ALL:
                slots = self._pages[name].slots
                count = next((number for number in range(count) if keys[number] not in slots), count)
        return count

    def _lacking(self, component: str, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        slots = self._pages[component].slots
        return np.fromiter([key not in slots for key in keys], np.bool_, len(keys))

    def _holds(self, keys: ComponentKeys) -> bool:
        return all(key in self._pages[name].slots for name, of in keys.items() for key in of)

    def _pin_lookup(self, rid: str, keys: Sequence[str], spans: Mapping[str, int]) -> None:
        """Pin the pages that a resume at any end needs, and make those of the last end recent."""
        slots: dict[str, Slots] = {}
        for name, span in spans.items():
            pages = self._pages[name]
            slots[name] = pages.pin_held(keys)[1]
            pages.touch(keys[window(len(keys), span) :])
            self._lookup_pins[name] += len(slots[name])
        self._lookups[rid] = _LookupPins(slots, self._clock())

    def _unpin_lookup(self, pins: _LookupPins) -> None:
        for name, slots in pins.slots.items():
            self._pages[name].unpin(slots)
            self._lookup_pins[name] -= len(slots)

    def _end_lookups(self) -> None:
        """End the pins of look-ups that are too old, or that are too many together."""
        due_s = self._clock() - LOOKUP_PIN_S
        while self._lookups:
            oldest = next(iter(self._lookups.values()))
            are_many = len(self._lookups) > 1 and any(
                LOOKUP_PIN_PARTS * pins > self._pages[name].allocator.capacity
                for name, pins in self._lookup_pins.items()
            )
            if oldest.since_s > due_s and not are_many:
                break
            self._unpin_lookup(self._lookups.popitem(last=False)[1])
