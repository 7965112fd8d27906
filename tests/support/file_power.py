"""A disk that knows what a loss of power would leave of a store: nothing is sure to stay but what was synced."""

import errno
import os
import random
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unified_cache.storage_backends.directory.disk import Disk, sync_outcome
from unified_cache.testing.storage_contract import LAYOUT, MODEL

BLOCK_BYTES = 4096
"""What a disk writes whole or not at all."""


@dataclass(frozen=True, slots=True)
class Content:
    """Contents of a file or a directory; of large files, most may never have been written."""

    length: int = 0
    """Of a file, in bytes."""
    parts: Mapping[int | str, Any] = field(default_factory=dict)
    """Of a directory the inode under each name. Of a file its blocks by their number; those that are zeros may be
    absent, the last one may be short."""

    @classmethod
    def of(cls, fd: int) -> "Content":
        """Read a directory, or a file without its holes."""
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(fd) as entries:
                return cls(0, {entry.name: entry.inode() for entry in entries})
        blocks: dict[int | str, bytes] = {}
        end = 0
        while end < found.st_size:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break
            end = os.lseek(fd, start, os.SEEK_HOLE)
            first = start // BLOCK_BYTES
            written = os.pread(fd, end - first * BLOCK_BYTES, first * BLOCK_BYTES)
            for offset in range(0, len(written), BLOCK_BYTES):
                blocks[first + offset // BLOCK_BYTES] = written[offset : offset + BLOCK_BYTES]
        return cls(found.st_size, blocks)

    def write(self, path: Path) -> None:
        """Make a file of it."""
        with path.open("wb") as file:
            for number, block in self.parts.items():
                file.seek(int(number) * BLOCK_BYTES)
                file.write(block)
            file.truncate(self.length)


@dataclass(frozen=True, slots=True)
class Photograph:
    """Everything that might be there if the power went at one moment, by inode."""

    top: int
    directories: frozenset[int]
    contents: dict[int, tuple[Content, Content]]
    """What was synced of each file and directory, and what is in it."""
    acknowledged: frozenset[int]
    """Pages that had been promised to survive."""

    def develop(self, into: Path, choice: random.Random) -> None:
        """Make the tree that one loss of power leaves: each name, and each block of a file, as synced or as written."""
        waiting = [(self.top, into)]
        while waiting:
            inode, path = waiting.pop()
            path.mkdir(mode=0o700)
            synced, live = self.contents[inode]
            for name in sorted(map(str, synced.parts.keys() | live.parts.keys())):
                found = choice.choice((synced, live)).parts.get(name)
                if found in self.directories:
                    waiting.append((found, path / name))
                elif found is not None:
                    _left_of(*self.contents[found], choice).write(path / name)


def _left_of(synced: Content, written: Content, choice: random.Random) -> Content:
    """Choose what is left of a file: each block as synced or as written, of what was never synced a part or zeros."""
    if synced == written:
        return synced
    sources = choice.choice(((synced,), (written,), (synced, written)))
    end = max(synced.length, written.length)
    cut = choice.choice((end, choice.randrange(synced.length, end + 1)))
    length = choice.choice((cut, end))
    blocks: dict[int | str, bytes] = {}
    for number in sorted(map(int, synced.parts.keys() | written.parts.keys())):
        block = choice.choice(sources).parts.get(number, b"")
        blocks[number] = block[: max(cut - number * BLOCK_BYTES, 0)]
    return Content(length, blocks)


def _synced(live: Content, former: Content, missed: Content) -> Content:
    """Return what a sync leaves on the disk: what is live, but where an earlier one missed the same, what it had."""
    parts: dict[int | str, Any] = {}
    for place in live.parts.keys() | former.parts.keys():
        is_missed = place in missed.parts and live.parts.get(place) == missed.parts[place]
        part = (former if is_missed else live).parts.get(place)
        if part is not None:
            parts[place] = part
    return Content(live.length, parts)


class PowerDisk(Disk):
    """A disk that takes a photograph before every ``stride``-th call. Nothing is really synced. Not thread-safe.

    A name is sure to stay, or to be gone, once its directory was synced after the change; a block of a file is once
    the file was. Real file systems promise more, such as that a rename is seen on both sides or on neither.

    A sync that fails has written nothing, and what it should have written is then taken for written, as Linux does:
    later syncs succeed and write what was changed since.
    """

    def __init__(self, top: Path, stride: int, acknowledged: set[int]) -> None:
        """``top`` is an empty directory, ``acknowledged`` what has been promised at any moment."""
        self._top = top
        self._stride = stride
        self._acknowledged = acknowledged
        self.calls_count = 0
        self.last_call = 0
        """Number of the call at which the process dies, from 1 on: from then on all fail until somebody revives it."""
        self.is_dead = False
        self._held: dict[int, int] = {}
        """A descriptor for each inode that was synced or named by a sync, so that no other file gets its number."""
        self._synced: dict[int, Content] = {}
        self.photographs: list[Photograph] = []
        self.syncs_count = 0
        """Syncs of files of pages and of the directories that they lie in."""
        self.failing_sync = -1
        """Number of the one that fails, from 0 on."""
        self.sync_errno = errno.EIO
        self._missed: dict[int, Content] = {}
        """In a file or a directory when its sync failed."""

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
            self.calls_count += 1
            self.is_dead |= self.calls_count == self.last_call
            if self.is_dead and name != "close":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self.calls_count % self._stride == 0:
                self.photographs.append(self.photograph())
        return object.__getattribute__(self, name)

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        """Note what is sure to stay from now on."""
        path = f"/proc/self/fd/{fd}"
        if not Path(path).readlink().is_relative_to(self._top):
            return  # What leads here is another's, and there.
        inode = self._hold(path)
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        if is_directory:
            for name in os.listdir(fd):
                self._hold(f"{path}/{name}")
        live = Content.of(self._held[inode])
        if self._fails(Path(path).readlink(), is_directory=is_directory):
            self._missed[inode] = live
            raise OSError(self.sync_errno, os.strerror(self.sync_errno))
        former, missed = self._synced.get(inode, Content()), self._missed.get(inode, Content())
        self._synced[inode] = _synced(live, former, missed)

    def fsync_each(self, fds: Sequence[int]) -> list[OSError | None]:
        """Note the same of each, one after the other."""
        return [sync_outcome(self, fd) for fd in fds]

    def _fails(self, path: Path, *, is_directory: bool) -> bool:
        """Count a sync of what holds pages; tell whether it is to fail."""
        if is_directory and len(path.parent.name) != len(MODEL.digest(LAYOUT).hex()):
            return False
        self.syncs_count += 1
        return self.syncs_count - 1 == self.failing_sync

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Note the same: nothing that the store asks of a file is beside its bytes and its length."""
        self.fsync(fd)

    def _hold(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        inode = os.fstat(fd).st_ino
        if inode in self._held:
            os.close(fd)
        else:
            self._held[inode] = fd
        return inode

    def photograph(self) -> Photograph:
        """Take a photograph now."""
        directories: set[int] = set()
        live: dict[int, Content] = {}
        held = [Path(f"/proc/self/fd/{fd}") for fd in self._held.values()]
        for path in (self._top, *self._top.rglob("*"), *held):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(fd)
            if found.st_ino not in live:
                live[found.st_ino] = Content.of(fd)
            if stat.S_ISDIR(found.st_mode):
                directories.add(found.st_ino)
            os.close(fd)
        return Photograph(
            self._top.stat().st_ino,
            frozenset(directories),
            {inode: (self._synced.get(inode, Content()), content) for inode, content in live.items()},
            frozenset(self._acknowledged),
        )
