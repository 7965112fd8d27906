"""When files were last read: written into their modification times, many together and behind the reads."""

from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

from unified_cache.seal import Label
from unified_cache.storage_backends._file_disk import Disk
from unified_cache.storage_backends._file_io import Directories
from unified_cache.storage_backends._file_layout import place_of
from unified_cache.storage_backends.protocol import PageIO

__all__ = ["PAGES_WAITING_MAX", "STAMP_GRAIN_NS", "Stamps"]

STAMP_GRAIN_NS = 60_000_000_000
"""A file is stamped for its reads once in so long, as relatime does: hot pages cost no metadata writes."""

PAGES_WAITING_MAX = 512
"""Pages read and not yet stamped, whose use a crash forgets; writing them takes 3 ms."""


class Stamps:
    """Times of use that files are yet to be given. A read costs no call for it, only every so many do. Thread-safe."""

    def __init__(self, disk: Disk, directories: Directories, now_ns: int) -> None:
        self._disk = disk
        self._directories = directories
        self._written_ns = now_ns
        self._waiting: dict[Label, int] = {}
        self._guard = Lock()

    def note(self, pages: Sequence[PageIO], hits: Sequence[bool], stamp: int) -> dict[Label, int]:
        """Note that hits were read, the first page at ``stamp``, each other one a nanosecond earlier.

        Return what is to be given to ``write`` now, of this read and of earlier ones, the least recent first.
        """
        with self._guard:
            waiting = self._waiting
            for number in range(len(pages) - 1, -1, -1):
                if hits[number]:
                    label = pages[number].label
                    waiting.pop(label, None)
                    waiting[label] = stamp - number
            is_due = stamp - self._written_ns > STAMP_GRAIN_NS or len(waiting) > PAGES_WAITING_MAX
            return self._take(stamp) if is_due else {}

    def take(self) -> dict[Label, int]:
        """Return all that waits, for ``write``."""
        with self._guard:
            return self._take(self._written_ns)

    def write(self, stamps: dict[Label, int]) -> list[Label]:
        """Stamp files; return those that are there. A time that cannot be set costs recency after a restart."""
        written: list[Label] = []
        for label, stamp in stamps.items():
            fan, name = place_of(label)
            with suppress(OSError):
                directory = self._directories.find(label.identity, fan)
                if directory is not None:
                    self._disk.utime(name, ns=(stamp, stamp), dir_fd=directory.fd, follow_symlinks=False)
                    written.append(label)
        return written

    def _take(self, now_ns: int) -> dict[Label, int]:
        taken, self._waiting, self._written_ns = self._waiting, {}, now_ns
        return taken
