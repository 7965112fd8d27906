"""The pages of a call, read out of their files: where each lies is a value, and how it is read is decided here.

    file     [ header payload ]                                                         a page that is all of a file
    file     [ header payload | rest of slot ][ header payload | rest of slot ] ...     neighbours, all of one length

    read_memory    what the system has in memory, without waiting; neighbours by one call, then verified
    read_directly  what it lacks: many at a time, past its memory; neighbours by one call

What is asked for together was stored together, and is in memory as a whole or not at all: so few places are looked at.
Of a page that did not come, for whatever reason, the ordinary read of its store that follows tells what is wrong.
A copy of half a MiB evicts Python's own code from the processor's caches, so little of it runs between two copies.

A direct read moves whole blocks to places that are aligned to them, and an object is some bytes longer than its whole
blocks. So all of it lands in memory of ours first, in huge pages, and is copied while the disk reads what is next::

    file         [ object                      |  rest of its block ][ object  ...      neighbours, all of one length
    bounce slot  [ whole blocks: one page or several, or a piece of one ]                 copied from there
"""

import errno
import mmap as system_mmap
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from unified_cache.core.seal import PageChecksum, verify_buffers
from unified_cache.storage_backends.directory.disk import (
    BEYOND,
    BUFFERS_MAX,
    IN_MEMORY,
    PIECE_BYTES,
    Disk,
    read_at,
)
from unified_cache.storage_backends.directory.read_queue import FileRead
from unified_cache.storage_backends.protocol import PageIO, page_bytes

BLOCK_BYTES = 4096
"""What is looked at of a page: whether the system has its first block. To look at all would take as long as it has."""


class SystemMemory:
    """The system's memory, as far as the system can tell what it has there. Thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.reports_blocks = True
        """Whether it is believed to tell whether a block is there."""
        self._reports_reads = True
        """Whether it is believed to read what is there, and nothing else."""
        self._is_memory = False
        """Whether the file system cannot tell, and needs not: it is memory."""

    @property
    def is_readable(self) -> bool:
        """Whether reads can be limited to what is cached; found out by the first read.

        Where they cannot, as over FUSE and NFS, to open a file whose name is in memory may wait for others, too.
        """
        return self._reports_reads or self._is_memory

    def learn(self, fd: int) -> None:
        """Find out by a file what the system says, before anybody asks who must not wait."""
        self.read(fd, (memoryview(bytearray(1)),), 0)

    def is_cold(self, fd: int, offset: int) -> bool:
        """Return whether the system lacks the block at an offset, as far as it can say.

        A read of it from memory would come to nothing, and have the system begin to read what is better read directly.
        """
        if self._is_memory or not self.reports_blocks:
            return False
        try:
            return not self._disk.has_cached(fd, offset, BLOCK_BYTES)
        except OSError:
            self.reports_blocks = False
            return False

    def may_lack(self, fd: int, offset: int) -> bool:
        """Return whether the system lacks the block at an offset, or does not say."""
        return self.is_cold(fd, offset) or not (self._is_memory or self.reports_blocks)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers as far as their bytes are there, and let the system begin to read others.

        Return how many bytes came. Whatever goes wrong, none came, and an ordinary read tells what it was.
        """
        try:
            if self._is_memory:
                return self._disk.preadv(fd, buffers, offset)
            return self._disk.preadv_cached(fd, buffers, offset) if self._reports_reads else 0
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and not self._is_memory:
                self._is_memory = self._disk.file_system_of(fd) in IN_MEMORY
                self._reports_reads = False
            return 0


CALL_BYTES = 32 << 20
"""Best size of one get: many pages are read at a time, and each is verified as soon as it is there."""

DIRECT_BLOCK_BYTES = 4096
"""What a direct read is aligned to, in the file and in memory. Many disks take 512, a few ask for all of it."""

BOUNCE_SLOTS = 46
"""Reads under way at most, and a quarter less while arrived bytes are copied: never fewer than 32."""

