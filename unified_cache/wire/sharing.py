"""Memory that two processes of one machine share: a file in /dev/shm that both have open and nobody maps.

A mapping would let either end kill the other by truncating the file (SIGBUS), and change bytes after they were
checked. So bytes are always copied, by ``pread`` and ``pwrite``: what was cut off is an error, and what is verified is
the copy that is kept. A descriptor cannot go through gRPC; the file goes by a random name instead, which is gone as
soon as both ends have it open.

Its maker holds a lock on the file as long as it has it open, which ends with the process however that ends. So the
other end knows when nobody is left to share with, and whoever comes next removes the files of those who died before.
"""

import errno
import fcntl
import os
import re
import stat
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from unified_cache.errors import InputError

__all__ = [
    "ABANDONED_S",
    "NAME_PREFIX",
    "PROOF_BYTES",
    "SHARED_DIRECTORY",
    "WINDOW_OFFSET",
    "SharedRegion",
    "SharedSlice",
    "is_local_peer",
    "named_here",
    "remove_abandoned_files",
]

SHARED_DIRECTORY = Path("/dev/shm")  # noqa: S108  # in memory, on every Linux; names in it are random
NAME_PREFIX = "unified-cache-"
PROOF_BYTES = 32
"""Random bytes at the beginning of a file, which its owner tells: a name alone proves nothing."""

WINDOW_OFFSET = 64
"""Best offset of a slice within a page of the machine's memory.

Zen 3 copies at a third of its speed where the target lies 1 to 16 bytes after the source, multiples of 4 KiB aside.
Slabs begin 0 or 64 bytes into a page of memory, large arrays of numpy 16; where pages are multiples of 128 bytes long,
none of theirs ever lies that way to a window that begins here.
"""

ABANDONED_S = 60.0
"""Age from which on a file that nobody has locked is abandoned; an offer takes milliseconds, and may lack a lock."""

MODE = 0o600
_BUFFERS_MAX = 1024
"""IOV_MAX of Linux."""

_NAME = re.compile(re.escape(NAME_PREFIX) + r"[0-9a-f]{32}")
_LOOPBACK = re.compile(r"127(\.[0-9]+){3}")
_LOCAL_PEER = re.compile(r"unix(-abstract)?:.*|ipv4:127\.[0-9.:]+|ipv6:(\[|%5B)::1(\]|%5D)(:[0-9]+)?", re.DOTALL)


