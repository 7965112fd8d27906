"""Memory that two processes of one machine share: a memfd that both map, sealed so that neither can cut it off.

Whoever has a file mapped is killed (SIGBUS) when it touches what somebody has cut off. A memfd that is sealed against
shrinking has no such end: its maker seals it, and either end looks for the seals before it maps it. What lies in it
either end may change at any time, so what is verified is a copy that nobody else can reach, or is read by nobody but
whoever may have changed it.

A descriptor cannot go through gRPC. It goes over a Unix socket (``local_sockets``), which stays open as long as its
maker shares the memory, and so ends with the process however that ends: the other end knows when nobody is left to
share with. The memory has no name and no file system; it is freed once both ends have let it go.
"""

import fcntl
import mmap
import os
import re
import select
import socket
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from unified_cache.errors import InputError
from unified_cache.wire.local_sockets import SocketOffer, connected_socket

__all__ = [
    "HELD_BYTES_MAX",
    "SEALS",
    "WINDOW_OFFSET",
    "ReceivedRegion",
    "RegionOffer",
    "RegionTie",
    "SharedRegion",
    "SharedSlice",
    "is_local_peer",
    "named_here",
    "received_region",
]

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Its length stays as it is, and so do its seals."""

WINDOW_OFFSET = 64
"""Best offset of a slice within a page of the machine's memory.

Zen 3 copies at a third of its speed where the target lies 1 to 16 bytes after the source, multiples of 4 KiB aside.
Slabs begin 0 or 64 bytes into a page of memory, large arrays of numpy 16; where pages are multiples of 128 bytes long,
none of theirs ever lies that way to a window that begins here.
"""

HELD_BYTES_MAX = 64 << 10
"""Longest copy that keeps the interpreter lock: some 7 us, as long as it takes to hand the lock over and back."""

_MEMFD_NAME = "unified-cache"
"""For people who look at a process; names of memfds need not differ."""

_LETTER = b"m"
"""Sent with a descriptor: it cannot go alone."""

_LOOPBACK = re.compile(r"127(\.[0-9]+){3}")
_LOCAL_PEER = re.compile(r"unix(-abstract)?:.*|ipv4:127\.[0-9.:]+|ipv6:(\[|%5B)::1(\]|%5D)(:[0-9]+)?", re.DOTALL)


class SharedRegion:
    """Shared memory as this process has it mapped, until its last reference goes: a call that is given up may write."""

    __slots__ = ("_memory", "region_bytes")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.region_bytes = len(memory)

    @classmethod
    def mapped(cls, descriptor: int, region_bytes: int) -> "SharedRegion":
        """Map memory that is sealed and of the length said; the descriptor stays the caller's.

        Raises:
            InputError: it is anything else.
            OSError: there is not as much memory.
        """
        try:
            # First, since it is asked of memory alone: any other file may have a question answered when it likes.
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise InputError("expected memory that can be sealed") from error
        if seals & SEALS != SEALS:
            raise InputError(f"expected memory sealed with {SEALS:#x}, found {seals:#x}")
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != region_bytes:
            raise InputError(f"expected memory of {region_bytes} bytes, found {found.st_size}")
        # Where its maker has left holes, there is an error now in place of a signal when they are touched.
        os.posix_fallocate(descriptor, 0, region_bytes)
        try:
            shared = mmap.mmap(descriptor, region_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except PermissionError as error:
            raise InputError("expected memory that can be written") from error
        return cls(memoryview(shared))

    def view(self, start: int, end: int) -> memoryview:
        """Return the memory itself: whoever shares it may change it at any time."""
        return self._memory[start:end]

    def read_into(self, buffers: Sequence[memoryview], start: int) -> None:
        """Fill buffers with the bytes from ``start`` on; the region has as many."""
        for buffer in buffers:
            end = start + len(buffer)
            _copy(buffer, self._memory[start:end])
            start = end

    def write(self, buffers: Sequence[memoryview], start: int) -> None:
        """Write buffers, one after the other, from ``start`` on; the region has as many bytes."""
        for buffer in buffers:
            end = start + len(buffer)
            _copy(self._memory[start:end], buffer)
            start = end


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes, as many as both have; large ones without the interpreter lock."""
    if len(source) <= HELD_BYTES_MAX:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class SharedSlice(NamedTuple):
    """The part of a region that holds the bytes of one call, in place of a stream."""

    region: SharedRegion
    name: str
    """Name of the region, as the server gave it."""
    start: int
    length: int

    def view(self, offset: int, count_bytes: int) -> memoryview:
        """Return the memory itself, from ``offset`` of the call on: whoever shares it may change it at any time.

        Raises:
            InputError: it reaches beyond the window.
        """
        self._check(offset, count_bytes)
        return self.region.view(self.start + offset, self.start + offset + count_bytes)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill buffers, one after the other, with the bytes from ``offset`` of the call on.

        Raises:
            InputError: they reach beyond the window.
        """
        self._check(offset, sum(map(len, buffers)))
        self.region.read_into(buffers, self.start + offset)

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Write buffers, one after the other, from ``offset`` of the call on.

        Raises:
            InputError: they reach beyond the window.
        """
        self._check(offset, sum(map(len, buffers)))
        self.region.write(buffers, self.start + offset)

    def _check(self, offset: int, count_bytes: int) -> None:
        if offset + count_bytes > self.length:
            raise InputError(f"a call has {self.length} bytes of shared memory, found {offset + count_bytes}")