_SLOT_BYTES = 66 * DIRECT_BLOCK_BYTES
"""Bytes of one read that lands: a quarter of a MiB, and what a page has beyond a power of two."""

_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(slots=True)
class DirectRun:
    """Neighbouring pages of one file, all of one length, that are read together: one, or as many as a slot takes."""

    number: int
    """Of the first page, as the caller counts them."""
    fd: int
    offset: int
    object_bytes: int
    stride_bytes: int
    """From one page to the next, in whole blocks."""
    pages: Sequence[PageIO]
    is_file: bool
    """Whether its one page is all of the file: then the stride is longer than the page, and the file must not be."""
    left_count: int = 0
    """Pieces that were begun and have not come."""
    is_whole: bool = True
    """Whether all of it has come so far."""


class _DirectPiece(NamedTuple):
    run: DirectRun
    wanted_bytes: int
    copies: Sequence[tuple[memoryview, memoryview]]
    """What is copied once it has come: to, from."""


class DirectReads:
    """Direct reads of one store. Thread-safe.

    A read that did not bring everything, for whatever reason, counts as none: an ordinary one follows, which tells
    what is wrong.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._bounce_buffers: SimpleQueue[mmap] = SimpleQueue()
        """Of calls that have returned: as many as there were calls at a time."""
        self.is_refused = False
        """Whether the file system takes no direct reads."""

    def read(self, runs: Iterable[DirectRun]) -> Generator[DirectRun, None, None]:
        """Fill the pages of runs; yield each run when it has ended.

        Runs are taken as they can be begun, and ``BOUNCE_SLOTS`` reads are under way at a time. A page that came was
        added to its checksum. A caller that stops before the end closes this, which waits for what is under way. Raises
        OSError where the system has no queue for them.
        """
        bounce_buffer = self._reserve_bounce_buffer()
        view = memoryview(bounce_buffer)
        slots = [view[start : start + _SLOT_BYTES] for start in range(0, len(view), _SLOT_BYTES)]
        free = list(range(BOUNCE_SLOTS))
        under_way: dict[int, _DirectPiece] = {}

        def begin() -> Iterator[FileRead]:
            for run in runs:
                starts = range(0, len(run.pages) * run.stride_bytes, _SLOT_BYTES)
                run.left_count = len(starts)
                for start in starts:
                    number = free.pop()
                    buffer, under_way[number] = _piece_of(run, start, slots[number])
                    yield FileRead(number, run.fd, buffer, run.offset + start)

        try:
            with closing(self._disk.read_each(begin(), BOUNCE_SLOTS)) as outcomes:
                for (number, *_), outcome in outcomes:
                    run = self._end(under_way.pop(number), outcome)
                    free.append(number)
                    if not run.left_count:
                        yield run
        finally:
            self._bounce_buffers.put(bounce_buffer)

    def begin(self, fd: int) -> bool:
        """Make reads of a descriptor bypass the page cache; return whether they do."""
        try:
            self._disk.begin_direct(fd)
        except OSError:
            self.is_refused = True
        return not self.is_refused

    def _end(self, piece: _DirectPiece, outcome: int | OSError) -> DirectRun:
        """Put the bytes of a piece that arrived where they belong."""
        run, wanted_bytes, copies = piece
        run.left_count -= 1
        if isinstance(outcome, OSError):
            self.is_refused = self.is_refused or outcome.errno in _REFUSED
            run.is_whole = False
        elif outcome == wanted_bytes or (outcome > wanted_bytes and not run.is_file):
            for target, source in copies:
                target[:] = source
        else:
            run.is_whole = False
        if run.is_whole and not run.left_count:
            for page in run.pages:
                if page.checksum is not None:
                    page.checksum.add_all(page.buffers)
        return run

    def _reserve_bounce_buffer(self) -> mmap:
        try:
            return self._bounce_buffers.get_nowait()
        except Empty:
            bounce_buffer = mmap(-1, BOUNCE_SLOTS * _SLOT_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
            if "MADV_HUGEPAGE" in vars(system_mmap):
                with suppress(OSError):  # a system without them
                    bounce_buffer.madvise(system_mmap.MADV_HUGEPAGE)
            return bounce_buffer


def _piece_of(run: DirectRun, start: int, slot: memoryview) -> tuple[memoryview, _DirectPiece]:
    """Read what a slot takes of a run, from ``start`` on, and copy it from there into the buffers of its pages."""
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
    return slot[: end - start], _DirectPiece(run, wanted_bytes, copies)


DIRECT_BYTES_MIN = 32 << 10
"""Smaller pages are left to the system's memory, where the next reader finds them: what is copied is little.

