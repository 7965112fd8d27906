"""Reads and writes that pass by the system's memory, straight between the disk and memory of ours or the caller's.

    file      [ object                      |  rest of its block ][ object  ...      neighbours, all of one length
    in place  [ page: whole blocks ]  [ tail of the page in a landing slot ]  [ page ...
    landed    [ landing slot: whole blocks, one page or several, or a piece of one ]   copied from there

A direct read moves whole blocks between places that are aligned to them, and an object is some bytes longer than its
whole blocks. So what does not lie in whole blocks of the caller's lands in memory of ours first, and is copied, while
the disk reads what is next.
"""

import ctypes
import errno
import mmap as system_mmap
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from queue import Empty, SimpleQueue
from typing import NamedTuple

from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.read_queue import FileRead
from unified_cache.storage_backends.protocol import PageIO

__all__ = [
    "CALL_BYTES",
    "DIRECT_BLOCK_BYTES",
    "DIRECT_WRITE_BYTES_MIN",
    "LANDING_SLOTS",
    "DirectReads",
    "DirectRun",
    "DirectWrites",
    "begins_on_block",
    "is_block_aligned",
    "run_pages_max",
]

CALL_BYTES = 32 << 20
"""Best size of one get: many pages are read at a time, and each is verified as soon as it is there."""

DIRECT_BLOCK_BYTES = 4096
"""What a direct read is aligned to, in the file and in memory. Many disks take 512, a few ask for all of it."""

DIRECT_PAGES_MAX = 64
"""Pages of one read in place; each takes two of the 1024 buffers that a call may have, and a block of a slot."""

LANDING_SLOTS = 46
"""Reads under way at most, and a quarter less while what came is copied: never fewer than 32."""

_SLOT_BYTES = 66 * DIRECT_BLOCK_BYTES
"""Bytes of one read that lands: a quarter of a MiB, and what a page has beyond a power of two."""

DIRECT_WRITE_BYTES_MIN = 1 << 20
"""Smaller objects that must be durable take as long through the page cache, where the next read then finds them."""

_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class DirectRun(NamedTuple):
    """Neighbouring pages of one file, all of one length, that are read together; at most ``run_pages_max``."""

    number: int
    """Of the first page, as the caller counts them."""
    fd: int
    """Reads directly."""
    offset: int
    object_bytes: int
    """Of each page."""
    stride_bytes: int
    """From one page to the next, in whole blocks."""
    pages: Sequence[PageIO]
    is_file: bool
    """Whether its one page is all of the file: then the stride is longer than the page, and the file must not be."""


class _DirectPiece(NamedTuple):
    """Part of a run that one read brings."""

    progress: "_RunProgress"
    wanted_bytes: int
    copies: Sequence[tuple[memoryview, memoryview]]
    """What is copied once it has come: to, from."""


class _RunProgress:
    """Pieces of a run that are still to come."""

    __slots__ = ("is_whole", "left_count", "run")

    def __init__(self, run: DirectRun, pieces_count: int) -> None:
        self.run = run
        self.left_count = pieces_count
        self.is_whole = True
        """Whether all that has come came whole."""