class RegionTie:
    """One end of the socket that memory came over. It ends when either process closes it, forgets it or dies."""

    __slots__ = ("__weakref__", "_close", "_descriptor")

    def __init__(self, connection: socket.socket) -> None:
        self._descriptor = connection.detach()
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False

    @property
    def has_ended(self) -> bool:
        """Whether the other end has let the memory go or died; or has sent anything, which it never should."""
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        return not self._close.alive or bool(waiting.poll(0))

    def close(self) -> None:
        """Let the other end know that nothing is shared any more."""
        self._close()


class RegionOffer:
    """Memory of this process on offer to a server: sealed, mapped here, and handed over once. Its maker closes it."""

    __slots__ = ("_descriptor", "_socket", "region")

    def __init__(self, descriptor: int, region: SharedRegion, offer: SocketOffer) -> None:
        self._descriptor = descriptor
        self._socket = offer
        self.region = region

    @classmethod
    def make(cls, region_bytes: int) -> "RegionOffer":
        """Make memory, all of it there, and listen for a server.

        Raises:
            OSError: there is not as much memory, or this system has no such memory or sockets. Nothing is left.
        """
        descriptor = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, region_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            return cls(descriptor, SharedRegion.mapped(descriptor, region_bytes), SocketOffer.listen())
        except OSError:
            os.close(descriptor)
            raise

    @property
    def socket_name(self) -> str:
        """Name of the socket that a server connects to."""
        return self._socket.name

    @property
    def socket_proof(self) -> bytes:
        """What the server sends first."""
        return self._socket.proof

    def hand_over(self) -> RegionTie | None:
        """Wait for the server to connect and hand the memory over; None where it does not, or does not prove itself."""
        try:
            connection = self._socket.accepted()
        except OSError:
            return None
        with suppress(OSError):  # whoever has gone meanwhile answers with an error
            socket.send_fds(connection, [_LETTER], [self._descriptor])
        return RegionTie(connection)

    def withdraw(self) -> None:
        """Hand nothing over any more, from any thread: who waits in ``hand_over`` returns."""
        self._socket.withdraw()

    def close(self) -> None:
        """Let go of all but the mapping; nobody may wait in ``hand_over``."""
        self._socket.close()
        os.close(self._descriptor)


class ReceivedRegion(NamedTuple):
    """Memory that another process has handed over."""

    region: SharedRegion
    tie: RegionTie


def received_region(socket_name: str, socket_proof: bytes, region_bytes: int) -> ReceivedRegion:
    """Connect to the socket of a client and map the memory that it hands over; what is anything else is refused.

    Raises:
        InputError: nobody of this user listens there or hands anything over in time, it is not sealed memory of that
            length that may be written, or there is not as much.
    """
    connection = connected_socket(socket_name, socket_proof)
    received: list[int] = []
    try:
        letter, received, flags, _ = socket.recv_fds(connection, len(_LETTER), 1, socket.MSG_CMSG_CLOEXEC)
        if letter != _LETTER or len(received) != 1 or flags & socket.MSG_CTRUNC:
            raise InputError("expected one descriptor")
        return ReceivedRegion(SharedRegion.mapped(received[0], region_bytes), RegionTie(connection))
    except OSError as error:
        connection.close()
        raise InputError("expected as much memory as said, handed over at once") from error
    except InputError:
        connection.close()
        raise
    finally:
        for descriptor in received:
            with suppress(OSError):
                os.close(descriptor)


def is_local_peer(peer: str) -> bool:
    """Tell whether gRPC says that a peer is on this machine: a Unix socket or loopback, a tunnel's end included."""
    return _LOCAL_PEER.fullmatch(peer) is not None


def named_here(server: str) -> bool:
    """Tell whether a server's ``host:port`` or ``unix:path`` names this machine."""
    host = server.rpartition(":")[0].strip("[]")
    return server.startswith("unix:") or host in {"localhost", "::1"} or _LOOPBACK.fullmatch(host) is not None
