"""Room under the cap of a file store: who reserved how much of it, and which files go to make more."""

import os
from collections.abc import Container, Sequence
from threading import Lock

from unified_cache.seal import Label
from unified_cache.storage_backends._file_io import Directories
from unified_cache.storage_backends._file_layout import place_of
from unified_cache.storage_backends._recency import Recency, page_bytes
from unified_cache.storage_backends.protocol import PageIO

__all__ = ["UNREMOVABLE_MAX", "Room"]

UNREMOVABLE_MAX = 16
"""Objects that cannot be removed in one eviction before it gives up and the put is declined."""


class Room:
    """The recency of a store, guarded, and the bytes reserved for what is being written.

    Thread-safe. Files are removed outside the guard: from the moment a victim is forgotten, its bytes are spoken for.
    """

    def __init__(self, recency: Recency, directories: Directories) -> None:
        self._recency = recency
        self._directories = directories
        self._reserved_bytes = 0
        self._evicted_count = 0
        self._unremovable_count = 0
        self._guard = Lock()

    @property
    def bytes_max(self) -> int | None:
        """Cap of the store; None if there is none."""
        return self._recency.bytes_max

    @property
    def bytes_used(self) -> int:
        """Bytes of the objects known; reservations do not count yet."""
        return self._recency.bytes_used

    @property
    def counts(self) -> tuple[int, int]:
        """Objects evicted, and objects that could not be."""
        with self._guard:
            return self._evicted_count, self._unremovable_count

    def record(self, pages: Sequence[PageIO], hits: Sequence[bool]) -> None:
        """Note what a get found: hits become recent, the first page most of all; misses are forgotten."""
        with self._guard:
            for page, hit in zip(reversed(pages), reversed(hits), strict=True):
                if hit:
                    self._recency.add(page.label, page_bytes(page))
                else:
                    self._recency.forget(page.label)

    def touch(self, pages: Sequence[PageIO]) -> None:
        """Make the pages of a batch recent, the first most of all."""
        with self._guard:
            self._recency.touch(page.label for page in reversed(pages))

    def forget(self, label: Label) -> None:
        """Note that an object is gone."""
        with self._guard:
            self._recency.forget(label)

    def reserve(self, needed_bytes: int, keep: Container[Label]) -> bool:
        """Evict until ``needed_bytes`` fit, none of ``keep``, and reserve them; False, none reserved, if that fails."""
        unremovable_count = 0
        with self._guard:
            victims = self._recency.victims(needed_bytes + self._reserved_bytes, keep)
            if victims is None:
                return False
            self._reserved_bytes += needed_bytes
            evicted = [(victim, self._recency.forget(victim)) for victim in victims]
        while evicted:
            stuck = [(victim, object_bytes) for victim, object_bytes in evicted if not self._remove(victim)]
            unremovable_count += len(stuck)
            with self._guard:
                self._evicted_count += len(evicted) - len(stuck)
                self._unremovable_count += len(stuck)
                for victim, object_bytes in stuck:
                    self._recency.add(victim, object_bytes)
                victims = self._recency.victims(self._reserved_bytes, keep) if stuck else []
                if victims is None or unremovable_count > UNREMOVABLE_MAX:
                    self._reserved_bytes -= needed_bytes
                    return False
                evicted = [(victim, self._recency.forget(victim)) for victim in victims]
        return True

    def release(self, reserved_bytes: int, stored: Label | None = None, object_bytes: int = 0) -> None:
        """Give up a reservation; an object that is stored counts from now on."""
        with self._guard:
            self._reserved_bytes -= reserved_bytes
            if stored is not None:
                self._recency.add(stored, object_bytes)

    def _remove(self, label: Label) -> bool:
        fan, name = place_of(label)
        try:
            directory = self._directories.find(label.identity, fan)
            if directory is not None:
                os.unlink(name, dir_fd=directory.fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True
