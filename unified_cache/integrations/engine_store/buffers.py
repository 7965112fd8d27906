"""Bounce buffers: memory of ours that pages of an engine's store lie in while a store may be late.

    one mapping of our own, page-aligned      [ buffer | buffer | free    | buffer in quarantine | free ... ]

A call reserves a bounce buffer, and releases it when the store has returned; where nobody waits for the store any more,
the buffer is in quarantine until the store has returned from the call. The first gap that fits is reserved, so that few
calls at a time use little memory, and use it while it is in the processor's caches.
"""

import mmap as system_mmap
import time
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from threading import Condition, Lock

from unified_cache.core.errors import CallInFlight, ConfigError


class BounceBuffer:
    """Part [start, end) of bounce memory, reserved for one call."""

    __slots__ = ("end", "start", "view")

    def __init__(self, start: int, end: int, view: memoryview) -> None:
        self.start = start
        self.end = end
        self.view = view
        """Its bytes; page-aligned, of whole pages of the machine's memory."""

    @property
    def size_bytes(self) -> int:
        """Size of the buffer."""
        return self.end - self.start


class BounceMemory:
    """A bounded run of page-aligned memory that is reserved in parts. Thread-safe.

    It is mapped as a whole, and takes up memory as far as it was used. Every byte is free, reserved, or in quarantine.
    """

    def __init__(self, mapping: mmap, clock: Callable[[], float]) -> None:
        self._mapping: mmap | None = mapping
        self._whole = memoryview(mapping)
        self._free: list[tuple[int, int]] = [(0, len(mapping))]
        """Gaps [start, end), ascending; no two touch."""
        self._reserved: set[BounceBuffer] = set()
        self._quarantine: dict[BounceBuffer, CallInFlight] = {}
        self._bytes_max = len(mapping)
        self._closed = False
        self._clock = clock
        self._changed = Condition(Lock())

    @classmethod
    def allocate(cls, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> "BounceMemory":
        """Map that much memory, rounded up to whole pages.

        Raises:
            ConfigError: the system does not give it.
        """
        try:
            mapping = mmap(-1, _rounded(bytes_max), flags=MAP_PRIVATE | MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"{bytes_max} bytes of bounce buffers cannot be allocated: {error}") from error
        if "MADV_HUGEPAGE" in vars(system_mmap):
            # A disk fills huge pages two to three times as fast: it is given each page by itself, huge or not.
            with suppress(OSError):  # a system without them
                mapping.madvise(system_mmap.MADV_HUGEPAGE)
        return cls(mapping, clock)

    @property
    def bytes_max(self) -> int:
        """Size of all of it."""
        return self._bytes_max

    @property
    def whole(self) -> memoryview:
        """All of it, for a store that wants to know the memory that its pages lie in, until the store is closed."""
        return self._whole

    def quarantined_bytes(self) -> int:
        """Return how many bytes a store that is late may still read or write."""
        with self._changed:
            self._collect()
            return sum(buffer.size_bytes for buffer in self._quarantine)

    def reserve(self, size_bytes: int, timeout_s: float) -> BounceBuffer | None:
        """Reserve a buffer; wait for it at most ``timeout_s``.

        None if there is no room in that time, and at once where only buffers in quarantine could make it: nobody knows
        when a store that is late returns.
        """
        until_s = self._clock() + timeout_s
        wanted = _rounded(max(size_bytes, 1))
        with self._changed:
            while not self._closed:
                self._collect()
                gap = next((gap for gap in self._free if gap[1] - gap[0] >= wanted), None)
                if gap is not None:
                    return self._cut(gap, wanted)
                left_s = until_s - self._clock()
                if not self._reserved or left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return None

    def release(self, buffer: BounceBuffer, call: CallInFlight | None = None) -> None:
        """Release a buffer now, or as soon as the call has returned that may use it until then."""
        with self._changed:
            self._reserved.remove(buffer)
            if call is None:
                self._add_gap(buffer)
            else:
                self._quarantine[buffer] = call
            self._collect()
            self._changed.notify_all()

    def close(self) -> None:
        """Reserve nothing any more and let the memory go: at once, or with the last call that still has a buffer."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._collect()
            in_use = bool(self._reserved or self._quarantine)
            mapping, self._mapping = self._mapping, None
            whole, self._whole = self._whole, memoryview(b"")
            self._changed.notify_all()
            if in_use or mapping is None:
                return  # the memory goes with the last view of it
            whole.release()
            try:
                mapping.close()
            except BufferError:
                return  # as above: a view that the store below has not released

    def _cut(self, gap: tuple[int, int], wanted: int) -> BounceBuffer:
        start, gap_end = gap
        end = start + wanted
        self._free.remove(gap)
        if end < gap_end:
            insort(self._free, (end, gap_end))
        buffer = BounceBuffer(start, end, self._whole[start:end])
        self._reserved.add(buffer)
        return buffer

    def _collect(self) -> None:
        """Take back what calls that were late have returned from."""
        if not self._quarantine:
            return
        for buffer in [buffer for buffer, call in self._quarantine.items() if call.returned]:
            del self._quarantine[buffer]
            self._add_gap(buffer)
            self._changed.notify_all()

    def _add_gap(self, buffer: BounceBuffer) -> None:
        start, end = buffer.start, buffer.end
        for gap in [gap for gap in self._free if gap[0] == end or gap[1] == start]:
            self._free.remove(gap)
            start, end = min(start, gap[0]), max(end, gap[1])
        insort(self._free, (start, end))


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // PAGESIZE) * PAGESIZE
