"""Full token locs and page slots → those of the sliding-window pool, read from the one map on the device's side."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from unified_cache.core.errors import CaptureError, ConfigError, InputError
from unified_cache.core.slots import PageMap, PairedAllocator

LOC_MAX = 2**31 - 1
"""Kernels take SWA locs as int32."""

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def _never() -> bool:
    return False


class SwaTranslation:
    """Read one ``PageMap`` where kernels run; keep the map's entries there, and no translation.

    On the CPU the table *is* the map's array. On another device it is a copy at a fixed address, so that captured
    graphs may read it; before anything is translated, a map that has changed is copied, all of it: to find the changed
    entries takes as long up to some 65,000 pages. A graph that is being captured would record that copy: so it is
    refused there. Call it from the thread that changes the map.

    A stream that translates comes after the copy, whichever stream made it; what another stream was given to translate
    must have been done before the map is copied again, which is for the engine. Every result is a new tensor, the
    caller's, true until the map's next change: for one forward. Keeping one longer returned slots that had changed
    hands: sglang #25889.
    """

    __slots__ = ("_copied", "_is_capturing", "_map", "_table", "_version", "page_size")

    def __init__(
        self, page_map: PageMap, table: torch.Tensor, page_size: int, is_capturing: Callable[[], bool] = _never
    ) -> None:
        """Take a table that shares the map's memory or has its shape; ``of`` makes either.

        ``is_capturing`` returns whether the current stream captures its work now and does not run it.
        """
        self._map = page_map
        self._table = table
        self._is_capturing = is_capturing
        self._version = -1
        """Version of the map that ``table`` shows; no version of a map is negative."""
        self._copied: torch.cuda.Event | None = None
        """On a GPU: the end of the last operation that changed ``table``."""
        self._record_change()
        self.page_size = page_size
        """Tokens per page, in both pools."""

    @classmethod
    def of(cls, allocator: PairedAllocator, page_size: int, device: torch.device) -> "SwaTranslation":
        """Translate what ``allocator`` pairs, for kernels on ``device``; copy the map only if it is not the CPU.

        Raises:
            ConfigError: ``page_size`` is not positive, or int32 cannot name every token of the SWA pool.
        """
        _check_page_size(allocator, page_size)
        if device.type != "cpu":
            return cls.mirrored(allocator, page_size, device)
        return cls(allocator.map, torch.from_numpy(allocator.map.table), page_size)

    @classmethod
    def mirrored(cls, allocator: PairedAllocator, page_size: int, device: torch.device) -> "SwaTranslation":
        """Translate from a copy of the map on ``device``, or the CPU, at an address that never changes; as ``of``."""
        _check_page_size(allocator, page_size)
        table = torch.zeros(len(allocator.map.table), dtype=torch.int32, device=device)
        is_capturing = torch.cuda.is_current_stream_capturing if device.type == "cuda" else _never
        return cls(allocator.map, table, page_size, is_capturing)

    @property
    def map_version(self) -> int:
        """Version of the map now. What was translated under another one may be stale."""
        return self._map.version

    @property
    def table(self) -> torch.Tensor:
        """Full page slot → SWA page slot, int32, shape (pages + 2,), as of the last ``refresh``; not to be changed."""
        return self._table

    def refresh(self) -> None:
        """Bring the table up to date with the map, in place; ordered on the current stream, waits for nothing.

        Raises:
            CaptureError: the map has changed, and a graph is being captured. Nothing was copied or recorded.
        """
        if self._version == self._map.version:
            return
        if self._table.data_ptr() != torch.from_numpy(self._map.table).data_ptr():
            self._follow()
            if self._is_capturing():
                raise CaptureError(
                    "the page map has changed since it was copied last, and a graph that is captured now would record "
                    "the copy; allocate, load and refresh before the capture"
                )
            self._table.copy_(sent(self._map.table, self._table.device))
            self._record_change()
        self._version = self._map.version

    def translate_locs(self, locs: torch.Tensor) -> torch.Tensor:
        """Return the SWA token loc of each Full token loc: int32, same shape, same device, the caller's.

        ``locs`` are of any integer dtype. An unmapped page is the sink, at the same offset. -1, "no slot", stays
        -1, and so becomes anything below it. A loc past the Full pool is the caller's bug.

        Raises:
            InputError: not integers. Nothing was done.
            CaptureError: as ``refresh``.
        """
        wide = _signed(locs)
        self.refresh()
        self._follow()
        pages = torch.div(wide, self.page_size, rounding_mode="floor")
        # Page -1 reads the table's last entry, -1: -page_size + (page_size - 1) is -1 again.
        offsets = wide.remainder(self.page_size)
        return torch.add(offsets, self._table[pages], alpha=self.page_size).to(torch.int32)

    def translate_pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the SWA page slot of each Full page slot: int32, same shape, same device, the caller's.

        0 where nothing is mapped; negative slots become -1.

        Raises:
            InputError: not integers. Nothing was done.
            CaptureError: as ``refresh``.
        """
        wide = _signed(slots)
        self.refresh()
        self._follow()
        return self._table[wide]

    def _record_change(self) -> None:
        """Record that the current stream has been given a change of the table."""
        if self._table.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch says no types
            self._copied.record(torch.cuda.current_stream(self._table.device))

    def _follow(self) -> None:
        """Order the current stream after the last change of the table; a capture may not wait for events outside."""
        if self._copied is not None and not self._is_capturing():
            torch.cuda.current_stream(self._table.device).wait_event(self._copied)


def sent(numbers: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Return numbers of the host on ``device``, ordered on the current stream, which is not waited for.

    On the CPU it shares memory with ``numbers``; elsewhere it is a snapshot.
    """
    found = torch.from_numpy(numbers)
    if device.type != "cuda":
        return found.to(device)
    # From pageable memory the copy would wait. The pinned snapshot is torch's: its block is not reused before the copy
    # out of it is done.
    return found.pin_memory().to(device, non_blocking=True)


def _signed(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 with every negative number as -1, so that none of them reads a real page from the table's end."""
    if numbers.dtype not in _INTEGERS:
        raise InputError(f"locs and slots must be integers, found {numbers.dtype}")
    return numbers.to(torch.int64).clamp(min=-1)


def _check_page_size(allocator: PairedAllocator, page_size: int) -> None:
    """Raise ConfigError unless every token of the SWA pool has an int32 loc."""
    if page_size <= 0:
        raise ConfigError(f"page_size must be positive, found {page_size}")
    loc_end = (allocator.peer.capacity + 1) * page_size
    if loc_end - 1 > LOC_MAX:
        raise ConfigError(f"the SWA pool has {loc_end} token locs, and int32 ends at {LOC_MAX}")
