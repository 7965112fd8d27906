"""The pages of a call, read out of their files: where each lies is a value, and how it is read is decided here.

    file     [ header payload ]                                                         a page that is all of a file
    file     [ header payload | rest of slot ][ header payload | rest of slot ] ...     neighbours, all of one length

    read_memory    what the system has in memory, without waiting; neighbours by one call, then verified
    read_directly  what it lacks: many at a time, past its memory; neighbours by one call
    read_ahead     small files of which it may have some, while it begins to read the others

What is asked for together was stored together, and is in memory as a whole or not at all: so few places are looked at.
Of a page that did not come, for whatever reason, the ordinary read of its store that follows tells what is wrong.
Between two copies of half a MiB the processor's caches lose whatever code runs there, so as little as possible does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from typing import Protocol

from unified_cache.seal import PageChecksum
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.directory.descriptors import (
    BEYOND,
    BUFFERS_MAX,
    LED_BYTES_MIN,
    PIECE_BYTES,
    BuffersLeft,
)
from unified_cache.storage_backends.directory.direct import (
    DIRECT_BLOCK_BYTES,
    DirectReads,
    DirectRun,
    begins_on_block,
    run_pages_max,
)
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.system_memory import SystemMemory
from unified_cache.storage_backends.memory_reads import RowsTarget
from unified_cache.storage_backends.protocol import PageIO

__all__ = ["PageReads", "Place", "PlacedPages"]

DIRECT_FILE_BYTES_MIN = 32 << 10
"""Smaller files are left to the system's memory, where the next reader finds them: what is copied is little."""

ALONE_BYTES_MIN = 1 << 20
"""Of a page that is asked for alone, and does not begin on a block, to be read directly."""

ASKED_PAGES = 16
"""Of so many pages the first is looked at, while others are read directly."""

RUN_BYTES_MAX = 2 << 20
"""Bytes of one read from memory: they are in the processor's caches when they are verified."""

GAP_BYTES_MAX = 4096
"""Longest rest of a slot behind a page."""

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
        """Return the bytes from an open page to its neighbour; 0 where it is all of its file, and may not be longer."""
        ...

    def direct_fd(self, number: int, reads: DirectReads) -> int:
        """Return a descriptor of the file of an open page that reads directly; -1 where there is none to be had."""
        ...

    def close(self, numbers: Iterable[int]) -> None:
        """Let go of the files of pages, those that are open."""
        ...


