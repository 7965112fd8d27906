"""Requests as they are recorded, and those of a cache from their first look-up to their release."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from unified_cache.core.page import PageKey, Prompt
from unified_cache.tree import Lock

__all__ = ["Hits", "KeyedPages", "RequestRecord", "RequestWatcher"]

WAITING_MAX = 1_024
"""Prompts looked up and not locked yet, and requests that run: of more, the oldest is dropped or taken for over."""


@dataclass(frozen=True, slots=True)
class KeyedPages:
    """Pages of a request by their keys alone, as a service knows them."""

    keys: Sequence[PageKey]
    page_size: int
    seed: bytes
    """Digest of their namespace, or of whatever keeps them apart from pages of the same tokens."""

    @property
    def pages_count(self) -> int:
        """Number of pages."""
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Hits:
    """Hits by tier, in pages where nothing else is said.

    Hits of a prompt count for the slowest tier needed to resume there; hits of a component for the tier that held them.
    """

    device: int = 0
    host: int = 0
    storage: int = 0

    @classmethod
    def of_ends(cls, device: int, host: int, storage: int) -> "Hits":
        """Return the hits of a prompt that the device alone can resume at ``device``, and so on with each tier more.

        They end at ``storage``, whatever the tiers before it have beyond that.
        """
        device, host = min(device, storage), min(host, storage)
        return cls(device, host - device, storage - host)

    @property
    def total(self) -> int:
        """What was handed back, from anywhere."""
        return self.device + self.host + self.storage

    def by_tier(self) -> dict[str, int]:
        """Return the counts under the tiers' names, fastest first."""
        return asdict(self)

    def __add__(self, other: "Hits") -> "Hits":
        return Hits(self.device + other.device, self.host + other.host, self.storage + other.storage)

    def tokens(self, page_size: int, tokens_max: int) -> "Hits":
        """Return the tokens of so many pages of a prompt, which has ``tokens_max``: its last block may be partial."""
        pages_ends = (self.device, self.device + self.host, self.total)
        return Hits.of_ends(*(min(pages * page_size, tokens_max) for pages in pages_ends))


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that is over."""

    at_s: float
    """Time of its look-up, in seconds since the epoch."""
    pages: Prompt | KeyedPages
    output_pages: int
    """Whole pages that were inserted after those of the prompt."""
    found: Hits
    """Pages that need not be computed."""
    bound_by: tuple[str, ...]
    """Components that kept more from being found; empty where everything was."""

    @property
    def pages_count(self) -> int:
        """Whole pages of the prompt."""
        return self.pages.pages_count


class FirstLookup(NamedTuple):
    """First look-up of a prompt: how far device, and device and host, had it then; one is made at every request."""

    prompt: Prompt
    """Kept, so that its ``id`` is nobody else's meanwhile."""
    at_s: float
    """In seconds since the epoch."""
    device_end: int
    host_end: int


class RequestWatcher:
    """Records each request of a cache once it is over. Called on the owner's thread; never waits.

    An engine looks up, prefetches, loads and locks with one ``Prompt``. Its first look-up tells tiers apart: what the
    device had then, and what host memory had beyond that; what is locked beyond both has come from storage meanwhile.
    """

    __slots__ = ("_components", "_looked_up", "_running", "_take")

    def __init__(self, components: Sequence[str], take: Callable[[RequestRecord], None]) -> None:
        """Name the layout's components; ``take`` is given each record."""
        self._components = tuple(components)
        self._take = take
        self._looked_up: OrderedDict[int, FirstLookup] = OrderedDict()
        """Prompts that are not locked yet, by their ``id``."""
        self._running: OrderedDict[Lock, RequestRecord] = OrderedDict()
        """By the lock that a request has now."""

    def matched(self, prompt: Prompt, device_end: int, host_end: int) -> None:
        """Record how far a prompt can be resumed from the device, and with the host; its first look-up counts."""
        if id(prompt) not in self._looked_up:
            self._looked_up[id(prompt)] = FirstLookup(prompt, time.time(), device_end, host_end)
            if len(self._looked_up) > WAITING_MAX:
                self._looked_up.popitem(last=False)

    def locked(self, prompt: Prompt, lock: Lock, bound_by: tuple[int, ...]) -> None:
        """Begin a request, whose pages found ``lock`` pins; ``bound_by`` are components that kept it from more."""
        first = self._looked_up.pop(id(prompt), None) or FirstLookup(prompt, time.time(), lock.end, lock.end)
        names = tuple(self._components[number] for number in bound_by)
        found = Hits.of_ends(first.device_end, first.host_end, lock.end)
        self._running[lock] = RequestRecord(first.at_s, prompt, 0, found, names)
        if len(self._running) > WAITING_MAX:
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
        self._take(replace(record, output_pages=max(0, lock.end - record.pages_count)))
