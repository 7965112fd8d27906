"""Counts of the pages and bytes that transfers have moved."""

from collections.abc import Sequence
from dataclasses import dataclass

from unified_cache.controller import TransferKind
from unified_cache.pool import ModelLayout, PageCopies

__all__ = ["Traffic", "TrafficCounts"]


@dataclass(slots=True)
class Traffic:
    """Pages and bytes moved in one direction since the cache was opened.

    To storage: pages that it was not known to have. Those put again only to stay recent are looked up there, not moved.
    """

    component_pages: list[int]
    """By component."""
    payload_bytes: int = 0

    @property
    def pages(self) -> int:
        """Pages of all components together."""
        return sum(self.component_pages)


class TrafficCounts:
    """Traffic of one cache in all directions."""

    __slots__ = ("_layout", "_traffic")

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        moving = (TransferKind.BACKUP, TransferKind.LOAD, TransferKind.STORE, TransferKind.PREFETCH)
        self._traffic = {kind: Traffic([0 for _ in layout.components]) for kind in moving}

    def add(self, kind: TransferKind, parts: Sequence[PageCopies]) -> int:
        """Count pages that were moved; return how many."""
        traffic = self._traffic[kind]
        for part in parts:
            component = self._layout.components[part.component]
            traffic.payload_bytes += len(part) * sum(pool.page_bytes for pool in component.pools)
            traffic.component_pages[part.component] += len(part)
        return sum(len(part) for part in parts)

    def copy(self) -> dict[TransferKind, Traffic]:
        """Return them, the caller's own."""
        return {
            kind: Traffic(list(found.component_pages), found.payload_bytes) for kind, found in self._traffic.items()
        }
