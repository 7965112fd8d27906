"""Requests as they are recorded, and those of a cache from their lock to their release."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unified_cache.core.hits import Hits
from unified_cache.core.page import Prompt
from unified_cache.tree import Lock

__all__ = ["RequestRecord", "RequestWatcher"]

RUNNING_MAX = 1_024
"""Requests that run: of more, the oldest is taken for over."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that is over."""

    at_s: float
    """Time of its lock, in seconds since the epoch."""
    prompt: Prompt
    output_pages: int
    """Whole pages that were inserted after those of the prompt."""
    found: Hits
    """Pages that need not be computed."""
    bound_by: tuple[str, ...]
    """Components that kept more from being found; empty where everything was."""


class RequestWatcher:
    """Records each request of a cache once it is over. Called on the owner's thread; never waits."""

    __slots__ = ("_components", "_running", "_take")

    def __init__(self, components: Sequence[str], take: Callable[[RequestRecord], None]) -> None:
        """Name the layout's components; ``take`` is given each record."""
        self._components = tuple(components)
        self._take = take
        self._running: OrderedDict[Lock, RequestRecord] = OrderedDict()
        """By the lock that a request has now."""

    def locked(self, prompt: Prompt, lock: Lock, bound_by: tuple[int, ...]) -> None:
        """Begin a request, whose pages found ``lock`` pins; ``bound_by`` are components that kept it from more."""
        names = tuple(self._components[number] for number in bound_by)
        self._running[lock] = RequestRecord(time.time(), prompt, 0, lock.hits, names)
        if len(self._running) > RUNNING_MAX:
            self._end(*self._running.popitem(last=False))

    def inserted(self, before: Lock, after: Lock) -> None:
        """Go on with another lock, on what the request has computed too."""
        record = self._running.pop(before, None)
        if record is not None:
            self._running[after] = record

    def released(self, lock: Lock) -> None:
        """End a request."""
        record = self._running.pop(lock, None)
        if record is not None:
            self._end(lock, record)

    def _end(self, lock: Lock, record: RequestRecord) -> None:
        self._take(replace(record, output_pages=max(0, lock.end - record.prompt.pages_count)))