class DirectReads:
    """Direct reads of one store. Thread-safe.

    A read that did not bring everything, for whatever reason, counts as none: an ordinary one follows, which tells
    what is wrong.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._landings: SimpleQueue[mmap] = SimpleQueue()
        """Of calls that have returned: as many as there were calls at a time."""
        self._is_refused = False

    @property
    def is_refused(self) -> bool:
        """Whether the file system takes no direct reads."""
        return self._is_refused

    def read(self, runs: Iterable[DirectRun]) -> Generator[tuple[DirectRun, bool], None, None]:
        """Fill the pages of runs; yield each run when it has ended, with whether all of it came.

        Runs are taken as they can be begun, and ``LANDING_SLOTS`` reads are under way at a time. A page that came was
        added to its checksum. Whoever stops before the end closes this, which waits for what is under way.
        """
        landing = self._lend_landing()
        view = memoryview(landing)
        slots = [view[start : start + _SLOT_BYTES] for start in range(0, len(view), _SLOT_BYTES)]
        free = list(range(LANDING_SLOTS))
        under_way: dict[int, _DirectPiece] = {}

        def begin() -> Iterator[FileRead]:
            for run in runs:
                is_in_place = begins_on_block(run.pages[0])
                starts = range(0, 1 if is_in_place else len(run.pages) * run.stride_bytes, _SLOT_BYTES)
                progress = _RunProgress(run, len(starts))
                for start in starts:
                    number = free.pop()
                    cut = _in_place if is_in_place else _landed
                    buffers, under_way[number] = cut(progress, start, slots[number])
                    yield FileRead(number, run.fd, buffers, run.offset + start)

        try:
            with closing(self._disk.preadv_each(begin(), LANDING_SLOTS)) as outcomes:
                for (number, *_), outcome in outcomes:
                    progress = self._end(under_way.pop(number), outcome)
                    free.append(number)
                    if not progress.left_count:
                        yield progress.run, progress.is_whole
        finally:
            self._landings.put(landing)

    def begin(self, fd: int) -> bool:
        """Make reads of a descriptor bypass the page cache; return whether they do."""
        try:
            self._disk.begin_direct(fd)
        except OSError:
            self._is_refused = True
        return not self._is_refused

    def _end(self, piece: _DirectPiece, outcome: int | OSError) -> _RunProgress:
        """Put what came of a piece where it belongs."""
        progress, wanted_bytes, copies = piece
        run = progress.run
        progress.left_count -= 1
        if isinstance(outcome, OSError):
            self._is_refused = self._is_refused or outcome.errno in _REFUSED
            progress.is_whole = False
        elif outcome == wanted_bytes or (outcome > wanted_bytes and not run.is_file):
            for target, source in copies:
                target[:] = source
        else:
            progress.is_whole = False
        if progress.is_whole and not progress.left_count:
            for page in run.pages:
                if page.checksum is not None:
                    page.checksum.add_all(page.buffers)
        return progress

    def _lend_landing(self) -> mmap:
        try:
            return self._landings.get_nowait()
        except Empty:
            landing = mmap(-1, LANDING_SLOTS * _SLOT_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
            if "MADV_HUGEPAGE" in vars(system_mmap):
                with suppress(OSError):  # a system without them
                    landing.madvise(system_mmap.MADV_HUGEPAGE)
            return landing


def run_pages_max(page: PageIO, stride_bytes: int) -> int:
    """Return how many neighbours like that page one run takes."""
    return DIRECT_PAGES_MAX if begins_on_block(page) else max(_SLOT_BYTES // stride_bytes, 1)


def is_block_aligned(buffer: memoryview) -> bool:
    """Tell whether a buffer begins where a direct read may begin."""
    is_fit = buffer.nbytes > 0 and buffer.contiguous and not buffer.readonly
    return is_fit and not ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % DIRECT_BLOCK_BYTES


def begins_on_block(page: PageIO) -> bool:
    """Tell whether a page lies in one buffer, from a block on, and so can be read in place."""
    return len(page.buffers) == 1 and is_block_aligned(page.buffers[0])


def _in_place(progress: _RunProgress, start: int, slot: memoryview) -> tuple[tuple[memoryview, ...], _DirectPiece]:
    """Cut all of a run into whole blocks of its pages, and the rest of each, which goes through a slot."""
    assert start == 0
    run = progress.run
    whole_bytes = run.object_bytes // DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES
    rest_bytes = run.stride_bytes - whole_bytes
    buffers: list[memoryview] = []
    copies: list[tuple[memoryview, memoryview]] = []
    for number, page in enumerate(run.pages):
        whole, rest = page.buffers[0][:whole_bytes], page.buffers[0][whole_bytes:]
        at = number * DIRECT_BLOCK_BYTES
        buffers.append(whole)
        if rest_bytes:
            buffers.append(slot[at : at + rest_bytes])
            copies.append((rest, slot[at : at + rest.nbytes]))
    wanted_bytes = (len(run.pages) - 1) * run.stride_bytes + run.object_bytes
    return tuple(buffers), _DirectPiece(progress, wanted_bytes, copies)


def _landed(progress: _RunProgress, start: int, slot: memoryview) -> tuple[tuple[memoryview, ...], _DirectPiece]:
    """Read what a slot takes of a run, from ``start`` on, and copy it from there into the buffers of its pages."""
    run = progress.run
    end = min(start + _SLOT_BYTES, len(run.pages) * run.stride_bytes)
    wanted_bytes = max(min(end, (len(run.pages) - 1) * run.stride_bytes + run.object_bytes) - start, 0)
    copies: list[tuple[memoryview, memoryview]] = []
    for number, page in enumerate(run.pages):
        at = number * run.stride_bytes
        for buffer in page.buffers:
            first, last = max(at, start), min(at + buffer.nbytes, end)
            if first < last:
                copies.append((buffer.cast("B")[first - at : last - at], slot[first - start : last - start]))
            at += buffer.nbytes
    return (slot[: end - start],), _DirectPiece(progress, wanted_bytes, copies)


class DirectWrites:
    """Direct writes of one store. Thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._is_refused = False

    @property
    def is_refused(self) -> bool:
        """Whether the file system takes no direct writes."""
        return self._is_refused

    def begin(self, fd: int) -> bool:
        """Make writes of a descriptor bypass the page cache; return whether they do."""
        try:
            self._disk.begin_direct(fd)
        except OSError:
            self._is_refused = True
        return not self._is_refused

    def write_blocks(self, fd: int, page: memoryview, offset: int) -> int:
        """Write the whole blocks of a page that begins on a block, at a block of a file; return how many bytes went.

        ``fd`` writes directly. As for ``write_front``, it may be any part of them.

        Raises:
            OSError: they could not be written.
        """
        try:
            return self._disk.pwritev(fd, [page[: len(page) // DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES]], offset)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._is_refused = True
            return 0

    def write_front(self, fd: int, page: memoryview) -> int:
        """Write the whole blocks of a page that begins on a block, at the start of a file; return how many bytes went.

        It may be any part of them, none too, and where the file system takes no direct writes always is: what is left
        is written from there on in the ordinary way, which ``fd`` is open for again.

        Raises:
            OSError: they could not be written.
        """
        if self._is_refused or not self.begin(fd):
            return 0
        try:
            return self.write_blocks(fd, page, 0)
        finally:
            self._disk.end_direct(fd)
