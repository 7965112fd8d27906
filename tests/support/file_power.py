"""A disk that knows what a loss of power would leave of a store: nothing is sure to stay but what was synced."""

import errno
import os
import random
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.support.files import outcome_of
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.testing.storage_contract import LAYOUT, MODEL

Names = dict[str, int]
"""What is in a directory: the inode under each name."""

_Place = TypeVar("_Place")
_Part = TypeVar("_Part")

BLOCK_BYTES = 4096
"""What a disk writes whole or not at all."""


@dataclass(frozen=True, slots=True)
class Content:
    """Contents of a file; of large ones, most may never have been written."""

    length: int = 0
    blocks: Mapping[int, bytes] = field(default_factory=dict)
    """By their number; those that are zeros may be absent, the last one may be short."""

    @classmethod
    def of(cls, fd: int) -> "Content":
        """Read a file, without its holes."""
        length = os.fstat(fd).st_size
        blocks: dict[int, bytes] = {}
        end = 0
        while end < length:
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
        return cls(length, blocks)

    def write(self, path: Path) -> None:
        """Make a file of it."""
        with path.open("wb") as file:
            for number, block in self.blocks.items():
                file.seek(number * BLOCK_BYTES)
                file.write(block)
            file.truncate(self.length)


@dataclass(frozen=True, slots=True)
class Photograph:
    """Everything that might be there if the power went at one moment, by inode."""

    top: int
    directories: dict[int, tuple[Names, Names]]
    """What was synced of each directory, and what is in it."""
    files: dict[int, tuple[Content, Content]]
    """What was synced of each file, and what was written."""
    acknowledged: frozenset[int]
    """Pages that had been promised to survive."""

    def develop(self, into: Path, choice: random.Random) -> None:
        """Make the tree that one loss of power leaves: each name, and each block of a file, as synced or as written."""
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
                    _left_of(*self.files[found], choice).write(path / name)


def _left_of(synced: Content, written: Content, choice: random.Random) -> Content:
    """Choose what is left of a file: each block as synced or as written, of what was never synced a part or zeros."""
    if synced == written:
        return synced
    sources = choice.choice(((synced,), (written,), (synced, written)))
    end = max(synced.length, written.length)
    cut = choice.choice((end, choice.randrange(synced.length, end + 1)))
    length = choice.choice((cut, end))
    blocks: dict[int, bytes] = {}
    for number in sorted(synced.blocks.keys() | written.blocks.keys()):
        block = choice.choice(sources).blocks.get(number, b"")
        blocks[number] = block[: max(cut - number * BLOCK_BYTES, 0)]
    return Content(length, blocks)


def _written(
    live: Mapping[_Place, _Part], former: Mapping[_Place, _Part], missed: Mapping[_Place, _Part]
) -> dict[_Place, _Part]:
    """Return what a sync leaves on the disk: what is live, but where an earlier one missed the same, what it had."""
    written: dict[_Place, _Part] = {}
    for place in live.keys() | former.keys():
        is_missed = place in missed and live.get(place) == missed[place]
        part = (former if is_missed else live).get(place)
        if part is not None:
            written[place] = part
    return written


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
        self._synced_names: dict[int, Names] = {}
        self._synced_content: dict[int, Content] = {}
        self.photographs: list[Photograph] = []
        self.syncs_count = 0
        """Syncs of files of pages and of the directories that they lie in."""
        self.failing_sync = -1
        """Number of the one that fails, from 0 on."""
        self.sync_errno = errno.EIO
        self._missed_names: dict[int, Names] = {}
        """In a directory when its sync failed."""
        self._missed_content: dict[int, Content] = {}

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
        fails = self._fails(Path(path).readlink(), is_directory=is_directory)
        if is_directory:
            names = {name: self._hold(f"{path}/{name}") for name in os.listdir(fd)}
            if fails:
                self._missed_names[inode] = names
            else:
                missed_names = self._missed_names.get(inode, {})
                self._synced_names[inode] = _written(names, self._synced_names.get(inode, {}), missed_names)
        else:
            content = Content.of(self._held[inode])
            if fails:
                self._missed_content[inode] = content
            else:
                former = self._synced_content.get(inode, Content())
                missed = self._missed_content.get(inode, Content())
                blocks = _written(content.blocks, former.blocks, missed.blocks)
                self._synced_content[inode] = Content(content.length, blocks)
        if fails:
            raise OSError(self.sync_errno, os.strerror(self.sync_errno))

    def fsync_each(self, fds: Sequence[int]) -> list[OSError | None]:
        """Note the same of each, one after the other."""
        return [outcome_of(self.fsync, fd) for fd in fds]

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
        live_names: dict[int, Names] = {}
        live_content: dict[int, Content] = {}
        for directory, _, names in os.walk(self._top):
            with os.scandir(directory) as entries:
                live_names[Path(directory).stat().st_ino] = {entry.name: entry.inode() for entry in entries}
            for name in names:
                path = Path(directory, name)
                with path.open("rb") as file:
                    live_content[path.stat().st_ino] = Content.of(file.fileno())
        for inode, fd in self._held.items():
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                live_names.setdefault(inode, {})
            else:
                live_content.setdefault(inode, Content.of(fd))
        return Photograph(
            self._top.stat().st_ino,
            {inode: (self._synced_names.get(inode, {}), names) for inode, names in live_names.items()},
            {inode: (self._synced_content.get(inode, Content()), live) for inode, live in live_content.items()},
            frozenset(self._acknowledged),
        )
