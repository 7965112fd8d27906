"""One request as it is recorded, and who takes such notes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unified_cache.page import PageKey, Prompt
from unified_cache.tree import Lock

__all__ = ["FoundByTier", "KeyedPages", "RequestNote", "RequestWatcher"]


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
class FoundByTier:
    """Pages of a request that need not be computed, by the slowest tier that had to give one."""

    device: int
    host: int
    storage: int


@dataclass(frozen=True, slots=True)
class RequestNote:
    """One request that is over."""

    at_s: float
    """Time of its look-up, in seconds since the epoch."""
    pages: Prompt | KeyedPages
    output_pages: int
    """Whole pages that were inserted after those of the prompt."""
    found: FoundByTier
    bound_by: tuple[str, ...]
    """Components that kept more from being found; empty where everything was."""

    @property
    def pages_count(self) -> int:
        """Whole pages of the prompt."""
        return self.pages.pages_count


class RequestWatcher(Protocol):
    """Whoever is told what requests ask of a cache. Called on the owner's thread; never waits, never raises."""

    def matched(self, prompt: Prompt, device_end: int, host_end: int) -> None:
        """Take a look-up: so far the prompt can be resumed from the device, and from device and host."""
        ...

    def locked(self, prompt: Prompt, lock: Lock, bound_by: tuple[int, ...]) -> None:
        """Take the beginning of a request: the pages that it need not compute are pinned by ``lock``.

        ``bound_by`` names the components that kept more from being found; empty where requests are not recorded.
        """
        ...

    def inserted(self, before: Lock, after: Lock) -> None:
        """Take that a request goes on with another lock, on what it has computed too."""
        ...

    def released(self, lock: Lock) -> None:
        """Take the end of a request."""
        ...