A slot of ``packed:`` for so much is of whole blocks.
"""

ALONE_BYTES_MIN = 1 << 20
"""Of a page that is asked for alone, to be read directly."""

ASKED_PAGES = 16
"""Of so many pages the first is looked at, while others are read directly."""

RUN_BYTES_MAX = 2 << 20
"""Bytes of one read from memory: they are in the processor's caches when they are verified."""

GAP_BYTES_MAX = 4096

_GAP = memoryview(bytearray(GAP_BYTES_MAX))
"""For the bytes between two pages; nobody looks at it."""


Place = tuple[int, int]
"""Place of a page: a descriptor of its file, and the offset of the page in it."""


class PlacedPages(Protocol):
    """The pages of one call by their numbers in it, and the files that they lie in."""

    open_max: int
    """Pages that may be open at a time."""

    def open(self, number: int) -> Place | None:
        """Return the place of a page in a file that is open until ``close``; None where there is none to be read."""
        ...

    def stride_bytes(self, number: int) -> int:
        """Return the bytes from a page to its neighbour; 0 where it is all of its file, which may not be longer."""
        ...

    def direct_fd(self, number: int, direct: DirectReads) -> int:
        """Return a descriptor of the file of an open page that reads directly; -1 where there is none to be had."""
        ...

    def close(self, numbers: Iterable[int]) -> None:
        """Release the files of pages, those that are open."""
        ...