class PageReads:
    """Reads of the pages of one store. Thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self._memory = SystemMemory(disk)
        self._direct = DirectReads(disk)

    def may_be_direct(self, pages: Sequence[PageIO]) -> bool:
        """Return whether to look where pages are: a small one alone comes sooner than the answer."""
        if self._direct.is_refused or not self._memory.tells_blocks or not pages:
            return False
        return len(pages) > 1 or page_bytes(pages[0]) >= ALONE_BYTES_MIN or begins_on_block(pages[0])

    def are_cold(self, pages: Sequence[PageIO], places: PlacedPages, numbers: Iterable[int]) -> bool:
        """Return whether the system lacks the first of these pages that can be read directly."""
        for number in numbers:
            place = places.open(number)
            if place is not None and _is_direct(pages[number], places.stride_bytes(number)):
                return self._memory.is_cold(*place)
        return False

    def read_directly(self, pages: Sequence[PageIO], places: PlacedPages, numbers: Sequence[int]) -> Set[int]:
        """Fill pages past the system's memory, as far as it lacks them; return which came. Closes all of them."""
        came: set[int] = set()
        try:
            with closing(self._direct.read(self._direct_runs(pages, places, numbers))) as runs:
                for run, is_whole in runs:
                    ended = range(run.number, run.number + len(run.pages))
                    if is_whole:
                        came.update(ended)
                    places.close(ended)
        finally:
            places.close(numbers)
        return came

    def read_ahead(self, pages: Sequence[PageIO], opened: Mapping[int, Place]) -> Set[int]:
        """Fill small pages in files of their own from memory, and let the system begin to read those that it lacks.

        Return which came. So pages that are not cached come from the disk several at a time, and not each after the one
        before it.
        """
        came: set[int] = set()
        if not self._memory.is_readable:
            return came
        for number, (fd, _) in opened.items():
            page = pages[number]
            wanted_bytes = page_bytes(page)
            if wanted_bytes >= LED_BYTES_MIN:
                continue
            if self._memory.read(fd, (*page.buffers[: BUFFERS_MAX - 1], BEYOND), 0) == wanted_bytes:
                came.add(number)
                if page.checksum is not None:
                    page.checksum.add_all(page.buffers)
        return came

    def read_memory(self, targets: Sequence[RowsTarget], places: PlacedPages) -> list[bool]:
        """Fill the rows of pages that the system has in memory; return for each whether it came and is verified.

        Of a call whose first page is not in memory none is read. Waits for nothing that ``places`` do not wait for.
        """
        came = [False] * len(targets)
        is_first = True
        for start in range(0, len(targets), places.open_max):
            opened: dict[int, Place] = {}
            try:
                for number in range(start, min(start + places.open_max, len(targets))):
                    place = places.open(number)
                    if place is None:
                        continue
                    opened[number] = place
                    if is_first and self._memory.is_cold(*place):
                        return came
                    is_first = False
                end = start
                for first, place in opened.items():
                    stride_bytes = places.stride_bytes(first)
                    if not stride_bytes:
                        came[first] = self._read_page(targets[first], place, (*targets[first].buffers, BEYOND))
                    elif first >= end:
                        end = _run_end(targets[first], first, stride_bytes, opened)
                        came[first:end] = self._read_run(targets[first:end], place, stride_bytes)
            finally:
                places.close(opened)
        return came

    def _direct_runs(self, pages: Sequence[PageIO], places: PlacedPages, numbers: Sequence[int]) -> Iterator[DirectRun]:
        """Open pages as they can be read, and yield neighbours together."""
        is_cold, asked_number = True, numbers[0]
        number, last = numbers[0], numbers[-1]
        while number <= last and not self._direct.is_refused:
            first, number = number, number + 1
            place = places.open(first)
            if place is None:
                continue
            if first >= asked_number + ASKED_PAGES:
                is_cold, asked_number = self._memory.is_cold(*place), first
            stride_bytes = places.stride_bytes(first)
            is_direct = is_cold and _is_direct(pages[first], stride_bytes)
            fd = places.direct_fd(first, self._direct) if is_direct else -1
            if fd < 0:
                places.close((first,))
            elif stride_bytes:
                number = _direct_end(pages, places, first, last, stride_bytes)
                yield DirectRun(first, fd, place[1], page_bytes(pages[first]), stride_bytes, pages[first:number], False)
            else:
                object_bytes = page_bytes(pages[first])
                whole_bytes = (object_bytes // DIRECT_BLOCK_BYTES + 1) * DIRECT_BLOCK_BYTES
                yield DirectRun(first, fd, 0, object_bytes, whole_bytes, pages[first:number], True)

    def _read_run(self, targets: Sequence[RowsTarget], place: Place, stride_bytes: int) -> list[bool]:
        """Read neighbours from memory, of which the first is at ``place``, and verify them."""
        if len(targets) == 1:
            return [self._read_page(targets[0], place, targets[0].buffers)]
        gap_bytes = stride_bytes - targets[0].object_bytes
        gap = (_GAP[:gap_bytes],) if gap_bytes else ()
        count = self._memory.read(place[0], [buffer for each in targets for buffer in (*each.buffers, *gap)], place[1])
        filled_count = min((count + gap_bytes) // stride_bytes, len(targets))
        return [number < filled_count and target.holds_page() for number, target in enumerate(targets)]

    def _read_page(self, target: RowsTarget, place: Place, buffers: Sequence[memoryview]) -> bool:
        """Read a page from memory and verify it; ``buffers`` are longer than it where a longer file is another's."""
        if target.object_bytes >= 2 * PIECE_BYTES or len(buffers) > BUFFERS_MAX:
            return self._read_pieces(place, target, buffers)
        return self._memory.read(place[0], buffers, place[1]) == target.object_bytes and target.holds_page()

    def _read_pieces(self, place: Place, target: RowsTarget, buffers: Sequence[memoryview]) -> bool:
        """Read a page from memory piece by piece, each added to the checksum while it is in the processor's caches."""
        fd, offset = place
        rest, done_bytes, checksum = BuffersLeft(buffers), 0, PageChecksum()
        while done_bytes < target.object_bytes:
            left_bytes = target.object_bytes - done_bytes
            # The last piece is up to two, so that a page of a power of two and a header has no short one.
            is_last = left_bytes < 2 * PIECE_BYTES
            count = self._memory.read(fd, rest.front(left_bytes + 1 if is_last else PIECE_BYTES), offset + done_bytes)
            if not 0 < count <= left_bytes:
                return False
            checksum.add(done_bytes, rest.take(count))
            done_bytes += count
        return target.holds_page(checksum.of(target.object_bytes))


def _run_end(target: RowsTarget, first: int, stride_bytes: int, opened: Mapping[int, Place]) -> int:
    """Return the end of the run of neighbours that one read from memory takes, from a page on."""
    end, (fd, offset) = first + 1, opened[first]
    if target.object_bytes >= 2 * PIECE_BYTES or opened.get(end) != (fd, offset + stride_bytes):
        return end
    by_buffers = BUFFERS_MAX // (len(target.buffers) + 1)
    end_max = first + max(min(RUN_BYTES_MAX // target.object_bytes, by_buffers), 1)
    while end < end_max and opened.get(end) == (fd, offset + (end - first) * stride_bytes):
        end += 1
    return end


def _is_direct(page: PageIO, stride_bytes: int) -> bool:
    """Return whether a page can be read directly, in whole blocks of its own, and that pays."""
    if stride_bytes:
        return not stride_bytes % DIRECT_BLOCK_BYTES
    return page_bytes(page) >= DIRECT_FILE_BYTES_MIN


def _direct_end(pages: Sequence[PageIO], places: PlacedPages, first: int, last: int, stride_bytes: int) -> int:
    """Return the end of the run of neighbours that are read directly together, from an open page on."""
    place = places.open(first)
    assert place is not None
    fd, offset = place
    end, end_max = first + 1, min(first + run_pages_max(pages[first], stride_bytes), last + 1)
    is_on_block = begins_on_block(pages[first])
    while end < end_max and begins_on_block(pages[end]) is is_on_block:
        if places.open(end) != (fd, offset + (end - first) * stride_bytes):
            break
        end += 1
    return end
