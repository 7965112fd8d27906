"""Journal of a file store: additions and removals of every process, in one order that all of them see.

    +<identity>/<key>.<pool> <bytes>     this object is there, or will be in a moment; it is the most recent one
    -<identity>/<key>.<pool>             this object is gone, or will be in a moment

Each process appends its lines in one write before it acts on them, and reads everybody's in the order of the
file. So all of them count the same bytes, whoever wrote them, and agree on who comes after the cap was reached.
A line is a hint for that count and no more: what is in the store is what lies in its directories, and whoever opens
it looks there. Therefore nothing is ever synced, a lost or broken line costs exactness of the count until
its object is met again, and a process that died between a line and the act leaves an object that is found absent
when it is to be evicted.

The journal is a run of numbered files. Whoever makes one longer than ``FILE_BYTES_MAX`` makes the next one, and a
line that was appended to a file when the next one was there already is appended again to that. Two files are kept;
who is further behind has lost track, lists the directories, and goes on from there.
"""

import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from unified_cache.seal import Label
from unified_cache.storage_backends.common.names import parse_object_name
from unified_cache.storage_backends.directory.descriptors import DIRECTORY_FLAGS, close_quietly
from unified_cache.storage_backends.directory.disk import Disk

__all__ = ["FILE_BYTES_MAX", "Journal", "JournalLine"]

FILE_BYTES_MAX = 1 << 20
"""Length at which the next file begins: some 6,000 lines, parsed in 20 ms by whoever opens the store."""

_NAME = "journal"
_NUMBER = re.compile(r"[0-9]{1,18}")
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LINE = re.compile(rb"(?:\+|(-))([!-~]+)(?(1)| ([0-9]{1,15}))")
FILES_BEHIND_MAX = 4
"""Files that one exchange follows the others through before it gives up and lists the directories."""


class JournalLine(NamedTuple):
    """One line: an object and its bytes, None where it is gone."""

    label: Label
    object_bytes: int | None


