"""Rendezvous hashing of pages to servers: a server that comes or goes moves its own pages only."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from unified_cache.page import PageKey

__all__ = ["RendezvousHash"]


class RendezvousHash:
    """Rank servers by name for each page; every client ranks alike."""

    __slots__ = ("_seeds",)

    def __init__(self, servers: Sequence[str]) -> None:
        self._seeds = [xxh3_64_intdigest(server.encode()) for server in servers]

    def ranked(self, key: PageKey) -> list[int]:
        """Return the servers by number, the page's own first, then who stands in for it."""
        seeds = self._seeds
        if len(seeds) == 1:
            return [0]
        return sorted(range(len(seeds)), key=lambda number: xxh3_64_intdigest(key, seeds[number]), reverse=True)
