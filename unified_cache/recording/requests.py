"""Requests of a cache, from their first look-up to their release."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from unified_cache.page import Prompt
from unified_cache.recording.note import FoundByTier, RequestNote
from unified_cache.tree import Lock

__all__ = ["CacheRequests", "FirstLookups"]

WAITING_MAX = 1_024
"""Prompts looked up and not locked yet, and requests that run: of more, the oldest is let go or taken for over."""


class FirstLookup(NamedTuple):
    """First look-up of a prompt: how far device, and device and host, had it then; one is made at every request."""

    prompt: Prompt
    """Kept, so that its ``id`` is nobody else's meanwhile."""
    at_s: float
    """In seconds since the epoch."""
    device_end: int
    host_end: int

    def found(self, end: int) -> FoundByTier:
        """Return by tier where the pages were of a request that begins at ``end``."""
        device = min(self.device_end, end)
        memory = min(self.host_end, end)
        return FoundByTier(device, memory - device, end - memory)


class FirstLookups:
    """First look-ups of prompts that are not locked yet. For the owner's thread.

    They tell tiers apart: what the device had then, and what host memory had beyond that; what is locked beyond both
    has come from storage meanwhile. An engine looks up, prefetches, loads and locks with one ``Prompt``.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, FirstLookup] = OrderedDict()
        """By the ``id`` of the prompt."""

    def note(self, prompt: Prompt, device_end: int, host_end: int) -> None:
        """Take a look-up; of a prompt only the first counts."""
        if id(prompt) not in self._waiting:
            self._waiting[id(prompt)] = FirstLookup(prompt, time.time(), device_end, host_end)
            if len(self._waiting) > WAITING_MAX:
                self._waiting.popitem(last=False)

    def take(self, prompt: Prompt) -> FirstLookup | None:
        """Return the first look-up of a prompt that is locked now, once; None where none was seen."""
        return self._waiting.pop(id(prompt), None)


class CacheRequests:
    """A ``RequestWatcher`` that makes a note of each request once it is over. For the owner's thread."""

    __slots__ = ("_components", "_lookups", "_running", "_take")

    def __init__(self, components: Sequence[str], take: Callable[[RequestNote], None]) -> None:
        """Name the layout's components; ``take`` is given each note."""
        self._components = tuple(components)
        self._take = take
        self._lookups = FirstLookups()
        self._running: OrderedDict[Lock, RequestNote] = OrderedDict()
        """By the lock that a request has now."""

    def matched(self, prompt: Prompt, device_end: int, host_end: int) -> None:
        """Take a look-up; only the first of a prompt tells where its pages were."""
        self._lookups.note(prompt, device_end, host_end)

    def locked(self, prompt: Prompt, lock: Lock, bound_by: tuple[int, ...]) -> None:
        """Begin a request."""
        first = self._lookups.take(prompt) or FirstLookup(prompt, time.time(), lock.end, lock.end)
        names = tuple(self._components[number] for number in bound_by)
        self._running[lock] = RequestNote(first.at_s, prompt, 0, first.found(lock.end), names)
        if len(self._running) > WAITING_MAX:
            self._end(*self._running.popitem(last=False))

    def inserted(self, before: Lock, after: Lock) -> None:
        """Go on with another lock."""
        note = self._running.pop(before, None)
        if note is not None:
            self._running[after] = note

    def released(self, lock: Lock) -> None:
        """End a request."""
        note = self._running.pop(lock, None)
        if note is not None:
            self._end(lock, note)

    def _end(self, lock: Lock, note: RequestNote) -> None:
        self._take(replace(note, output_pages=max(0, lock.end - note.pages_count)))