class Journal:
    """One process's place in the journal. Not thread-safe; owns its descriptors."""

    def __init__(self, disk: Disk, directory_fd: int, number: int, fd: int) -> None:
        self._disk = disk
        self._directory_fd = directory_fd
        self._number = number
        self._fd = fd
        self._position = 0
        """Bytes of this file that were read, up to the end of a line."""
        self._backlog: list[JournalLine] = []
        """Read, and not yet returned: what an exchange had when it failed."""

    @classmethod
    def open(cls, disk: Disk, root_fd: int) -> "Journal":
        """Open the journal, made if absent, at the beginning of what is kept of it.

        Raises:
            OSError: it cannot be opened or written.
        """
        with suppress(FileExistsError):
            disk.mkdir(_NAME, 0o700, dir_fd=root_fd)
        directory_fd = disk.open(_NAME, DIRECTORY_FLAGS, dir_fd=root_fd)
        try:
            number, fd = _open_oldest(disk, directory_fd)
        except OSError:
            close_quietly(disk, directory_fd)
            raise
        return cls(disk, directory_fd, number, fd)

    def reopened(self, root_fd: int) -> "Journal":
        """Close this one, which somebody removed, and open the one made anew, by this process or another.

        Raises:
            OSError: it cannot be opened or written; this one stays open.
        """
        anew = Journal.open(self._disk, root_fd)
        self.close()
        return anew

    def exchange(self, changes: Sequence[JournalLine]) -> Sequence[JournalLine] | None:
        """Append changes; return everything that was appended since the last call, by anybody, these included.

        None where this process has lost track: it is to list the directories and then to call again. These changes
        were not appended.

        Raises:
            OSError: they could not be appended. Part of them may have been; what others appended is not lost.
        """
        text = _encode(changes)
        if text:
            end = self._append(text)
            if end < FILE_BYTES_MAX and end - len(text) == self._position and not self._backlog:
                self._position = end
                return changes
        self._read()
        if self._position >= FILE_BYTES_MAX and not self._follow(text):
            self._backlog.clear()
            self._take(*_open_oldest(self._disk, self._directory_fd))
            return None
        found, self._backlog = self._backlog, []
        return found

    def close(self) -> None:
        """Close the descriptors; the files stay."""
        close_quietly(self._disk, self._fd)
        close_quietly(self._disk, self._directory_fd)

    def _append(self, text: bytes) -> int:
        """Append lines in one write; return where they end in the file."""
        written_bytes = self._disk.write(self._fd, text)
        if written_bytes != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._disk.lseek(self._fd, 0, os.SEEK_CUR)

    def _read(self) -> None:
        """Read on to the last line that is whole."""
        while True:
            chunk = self._disk.pread(self._fd, FILE_BYTES_MAX, self._position)
            end = chunk.rfind(b"\n") + 1
            if not end:
                return
            self._position += end
            for line in chunk[:end].split(b"\n"):
                match = _LINE.fullmatch(line)
                label = parse_object_name(match[2].decode("ascii")) if match is not None else None
                if match is not None and label is not None:
                    self._backlog.append(JournalLine(label, None if match[1] else int(match[3])))

    def _follow(self, text: bytes) -> bool:
        """Go on to the last file, appending ``text`` there too; False where that is too far away."""
        for _ in range(FILES_BEHIND_MAX):
            next_fd, is_ours = self._open_next(create=bool(text))
            if next_fd < 0:
                return self._disk.fstat(self._fd).st_nlink > 0
            # Whoever appends to the old file from now on appends to the next one too.
            self._read()
            self._take(self._number + 1, next_fd)
            if text and not is_ours:
                self._append(text)
            self._read()
            if self._position < FILE_BYTES_MAX:
                return True
        return False

    def _open_next(self, *, create: bool) -> tuple[int, bool]:
        """Open the file after this one and tell whether we made it; -1 where there is none, or none any more."""
        name = str(self._number + 1)
        try:
            return self._disk.open(name, _FLAGS, dir_fd=self._directory_fd), False
        except FileNotFoundError:
            if not create or not self._disk.fstat(self._fd).st_nlink:
                return -1, False
        try:
            next_fd = self._disk.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._directory_fd)
        except FileExistsError:
            return self._disk.open(name, _FLAGS, dir_fd=self._directory_fd), False
        if not self._disk.fstat(self._fd).st_nlink:
            # While we looked away the others went two files further: ours is not the next of anything.
            close_quietly(self._disk, next_fd)
            with suppress(OSError):
                self._disk.unlink(name, dir_fd=self._directory_fd)
            return -1, False
        with suppress(OSError):
            self._disk.unlink(str(self._number - 1), dir_fd=self._directory_fd)
        return next_fd, True

    def _take(self, number: int, fd: int) -> None:
        close_quietly(self._disk, self._fd)
        self._number, self._fd, self._position = number, fd, 0


def _open_oldest(disk: Disk, directory_fd: int) -> tuple[int, int]:
    """Open the older of the files that are kept; the first one is made if there is none."""
    numbers = sorted(int(name) for name in disk.listdir(directory_fd) if _NUMBER.fullmatch(name))
    for number in numbers[-2:]:
        with suppress(FileNotFoundError):
            return number, disk.open(str(number), _FLAGS, dir_fd=directory_fd)
    number = numbers[-1] + 1 if numbers else 0
    return number, disk.open(str(number), _FLAGS | os.O_CREAT, 0o600, dir_fd=directory_fd)


def _encode(changes: Sequence[JournalLine]) -> bytes:
    """Write changes as lines, after an empty one that ends what a faulty append may have left."""
    lines = [
        f"-{label.object_name}\n" if object_bytes is None else f"+{label.object_name} {object_bytes}\n"
        for label, object_bytes in changes
    ]
    return "".join(("\n", *lines)).encode("ascii") if lines else b""