class PageReads:
    """Reads of the pages of one store. Thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self.memory = SystemMemory(disk)
        self.direct = DirectReads(disk)

    def may_be_direct(self, sizes: Sequence[int]) -> bool:
        """Return whether to look where pages of these bytes are: a small one alone comes sooner than the answer."""
        if not self.memory.reports_blocks or self.direct.is_refused:
            return False
        return max(sizes, default=0) >= (DIRECT_BYTES_MIN if len(sizes) > 1 else ALONE_BYTES_MIN)

    def read_directly(self, pages: Sequence[PageIO], sizes: Sequence[int], places: PlacedPages) -> Set[int]:
        """Fill pages past the system's memory, as far as it lacks them; return which came. Closes all of them."""
        came: set[int] = set()
        cold = self._cold_runs(pages, sizes, places)
        try:
            first = next(cold, None)
            if first is None:
                return came
            with suppress(OSError), closing(self.direct.read(chain((first,), cold))) as runs:
                for run in runs:
                    ended = range(run.number, run.number + len(run.pages))
                    if run.is_whole:
                        came.update(ended)
                    places.close(ended)
        finally:
            places.close(range(len(pages)))
        return came

    def read_memory(self, pages: Sequence[PageIO], places: PlacedPages) -> list[bool]:
        """Fill pages that the system has in memory; return for each whether it came and is verified.

        Of a call whose first page is not in memory none is read. Waits for nothing that ``places`` do not wait for.
        """
        came = [False] * len(pages)
        is_first = True
        for start in range(0, len(pages), places.open_max):
            opened: dict[int, Place] = {}
            try:
                for number in range(start, min(start + places.open_max, len(pages))):
                    place = places.open(number)
                    if place is None:
                        continue
                    opened[number] = place
                    if is_first and self.memory.is_cold(*place):
                        return came
                    is_first = False
                end = start
                for first, place in opened.items():
                    if first < end:
                        continue
                    stride_bytes = places.stride_bytes(first)
                    end = _run_end(pages[first], first, stride_bytes, opened) if stride_bytes else first + 1
                    if end == first + 1:
                        came[first] = self._read_page(pages[first], place, is_file=not stride_bytes)
                    else:
                        came[first:end] = self._read_run(pages[first:end], place, stride_bytes)
            finally:
                places.close(opened)
        return came

    def _cold_runs(self, pages: Sequence[PageIO], sizes: Sequence[int], places: PlacedPages) -> Iterator[DirectRun]:
        """Open pages that the system lacks, as they can be read, and yield neighbours together."""
        number, asked_end = 0, 0
        while number < len(pages) and not self.direct.is_refused:
            first, number = number, number + 1
            object_bytes = sizes[first]
            if object_bytes < DIRECT_BYTES_MIN or (place := places.open(first)) is None:
                continue
            stride_bytes = places.stride_bytes(first)
            if first >= asked_end:
                asked_end = first + ASKED_PAGES
                if not self.memory.is_cold(*place):
                    places.close((first,))
                    number = asked_end
                    continue
            fd = places.direct_fd(first, self.direct)
            if fd < 0:
                places.close((first,))
                continue
            end_max = min(first + max(_SLOT_BYTES // stride_bytes, 1), len(pages)) if stride_bytes else number
            while number < end_max and places.open(number) == (place[0], place[1] + (number - first) * stride_bytes):
                number += 1
            whole_bytes = stride_bytes or (object_bytes // DIRECT_BLOCK_BYTES + 1) * DIRECT_BLOCK_BYTES
            yield DirectRun(first, fd, place[1], object_bytes, whole_bytes, pages[first:number], not stride_bytes)

    def _read_page(self, page: PageIO, place: Place, *, is_file: bool) -> bool:
        """Read a page from memory and verify it; a longer file is another's."""
        fd, offset = place
        label, buffers, _ = page
        object_bytes = page_bytes(page)
        if object_bytes < 2 * PIECE_BYTES and len(buffers) < BUFFERS_MAX:
            wanted = (*buffers, BEYOND) if is_file else buffers
            return self.memory.read(fd, wanted, offset) == object_bytes and verify_buffers(buffers, label) is None
        checksum = PageChecksum()
        came = read_at(self.memory.read, fd, buffers, object_bytes, offset, checksum, is_file=is_file)
        return came and verify_buffers(buffers, label, checksum) is None

    def _read_run(self, pages: Sequence[PageIO], place: Place, stride_bytes: int) -> list[bool]:
        """Read neighbours from memory by one call, of which the first is at ``place``, and verify them."""
        fd, offset = place
        gap_bytes = stride_bytes - page_bytes(pages[0])
        gap = (_GAP[:gap_bytes],) if gap_bytes else ()
        count = self.memory.read(fd, [buffer for each in pages for buffer in (*each.buffers, *gap)], offset)
        filled_count = (count + gap_bytes) // stride_bytes
        return [
            number < filled_count and verify_buffers(each.buffers, each.label) is None
            for number, each in enumerate(pages)
        ]


def _run_end(page: PageIO, first: int, stride_bytes: int, opened: Mapping[int, Place]) -> int:
    """Return the end of the run of neighbours that one read from memory takes, from a page on."""
    end, (fd, offset), object_bytes = first + 1, opened[first], page_bytes(page)
    if object_bytes >= 2 * PIECE_BYTES or opened.get(end) != (fd, offset + stride_bytes):
        return end
    by_buffers = BUFFERS_MAX // (len(page.buffers) + 1)
    end_max = first + max(min(RUN_BYTES_MAX // object_bytes, by_buffers), 1)
    while end < end_max and opened.get(end) == (fd, offset + (end - first) * stride_bytes):
        end += 1
    return end