class SharedRegion:
    """An open file of shared memory, closed with its last reference: a call that was given up may still write.

    The memory is freed once both ends have closed it.
    """

    __slots__ = ("__weakref__", "_descriptor", "_was_locked", "region_bytes")

    def __init__(self, descriptor: int, region_bytes: int) -> None:
        self._descriptor = descriptor
        self._was_locked = False
        self.region_bytes = region_bytes
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def create(cls, directory: Path, name: str, region_bytes: int, proof: bytes) -> "SharedRegion":
        """Make a file of this user alone, all of its memory there; the caller unlinks it.

        Raises:
            OSError: no such directory, or no room in it. Nothing is left.
        """
        path = directory / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
        region = cls(descriptor, region_bytes)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, region_bytes)
            region.write((memoryview(proof),), 0)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return region

    @classmethod
    def open(cls, directory: Path, name: str, region_bytes: int, proof: bytes) -> "SharedRegion":
        """Open what another process of this user made, and unlink it; what is anything else is refused.

        Raises:
            InputError: no such name, or not a file as ``create`` makes it, of this user, length and proof.
        """
        if not _NAME.fullmatch(name) or len(proof) != PROOF_BYTES:
            raise InputError("shared memory goes by a name and a proof of fixed form")
        path = directory / name
        try:
            # A FIFO or a device in its place blocks nobody.
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise InputError("no such shared memory here") from error
        region = cls(descriptor, region_bytes)
        try:
            region._check(proof)
            path.unlink()
            region._was_locked = not _is_unlocked(descriptor)
        except (OSError, InputError) as error:
            raise InputError("this is not shared memory of this server's user") from error
        return region

    @property
    def is_abandoned(self) -> bool:
        """Whether the process that made it has let it go or died; False for one of a maker who locks nothing."""
        return self._was_locked and _is_unlocked(self._descriptor)

    def read_into(self, buffers: Sequence[memoryview], start: int) -> None:
        """Fill buffers with the bytes from ``start`` on.

        Raises:
            OSError: they are not there, whoever cut them off.
        """
        self._move(os.preadv, buffers, start)

    def write(self, buffers: Sequence[memoryview], start: int) -> None:
        """Write buffers, one after the other, from ``start`` on.

        Raises:
            OSError: the memory cannot be had.
        """
        self._move(os.pwritev, buffers, start)

    def _check(self, proof: bytes) -> None:
        found = os.fstat(self._descriptor)
        as_made = (stat.S_IFREG | MODE, os.geteuid(), 1, self.region_bytes)
        if (found.st_mode, found.st_uid, found.st_nlink, found.st_size) != as_made:
            raise InputError("expected a file of this user alone, of the length said")
        said = memoryview(bytearray(PROOF_BYTES))
        self.read_into((said,), 0)
        if said != proof:
            raise InputError("expected the proof at the beginning of the file")

    def _move(self, move: Callable[[int, list[memoryview], int], int], buffers: Sequence[memoryview], at: int) -> None:
        waiting = deque(buffer for buffer in buffers if len(buffer))
        while waiting:
            moved_bytes = move(self._descriptor, list(islice(waiting, _BUFFERS_MAX)), at)
            if not moved_bytes:
                raise OSError(errno.ENODATA, f"shared memory ends at {at}")
            at += moved_bytes
            while waiting and moved_bytes >= len(waiting[0]):
                moved_bytes -= len(waiting.popleft())
            if moved_bytes:
                waiting[0] = waiting[0][moved_bytes:]


class SharedSlice(NamedTuple):
    """The part of a region that holds the bytes of one call, in place of a stream."""

    region: SharedRegion
    name: str
    """Name of the region, as the server gave it."""
    start: int
    length: int

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill buffers, one after the other, with the bytes from ``offset`` of the call on.

        Raises:
            InputError: they reach beyond the window.
            OSError: the other end has cut the bytes off.
        """
        self._check(offset, sum(map(len, buffers)))
        self.region.read_into(buffers, self.start + offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write buffers, one after the other, from ``offset`` of the call on.

        Raises:
            InputError: they reach beyond the window.
            OSError: the memory cannot be had.
        """
        self._check(offset, sum(map(len, buffers)))
        self.region.write(buffers, self.start + offset)

    def _check(self, offset: int, count_bytes: int) -> None:
        if offset + count_bytes > self.length:
            raise InputError(f"a call has {self.length} bytes of shared memory, found {offset + count_bytes}")


def remove_abandoned_files(directory: Path, now_s: float) -> None:
    """Remove what processes of this user left that died between making a file and its being opened at the other end.

    ``now_s`` counts from 1970, as the times of files do.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            if _NAME.fullmatch(path.name):
                with suppress(OSError):
                    _remove_if_abandoned(path, now_s)


def _remove_if_abandoned(path: Path, now_s: float) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
        if is_ours and now_s - found.st_mtime > ABANDONED_S and _is_unlocked(descriptor):
            path.unlink()
    finally:
        os.close(descriptor)


def _is_unlocked(descriptor: int) -> bool:
    """Tell whether nobody else has a lock on a file; this process has none afterwards either."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def is_local_peer(peer: str) -> bool:
    """Tell whether gRPC says that a peer is on this machine: a Unix socket or loopback, a tunnel's end included."""
    return _LOCAL_PEER.fullmatch(peer) is not None


def named_here(server: str) -> bool:
    """Tell whether a server's ``host:port`` or ``unix:path`` names this machine."""
    host = server.rpartition(":")[0].strip("[]")
    return server.startswith("unix:") or host in {"localhost", "::1"} or _LOOPBACK.fullmatch(host) is not None
