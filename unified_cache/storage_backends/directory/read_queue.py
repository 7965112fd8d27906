"""Queues of the kernel (io_submit(2)): direct reads of several files that are begun by one call and awaited together.

A disk takes as long for sixteen small reads as for a few, and a call for each costs the processor more than the read.
Linux has these queues since 2.6, and lets containers use them. Only direct reads go on while others are begun.
"""

import ctypes
import errno
import os
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from queue import Empty, SimpleQueue
from typing import NamedTuple, cast

__all__ = ["QUEUE_READS_MAX", "FileRead", "ReadQueues"]

QUEUE_READS_MAX = 64
"""Reads that a queue has room for."""

_IOCB = struct.Struct("=QIIHhiQQqQII")
"""One read, see io_submit(2): its number, key and flags, operation, priority, file, buffers and how many, offset."""

_PREADV = 7

_EVENT = struct.Struct("=QQqq")
"""End of a read: its number, its iocb, the bytes that came or an error, and a second result."""


class FileRead(NamedTuple):
    """One read of a file that is open for direct reads."""

    fd: int
    buffers: tuple[memoryview, ...]
    """Writable, each of whole blocks and on a block."""
    offset: int


class _Calls(NamedTuple):
    """Numbers of the system's calls, which differ by processor."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_CALLS = {"x86_64": _Calls(206, 207, 209, 208), "aarch64": _Calls(0, 1, 2, 4)}

_Syscall = Callable[[int, int, int, int, int, int], int]


@cache
def _calls() -> _Calls | None:
    is_known = sys.platform == "linux" and sys.maxsize > 1 << 32
    return _CALLS.get(os.uname().machine) if is_known else None


@cache
def _syscall() -> _Syscall:
    """Bind syscall(2) for calls that may wait: the interpreter lock is free meanwhile."""
    found = ctypes.CDLL(None, use_errno=True).syscall
    found.restype = ctypes.c_long
    found.argtypes = (ctypes.c_long, *[ctypes.c_size_t] * 5)
    return cast("_Syscall", found)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


class _ReadQueue:
    """One queue of the kernel. For one thread at a time; a forked child has none of its parent's."""

    __slots__ = ("_call", "_calls", "_context")

    def __init__(self, calls: _Calls) -> None:
        """Raises OSError where the system gives no queue."""
        self._calls = calls
        self._call = _syscall()
        self._context = 0
        context = array("Q", [0])
        if self._call(calls.setup, QUEUE_READS_MAX, context.buffer_info()[0], 0, 0, 0):
            raise _error()
        self._context = context[0]

    def read(self, reads: Sequence[FileRead]) -> list[int | OSError]:
        """Begin all reads, at most ``QUEUE_READS_MAX``, wait for them, return the bytes that came or what went wrong.

        Raises:
            OSError: the kernel does not take them. None is under way.
        """
        vectors = array("Q")
        for read in reads:
            for buffer in read.buffers:
                vectors.append(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
                vectors.append(buffer.nbytes)
        iocbs = array("B", bytes(_IOCB.size * len(reads)))
        address, first = vectors.buffer_info()[0], iocbs.buffer_info()[0]
        for number, (fd, buffers, offset) in enumerate(reads):
            place = number * _IOCB.size
            _IOCB.pack_into(iocbs, place, number, 0, 0, _PREADV, 0, fd, address, len(buffers), offset, 0, 0, 0)
            address += 2 * vectors.itemsize * len(buffers)
        pointers = array("Q", [first + number * _IOCB.size for number in range(len(reads))])
        try:
            begun_count = self._begin(pointers)
            outcomes = self._outcomes(len(reads), begun_count)
        except BaseException:
            # The disk may still fill buffers, and who owns them is about to get them back: this waits for it.
            self.close()
            raise
        return outcomes

    def close(self) -> None:
        """Let the queue go; waits for what is under way."""
        context, self._context = self._context, 0
        if context:
            self._call(self._calls.destroy, context, 0, 0, 0, 0)

    def __del__(self) -> None:
        self.close()

    def _begin(self, pointers: "array[int]") -> int:
        """Begin reads; return how many were begun."""
        begun_count = 0
        while begun_count < len(pointers):
            place = pointers.buffer_info()[0] + begun_count * pointers.itemsize
            count = self._call(self._calls.submit, self._context, len(pointers) - begun_count, place, 0, 0)
            if count <= 0:
                if not begun_count:
                    raise _error()
                break
            begun_count += count
        return begun_count

    def _outcomes(self, reads_count: int, begun_count: int) -> list[int | OSError]:
        """Wait for the first ``begun_count`` reads; of the others nothing came."""
        outcomes: list[int | OSError] = [0] * reads_count
        events = array("B", bytes(_EVENT.size * begun_count))
        left_count = begun_count
        while left_count:
            place = events.buffer_info()[0]
            count = self._call(self._calls.getevents, self._context, left_count, left_count, place, 0)
            if count < 0:
                error = _error()
                if error.errno != errno.EINTR:
                    raise error
                continue
            for each in range(count):
                number, _, result, _ = _EVENT.unpack_from(events, each * _EVENT.size)
                outcomes[number] = result if result >= 0 else OSError(-result, os.strerror(-result))
            left_count -= count
        return outcomes


class ReadQueues:
    """Queues of this process, as many as there were threads that read at a time. Thread-safe."""

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle: SimpleQueue[_ReadQueue] = SimpleQueue()

    def read(self, reads: Sequence[FileRead]) -> list[int | OSError]:
        """Read from several files at a time; return the bytes that came of each, or what went wrong with it.

        Raises:
            OSError: the system has no queues, gives none now, or does not take these. None is under way.
        """
        outcomes: list[int | OSError] = []
        for start in range(0, len(reads), QUEUE_READS_MAX):
            queue = self._lend()
            outcomes += queue.read(reads[start : start + QUEUE_READS_MAX])
            self._idle.put(queue)
        return outcomes

    def _lend(self) -> _ReadQueue:
        try:
            return self._idle.get_nowait()
        except Empty:
            calls = _calls()
            if calls is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
            return _ReadQueue(calls)
