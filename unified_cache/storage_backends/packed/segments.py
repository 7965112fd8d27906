"""The files of a packed store on the disk: found, made, emptied, and given back."""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple
from weakref import WeakSet

from unified_cache.seal import Label
from unified_cache.storage_backends.directory.descriptors import DIRECTORY_FLAGS, Directory, let_go
from unified_cache.storage_backends.directory.foreign import NOT_A_FILE, Intruders
from unified_cache.storage_backends.directory.layout import identities_in
from unified_cache.storage_backends.directory.root import Root
from unified_cache.storage_backends.packed.free_slots import FreeSlots
from unified_cache.storage_backends.packed.segment import PackedFile, Shape, Slot, by_file, parse_name

__all__ = ["IDLE_BYTES_MAX", "Kept", "Places"]

IDLE_BYTES_MAX = 64 << 20
"""Room on the disk that free slots keep for the next pages; what is beyond goes back to the file system."""

NUMBERS_TAKEN_MAX = 16
"""Names for a new file that may be somebody else's before making one is given up."""

_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Kept(NamedTuple):
    """A page that was found when the store was opened."""

    label: Label
    slot: Slot
    stamp: int


class Places:
    """Slots for pages, in files by shape. Thread-safe; waits for no file inside its guard."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._disk = root.disk
        self._intruders = Intruders(root)
        self._free: dict[Shape, FreeSlots] = {}
        self._idle_bytes_max = IDLE_BYTES_MAX
        self._opened: WeakSet[PackedFile] = WeakSet()
        """Those too that were removed, as long as somebody refers to them."""
        self._guard = Lock()

    @property
    def intruders_count(self) -> int:
        """Links, FIFOs and directories found in the place of a file."""
        return self._intruders.count

    def find(self) -> list[Kept]:
        """Open every file that is there, and list the pages in them. Before any other call.

        Raises:
            OSError: a directory or a file cannot be read.
        """
        kept: list[Kept] = []
        for identity in identities_in(self._disk, self._root.fd):
            try:
                fd = self._disk.open(identity.hex(), DIRECTORY_FLAGS, dir_fd=self._root.fd)
            except NotADirectoryError:
                continue
            directory = Directory(self._disk, fd)
            try:
                # A process that made a file may have died before its name was sure to stay.
                self._disk.fsync(directory.fd)
                for name in self._disk.listdir(directory.fd):
                    parsed = parse_name(identity, name)
                    if parsed is not None:
                        kept += self._kept_in(directory, name, *parsed)
            finally:
                directory.close()
        self._disk.fsync(self._root.fd)
        self.give_back()
        return kept

    def used_ns(self, identity: bytes) -> list[int]:
        """Read when the pages of an identity were last used. Linear in objects."""
        with self._guard:
            files = [file for shape, free in self._free.items() if shape.identity == identity for file in free.files]
        return [entry.stamp for file in files for entry in file.entries()]

    def take(self, shape: Shape, count: int) -> list[Slot]:
        """Take free slots, of new files where that is needed.

        Raises:
            OSError: a file cannot be made. No slot was taken.
        """
        taken: list[Slot] = []
        try:
            while True:
                with self._guard:
                    free = self._free.get(shape) or self._free.setdefault(shape, FreeSlots(shape))
                    taken += free.take(count - len(taken))
                if len(taken) == count:
                    return taken
                file = self._make(free)
                with self._guard:
                    free.add(file, (), 0)
                    taken += free.take(count - len(taken))
        except OSError:
            self.give(taken)
            raise

    def clear(self, slots: Iterable[Slot]) -> None:
        """Say on the disk that nothing is in slots.

        Raises:
            OSError: a table cannot be written.
        """
        for file, inside in by_file(slots).items():
            file.clear([slot.number for slot in inside])

    def free(self, slots: Iterable[Slot]) -> None:
        """Say on the disk that nothing is in slots, then take them back.

        Raises:
            OSError: a table cannot be written. Its slots are nobody's until the store is opened again: were one used
                for another page, an entry would say that the former is in it.
        """
        fault: OSError | None = None
        for file, inside in by_file(slots).items():
            try:
                file.clear([slot.number for slot in inside])
            except OSError as error:
                fault = error
            else:
                self.give(inside)
        if fault is not None:
            raise fault

    def give(self, slots: Sequence[Slot]) -> None:
        """Take slots back that nobody uses any more, and give room on the disk back where too much of it is idle."""
        with self._guard:
            for slot in slots:
                self._free[slot.file.shape].give((slot,))
            if self._idle_bytes() <= self._idle_bytes_max:
                return
        self.give_back()
        with self._guard:
            # What cannot be given back, on a file system that has no holes, is not tried again at every put.
            self._idle_bytes_max = self._idle_bytes() + IDLE_BYTES_MAX

    def new_bytes(self, wanted: Mapping[Shape, int]) -> int:
        """Return how much more room on the disk so many slots of each shape would take."""
        with self._guard:
            idle_count = {shape: free.idle_count for shape, free in self._free.items()}
        return sum(shape.slot_bytes * max(count - idle_count.get(shape, 0), 0) for shape, count in wanted.items())

    def give_back(self) -> None:
        """Give the room of free slots back to the file system: whole files, and holes in the others."""
        with self._guard:
            empty = [file for free in self._free.values() for file in free.take_empty_files()]
            idle = {shape: by_file(free.take_idle()) for shape, free in self._free.items()}
        for file in empty:
            try:
                self._disk.unlink(_path_of(file.shape, file.number), dir_fd=self._root.fd)
            except OSError:
                continue  # It stays, and keeps its number, until the store is opened again.
            with self._guard:
                self._free[file.shape].drop(file.number)
        for shape, files in idle.items():
            for file, slots in files.items():
                try:
                    file.punch([slot.number for slot in slots])
                except OSError:
                    with self._guard:
                        self._free[shape].give(slots)
                else:
                    with self._guard:
                        self._free[shape].give_emptied(slots)

    def close(self) -> None:
        """Give back what is idle and close every file; no call may be in flight."""
        self.give_back()
        # A traceback that somebody keeps may refer to a file; its descriptor must not live as long.
        for file in list(self._opened):
            file.close()

    def _idle_bytes(self) -> int:
        return sum(free.idle_count * shape.slot_bytes for shape, free in self._free.items())

    def _kept_in(self, directory: Directory, name: str, shape: Shape, number: int) -> Iterator[Kept]:
        free = self._free.setdefault(shape, FreeSlots(shape))
        free.keep(number)
        try:
            fd = self._disk.open(name, _OPEN_FLAGS, dir_fd=directory.fd)
        except OSError as error:
            if error.errno not in NOT_A_FILE:
                raise
            self._intruders.clear(directory, name, -1)
            return
        file = self._opened_as(fd, shape, number)
        if not stat.S_ISREG(self._disk.fstat(fd).st_mode):
            self._intruders.clear(directory, name, -1)
            return
        entries = file.entries()
        free.add(file, [entry.slot for entry in entries], file.reach(1))
        for entry in entries:
            yield Kept(Label(shape.identity, entry.key, shape.pool), Slot(file, entry.slot), entry.stamp)

    def _make(self, free: FreeSlots) -> PackedFile:
        """Make a file whose name survives a crash."""
        shape = free.shape
        with suppress(FileExistsError):
            self._disk.mkdir(shape.identity.hex(), 0o700, dir_fd=self._root.fd)
        for attempt in range(NUMBERS_TAKEN_MAX):
            with self._guard:
                number = free.new_number()
            flags = _OPEN_FLAGS | os.O_CREAT | os.O_EXCL
            try:
                fd = self._disk.open(_path_of(shape, number), flags, 0o600, dir_fd=self._root.fd)
            except FileExistsError:
                if attempt + 1 == NUMBERS_TAKEN_MAX:
                    raise
                continue
            file = self._opened_as(fd, shape, number)
            try:
                self._anchor(shape)
            except OSError:
                with suppress(OSError):
                    self._disk.unlink(_path_of(shape, number), dir_fd=self._root.fd)
                    with self._guard:
                        free.drop(number)
                raise
            return file
        raise AssertionError("a name was found, or the last one raised")

    def _opened_as(self, fd: int, shape: Shape, number: int) -> PackedFile:
        file = PackedFile(self._disk, fd, shape, number)
        with self._guard:
            self._opened.add(file)
        return file

    def _anchor(self, shape: Shape) -> None:
        fd = self._disk.open(shape.identity.hex(), DIRECTORY_FLAGS, dir_fd=self._root.fd)
        try:
            self._disk.fsync(fd)
        finally:
            let_go(self._disk, fd)
        self._disk.fsync(self._root.fd)


def _path_of(shape: Shape, number: int) -> str:
    return f"{shape.identity.hex()}/{shape.name_of(number)}"
