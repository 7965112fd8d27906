"""A disk that knows what a loss of power would leave of a store: nothing is sure to stay but what was synced."""

import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unified_cache.storage_backends._file_disk import Disk

Names = dict[str, int]
"""What is in a directory: the inode under each name."""


@dataclass(frozen=True, slots=True)
class Photograph:
    """Everything that might be there if the power went at one moment, by inode."""

    top: int
    directories: dict[int, tuple[Names, Names]]
    """What was synced of each directory, and what is in it."""
    files: dict[int, tuple[bytes, bytes]]
    """What was synced of each file, and what was written."""
    acknowledged: frozenset[int]
    """Pages that had been promised to survive."""

    def develop(self, into: Path, choice: random.Random) -> None:
        """Make the tree that one loss of power leaves: each name, and each file's bytes, as synced or as written."""
        waiting = [(self.top, into)]
        while waiting:
            inode, path = waiting.pop()
            path.mkdir(mode=0o700)
            synced, live = self.directories[inode]
            for name in sorted(synced.keys() | live.keys()):
                found = choice.choice((synced, live)).get(name)
                if found in self.directories:
                    waiting.append((found, path / name))
                elif found is not None:
                    (path / name).write_bytes(_left_of(*self.files[found], choice))


def _left_of(synced: bytes, written: bytes, choice: random.Random) -> bytes:
    """Choose what is left of a file: where it was not synced since it was written, a part, or zeros for a part."""
    if synced == written:
        return synced
    cut = choice.randrange(len(written) + 1)
    return choice.choice((synced, written, written[:cut], written[:cut] + bytes(len(written) - cut)))


class PowerDisk(Disk):
    """A disk that takes a photograph before every ``stride``-th call. Nothing is really synced. Not thread-safe.

    A name is sure to stay, or to be gone, once its directory was synced after the change; the bytes of a file are
    once the file was. Real file systems promise more, such as that a rename is seen on both sides or on neither.
    """

    def __init__(self, top: Path, stride: int, acknowledged: set[int]) -> None:
        """``top`` is an empty directory, ``acknowledged`` what has been promised at any moment."""
        self._top = top
        self._stride = stride
        self._acknowledged = acknowledged
        self._calls_count = 0
        self._held: dict[int, int] = {}
        """A descriptor for each inode that was synced or named by a sync, so that no other file gets its number."""
        self._synced_names: dict[int, Names] = {}
        self._synced_bytes: dict[int, bytes] = {}
        self.photographs: list[Photograph] = []

    @classmethod
    @contextmanager
    def over(cls, top: Path, stride: int, acknowledged: set[int]) -> Iterator["PowerDisk"]:
        """Make a disk, and let go of every file at the end."""
        disk = cls(top, stride, acknowledged)
        try:
            yield disk
        finally:
            for fd in object.__getattribute__(disk, "_held").values():
                os.close(fd)

    def __getattribute__(self, name: str) -> object:
        if name in Disk.__dict__ and not name.startswith("_"):
            self._calls_count += 1
            if self._calls_count % self._stride == 0:
                self.photographs.append(self._photograph())
        return object.__getattribute__(self, name)

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        """Note what is sure to stay from now on."""
        path = f"/proc/self/fd/{fd}"
        inode = self._hold(path)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self._synced_names[inode] = {name: self._hold(f"{path}/{name}") for name in os.listdir(fd)}
        else:
            self._synced_bytes[inode] = _bytes_in(self._held[inode])

    def _hold(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        inode = os.fstat(fd).st_ino
        if inode in self._held:
            os.close(fd)
        else:
            self._held[inode] = fd
        return inode

    def _photograph(self) -> Photograph:
        live_names: dict[int, Names] = {}
        live_bytes: dict[int, bytes] = {}
        for directory, _, names in os.walk(self._top):
            with os.scandir(directory) as entries:
                live_names[Path(directory).stat().st_ino] = {entry.name: entry.inode() for entry in entries}
            for name in names:
                path = Path(directory, name)
                live_bytes[path.stat().st_ino] = path.read_bytes()
        for inode, fd in self._held.items():
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                live_names.setdefault(inode, {})
            else:
                live_bytes.setdefault(inode, _bytes_in(fd))
        return Photograph(
            self._top.stat().st_ino,
            {inode: (self._synced_names.get(inode, {}), names) for inode, names in live_names.items()},
            {inode: (self._synced_bytes.get(inode, b""), written) for inode, written in live_bytes.items()},
            frozenset(self._acknowledged),
        )


def _bytes_in(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)
