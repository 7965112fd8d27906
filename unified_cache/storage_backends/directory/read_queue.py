"""Queues of the kernel (io_submit(2)): direct reads that are begun by few calls, and go on while others are awaited.

A disk takes as long for sixteen small reads as for a few, and a call for each costs the processor more than the read.
Linux has these queues since 2.6, and lets containers use them. Only direct reads go on while others are begun.
"""

import ctypes
import errno
import os
import struct
import sys
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cache
from itertools import islice
from queue import Empty, SimpleQueue
from typing import NamedTuple, cast

QUEUE_READS_MAX = 64
"""Reads that a queue has room for."""

_GROUPS_COUNT = 4
"""Reads under way are topped up by so much of the depth at a time: a call for each would cost the processor more."""

_IOCB = struct.Struct("=QIIHhiQQqQII")
"""One read, see io_submit(2): its number, key and flags, operation, priority, file, memory and its bytes, offset."""

_PREAD = 0

_EVENT = struct.Struct("=QQqq")
"""End of a read: its number, its iocb, the bytes that came or an error, and a second result."""


class FileRead(NamedTuple):
    """One read of a file that is open for direct reads."""

    number: int
    fd: int
    buffer: memoryview
    """Writable, of whole blocks and on a block."""
    offset: int


FileReads = Generator[tuple[FileRead, int | OSError], None, None]
"""Reads as they end, each with the bytes that came or what went wrong. Closing it waits for those under way."""


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

    def __init__(self, calls: _Calls) -> None:
        """Raises OSError where the system gives no queue."""
        self._calls = calls
        self._call = _syscall()
        self._context = 0
        self._events = array("B", bytes(_EVENT.size * QUEUE_READS_MAX))
        self._under_way: dict[int, FileRead] = {}
        self._process = os.getpid()
        context = array("Q", [0])
        if self._call(calls.setup, QUEUE_READS_MAX, context.buffer_info()[0], 0, 0, 0):
            raise _error()
        self._context = context[0]

    @property
    def is_own(self) -> bool:
        """Whether it is of this process, and not of the one that forked it."""
        return self._process == os.getpid()

    @property
    def under_way_count(self) -> int:
        """Reads that were begun and have not been awaited."""
        return len(self._under_way)

    def begin(self, reads: Sequence[FileRead]) -> list[tuple[FileRead, OSError]]:
        """Begin reads that there is room for; return those that the kernel does not take, and why."""
        tags = [tag for tag in range(QUEUE_READS_MAX) if tag not in self._under_way][: len(reads)]
        pointers, iocbs = _iocbs_of(reads, tags)
        refused: list[tuple[FileRead, OSError]] = []
        done_count = 0
        while done_count < len(reads):
            place = pointers.buffer_info()[0] + done_count * pointers.itemsize
            count = self._call(self._calls.submit, self._context, len(reads) - done_count, place, 0, 0)
            if count > 0:
                end = done_count + count
                self._under_way.update(zip(tags[done_count:end], reads[done_count:end], strict=True))
                done_count = end
            else:
                refused.append((reads[done_count], _error()))
                done_count += 1
        del iocbs  # the kernel has copied them
        return refused

    def outcomes(self, count_min: int) -> list[tuple[FileRead, int | OSError]]:
        """Wait until so many reads have ended; return each that has, with its bytes or its error. May raise OSError."""
        place = self._events.buffer_info()[0]
        count = 0
        while count <= 0:
            count = self._call(self._calls.getevents, self._context, count_min, QUEUE_READS_MAX, place, 0)
            if count < 0:
                error = _error()
                if error.errno != errno.EINTR:
                    raise error
        ended: list[tuple[FileRead, int | OSError]] = []
        for each in range(count):
            tag, _, result, _ = _EVENT.unpack_from(self._events, each * _EVENT.size)
            ended.append((self._under_way.pop(tag), result if result >= 0 else OSError(-result, os.strerror(-result))))
        return ended

    def close(self) -> None:
        """Release the queue; waits for what is under way."""
        context, self._context = self._context, 0
        if context and self.is_own:
            self._call(self._calls.destroy, context, 0, 0, 0, 0)

    def __del__(self) -> None:
        self.close()


def _iocbs_of(reads: Sequence[FileRead], tags: Sequence[int]) -> "tuple[array[int], array[int]]":
    """Describe reads to the kernel: pointers to their iocbs, and these."""
    iocbs = array("B", bytes(_IOCB.size * len(reads)))
    first = iocbs.buffer_info()[0]
    for place, (tag, (_, fd, buffer, offset)) in enumerate(zip(tags, reads, strict=True)):
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        _IOCB.pack_into(iocbs, place * _IOCB.size, tag, 0, 0, _PREAD, 0, fd, address, buffer.nbytes, offset, 0, 0, 0)
    return array("Q", [first + place * _IOCB.size for place in range(len(reads))]), iocbs


class ReadQueues:
    """Queues of this process, as many as there were threads that read at a time. Thread-safe."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[_ReadQueue] = SimpleQueue()

    def read(self, reads: Iterable[FileRead], depth: int) -> FileReads:
        """Yield reads as they end, while others are under way: ``depth`` of them, or up to a quarter less.

        A read is taken when it can be begun, after all that were yielded before have been used. ``depth`` is at most
        ``QUEUE_READS_MAX``. Raises OSError, with no read taken, where the system gives no queue now.
        """
        return self._read(self._reserve(), reads, depth)

    def _read(self, queue: _ReadQueue, reads: Iterable[FileRead], depth: int) -> FileReads:
        coming, is_over = iter(reads), False
        group_count = max(depth // _GROUPS_COUNT, 1)
        try:
            while queue.under_way_count or not is_over:
                if is_over or depth - queue.under_way_count < group_count:
                    yield from queue.outcomes(1 if is_over else group_count)
                else:
                    begun = list(islice(coming, group_count))
                    is_over = len(begun) < group_count
                    yield from queue.begin(begun)
        except BaseException:
            # The disk may still fill buffers, and who owns them is about to get them back: this waits for it.
            queue.close()
            raise
        self._idle.put(queue)

    def _reserve(self) -> _ReadQueue:
        try:
            while not (queue := self._idle.get_nowait()).is_own:
                pass
        except Empty:
            calls = _calls()
            if calls is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
            return _ReadQueue(calls)
        return queue
