"""Looking into the directory of a store, filling it, and a disk on which one call goes wrong."""

import errno
import os
import socket
import subprocess
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest

from unified_cache.core.seal import Label
from unified_cache.storage_backends.directory.disk import Disk, sync_outcome
from unified_cache.storage_backends.protocol import Level, PageIO, Store
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

FILE_BYTES = 4096
"""What a page of the contract takes of a file system as its own file: one block."""


def path_of(root: Path, named: Label) -> Path:
    """Return where an object of that label lies in a file store."""
    key = named.key.hex()
    return root / named.identity.hex() / key[:1] / f"{key}.{named.pool}"


def put(storage: Store, numbers: Sequence[int], level: Level = Level.CACHED) -> list[bool]:
    """Put the pages of these numbers."""
    return list(map(bool, storage.put([sealed_page(label(number)) for number in numbers], level)))


def held(storage: Store, count: int, pool: str = "kv") -> list[int]:
    """Return which of the first pages a store holds."""
    found = storage.exists([label(number, pool) for number in range(count)])
    return [number for number, is_there in enumerate(found) if is_there]


def hits(storage: Store, numbers: Sequence[int]) -> list[bool]:
    """Get the pages of these numbers; return which were hits, each of them byte by byte what was put."""
    found = [blank_page(label(number)) for number in numbers]
    answers = storage.get(found)
    for page, hit in zip(found, answers, strict=True):
        assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label))
    return list(map(bool, answers))


def chain(numbers: Sequence[int], make: Callable[[Label], PageIO]) -> list[PageIO]:
    """Make pages of which each follows the one before it."""
    return [make(label(number)) for number in numbers]


def temps(root: Path) -> list[str]:
    """Return the names of temp files, of any writer."""
    return sorted(path.name for path in (root / "tmp").rglob("*") if path.is_file() and path.name != "lock")


def object_paths(root: Path) -> list[Path]:
    """Return every object that lies in the directory of a file store."""
    return sorted(path for path in root.glob("?" * 64 + "/?/*") if path.is_file())


def bytes_in(root: Path) -> int:
    """Sum up the blocks of objects in the directory of a file store, as du; one that goes meanwhile does not count."""
    sum_bytes = 0
    for path in object_paths(root):
        with suppress(FileNotFoundError):
            sum_bytes += path.stat().st_blocks * 512
    return sum_bytes


def descriptors(root: Path) -> list[str]:
    """List the descriptors that this process has open below ``root``; others' come and go with their threads."""
    found: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this listing
            if path.readlink().is_relative_to(root):
                found.append(path.name)
    return sorted(found)


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of so many bytes in a directory that is made for it, where this user may."""
    path.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def take_the_rest(path: Path, left_bytes: int = 0) -> None:
    """Fill a file until the file system has no more than ``left_bytes`` free."""
    status = os.statvfs(path.parent)
    with path.open("ab") as file:
        os.posix_fallocate(
            file.fileno(), os.fstat(file.fileno()).st_size, status.f_bavail * status.f_frsize - left_bytes
        )


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def link(path: Path, bystander: Path) -> None:
    path.symlink_to(bystander)


def dangle(path: Path, bystander: Path) -> None:
    path.symlink_to(bystander.with_name("nowhere"))


def pipe(path: Path, bystander: Path) -> None:
    os.mkfifo(path)


def touch(path: Path, bystander: Path) -> None:
    path.touch()


def fill(path: Path, bystander: Path) -> None:
    path.mkdir()
    (path / "file").touch()


def listen(path: Path, bystander: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        there = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is at most 107 bytes long
        bound.bind(path.name)
        os.chdir(there)


def zeros(path: Path, bystander: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root may make a device")


INTRUDERS = (link, dangle, pipe, fill, listen, zeros)
"""Makers of what may stand in the place of a file; the place is free before, and a link leads to the bystander."""


class DiskFault(Enum):
    """Way in which a call goes wrong."""

    ENOSPC = errno.ENOSPC
    EIO = errno.EIO
    EACCES = errno.EACCES
    EMFILE = errno.EMFILE
    SHORT = "short"
    """It moves half of what it was asked to; calls that move no bytes are right."""


Hooks = Mapping[str, Callable[..., object]]
"""Functions by the name of the call that they are of, each given what the call is given."""


def refuses(number: int) -> Callable[..., int]:
    """Return a function that fails with an error of the system, whatever it is given."""

    def refuse(*_given: object, **_named: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


class FaultyDisk(Disk):
    """A disk that counts its calls, on which those of some numbers go wrong and others are met by what a test does.

    It waits for no sync: without a loss of power nobody sees the difference, and a loop takes seconds, not minutes.
    """

    def __init__(
        self,
        fault: DiskFault = DiskFault.EIO,
        failing: Container[int] = (),
        only: str = "",
        *,
        before: Hooks = MappingProxyType({}),
        instead: Hooks = MappingProxyType({}),
    ) -> None:
        """``before`` a call its hook is run; what that raises the call does. ``instead`` takes the place of one."""
        self.fault = fault
        self.failing = failing
        self.only = only
        """Name of the calls that count; all if empty."""
        self.calls: list[str] = []
        self.before = dict(before)
        for name in Disk.__dict__:
            if not name.startswith("_"):
                vars(self)[name] = partial(self._call, name, instead.get(name, getattr(self, name)))
        # One after the other, and each counted, so that the same call has the same number in every run.
        vars(self)["fsync_each"] = lambda fds: [sync_outcome(self, fd) for fd in fds]

    def _call(self, name: str, right: Callable[..., object], *given: object, **named: object) -> object:
        """Make one call, or have it go wrong."""
        if name in self.before:
            self.before[name](*given, **named)
        if name in ("fsync", "fdatasync"):
            right = os.fstat
        if self.only not in ("", name):
            return right(*given, **named)
        number = len(self.calls)
        self.calls.append(name)
        if number not in self.failing:
            return right(*given, **named)
        if isinstance(self.fault.value, int):
            if named.get("ignore_errors"):
                return None
            if name == "close":
                right(*given, **named)
            raise OSError(self.fault.value, os.strerror(self.fault.value))
        return right(*_halved(name, given), **named)


def _halved(name: str, given: tuple[object, ...]) -> tuple[object, ...]:
    match name, given:
        case "write", (fd, bytes() | memoryview() as buffer):
            return fd, buffer[: len(buffer) // 2]
        case "preadv" | "preadv_cached" | "pwritev", (fd, [memoryview() as first, *_], offset):
            return fd, [first[: (len(first) + 1) // 2]], offset
        case "pwrite", (fd, bytes() as buffer, offset):
            return fd, buffer[: len(buffer) // 2], offset
        case "read", (fd, int() as count):
            return fd, count // 2
        case "pread", (fd, int() as count, offset):
            return fd, count // 2, offset
    return given
