"""Objects of a file store that the system has in memory, their names included: no part of it waits for the disk."""

from collections.abc import Sequence

from unified_cache.seal import Label
from unified_cache.storage_backends.directory.descriptors import READ_FLAGS, close_quietly
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.memory_runs import MemoryRuns
from unified_cache.storage_backends.file.fan_directories import OpenDirectories
from unified_cache.storage_backends.file.layout import place_of
from unified_cache.storage_backends.memory_reads import RowsTarget

__all__ = ["MemoryFiles"]

FILES_OPEN_MAX = 16
"""Objects open at a time; see ``page_reader.FILES_OPEN_MAX``."""


class MemoryFiles:
    """Reads from memory of the files of one store. Thread-safe."""

    def __init__(self, disk: Disk, directories: OpenDirectories) -> None:
        self._disk = disk
        self._directories = directories
        self._runs = MemoryRuns(disk)

    def know(self, labels: Sequence[Label]) -> list[bool]:
        """Tell of each object whether its name, and what it names, is in memory."""
        known: list[bool] = []
        for label in labels:
            fd = self._opened(label)
            if fd >= 0:
                close_quietly(self._disk, fd)
            known.append(fd >= 0)
        return known

    def read(self, targets: Sequence[RowsTarget]) -> list[bool]:
        """Read pages; return for each whether it is there and verified.

        Of a call whose first file is not in memory none is read: it is of one prompt, which is there or not.
        """
        came = [False] * len(targets)
        numbers = range(len(targets))
        for start in range(0, len(numbers), FILES_OPEN_MAX):
            if not self._read_some(targets, numbers[start : start + FILES_OPEN_MAX], came, is_first=not start):
                break
        return came

    def _read_some(
        self, targets: Sequence[RowsTarget], numbers: Sequence[int], came: list[bool], *, is_first: bool
    ) -> bool:
        """Open a few files, read them all, close them all; tell whether it makes sense to go on."""
        fds: list[tuple[int, int]] = []
        try:
            for number in numbers:
                fd = self._opened(targets[number].label)
                if fd >= 0:
                    fds.append((number, fd))
                    if is_first and self._runs.is_cold(fd, 0):
                        return False
                    is_first = False
            for number, fd in fds:
                came[number] = self._runs.is_possible and self._runs.read_file(fd, targets[number])
        finally:
            for _, fd in fds:
                close_quietly(self._disk, fd)
        return self._runs.is_possible

    def _opened(self, label: Label) -> int:
        """Return a descriptor of an object's file; -1 where its name, or what it names, is not in memory."""
        fan, name = place_of(label)
        directory = self._directories.kept(label.identity, fan)
        if directory is None:
            return -1
        try:
            return self._disk.open_cached(name, READ_FLAGS, dir_fd=directory.fd)
        except OSError:
            return -1
