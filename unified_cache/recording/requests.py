"""Requests of a cache, from their first look-up to their release."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from unified_cache.page import Prompt
from unified_cache.recording.note import FoundByTier, RequestNote
from unified_cache.tree import Lock

__all__ = ["CacheRequests"]

WAITING_MAX = 1_024
"""Prompts looked up and not locked yet, and requests that run: of more, the oldest is let go or taken for over."""


class _LookedUp:
    """Look-ups of one prompt, the first and the farthest."""

    __slots__ = ("at_s", "device_end", "host_end", "prompt")

    def __init__(self, prompt: Prompt, device_end: int, host_end: int) -> None:
        self.prompt = prompt
        """Kept, so that its ``id`` is nobody else's meanwhile."""
        self.at_s = time.time()
        self.device_end = device_end
        self.host_end = host_end


class CacheRequests:
    """A ``RequestWatcher`` that makes a note of each request once it is over. For the owner's thread.

    Tiers are told apart by the first look-up of a prompt: what the device had then, and what host memory had beyond
    that; what the lock pins beyond both has come from storage meanwhile. An engine looks up, prefetches, loads and
    locks with one ``Prompt``.
    """

    __slots__ = ("_components", "_looked_up", "_running", "_take")

    def __init__(self, components: Sequence[str], take: Callable[[RequestNote], None]) -> None:
        """Name the layout's components; ``take`` is given each note."""
        self._components = tuple(components)
        self._take = take
        self._looked_up: OrderedDict[int, _LookedUp] = OrderedDict()
        """By the ``id`` of the prompt."""
        self._running: OrderedDict[Lock, RequestNote] = OrderedDict()
        """By the lock that a request has now."""

    def matched(self, prompt: Prompt, device_end: int, host_end: int) -> None:
        """Take a look-up; only the first of a prompt tells where its pages were."""
        if id(prompt) not in self._looked_up:
            self._looked_up[id(prompt)] = _LookedUp(prompt, device_end, host_end)
            if len(self._looked_up) > WAITING_MAX:
                self._looked_up.popitem(last=False)

    def locked(self, prompt: Prompt, lock: Lock, bound_by: tuple[int, ...]) -> None:
        """Begin a request."""
        first = self._looked_up.pop(id(prompt), None)
        if first is None:
            first = _LookedUp(prompt, lock.end, lock.end)
        device = min(first.device_end, lock.end)
        memory = min(first.host_end, lock.end)
        found = FoundByTier(device, memory - device, lock.end - memory)
        names = tuple(self._components[number] for number in bound_by)
        self._running[lock] = RequestNote(first.at_s, prompt, 0, found, names)
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
