"""Pages of SGLang's host pools, in its own memory where it gives their addresses, else as copies that it makes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from unified_cache.core.errors import InputError
from unified_cache.integrations.engine_store.pools import AffineRows, AskedRows, PageRows, Rows, check_slots
from unified_cache.integrations.sglang.versions import shares_memory

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache  # pyright: ignore[reportMissingImports]


def rows_of_pool(pool: "HostKVCache") -> PageRows | None:
    """Return the pages of a pool, reached in the fastest way that it allows; None for one that has no bytes.

    Raises:
        InputError: the pool says neither where its pages lie nor what they hold.
    """

    def locate(slots: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        starts = torch.tensor(slots, dtype=torch.int64) * pool.page_size
        indices = (starts[:, None] + torch.arange(pool.page_size)).reshape(-1)
        found: tuple[list[int], list[int]] = pool.get_page_buffer_meta(indices)
        return found

    try:
        located = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    except (AssertionError, NotImplementedError, ValueError):
        # Mamba with states beside its slots, and layouts without a zero-copy form.
        return CopiedRows.of(pool)
    if located is None:
        return CopiedRows.of(pool) if pool.get_dummy_flat_data_page().numel() else None
    slots_count = pool.size // pool.page_size
    rows = None if shares_memory(pool) else AffineRows.learn(locate, slots_count)
    return rows or AskedRows(locate, located[1], slots_count)


class CopiedRows(PageRows):
    """Pages that SGLang copies out of a pool and into it, one at a time."""

    def __init__(self, pool: "HostKVCache", dtype: torch.dtype, page_bytes: int) -> None:
        self._pool = pool
        self._dtype = dtype
        self._page_bytes = page_bytes
        self.buffers_bytes = (page_bytes,)

    @classmethod
    def of(cls, pool: "HostKVCache") -> "CopiedRows":
        """Take a pool after a look at a page of it.

        Raises:
            InputError: the pool does not hand out its pages.
        """
        try:
            page, shape = pool.get_data_page(0, flat=True), pool.get_dummy_flat_data_page()
        except (NotImplementedError, ValueError) as error:
            raise InputError(f"a pool must hand out its pages, {type(pool).__name__} does not: {error}") from error
        page_bytes = page.numel() * page.element_size()
        if not page_bytes or page_bytes != shape.numel() * shape.element_size():
            raise InputError(
                f"expected pages of {shape.numel() * shape.element_size()} bytes of {type(pool).__name__}, "
                f"found {page_bytes}"
            )
        return cls(pool, shape.dtype, page_bytes)

    def rows_to_store(self, slots: Sequence[int]) -> list[Rows]:
        """Return copies of the pages."""
        check_slots(slots, self._pool.size // self._pool.page_size)
        return [(self._page(slot),) for slot in slots]

    def rows_to_fill(self, slots: Sequence[int]) -> list[Rows]:
        """Return new memory for the pages."""
        check_slots(slots, self._pool.size // self._pool.page_size)
        return [(memoryview(bytearray(self._page_bytes)),) for _ in slots]

    def publish(self, slots: Sequence[int], rows: Sequence[Rows], filled: Sequence[bool]) -> None:
        """Copy what was filled into the pool."""
        for slot, (row,), ok in zip(slots, rows, filled, strict=True):
            if ok:
                page = torch.frombuffer(row, dtype=self._dtype)
                self._pool.set_from_flat_data_page(slot * self._pool.page_size, page)

    def _page(self, slot: int) -> memoryview:
        page = self._pool.get_data_page(slot * self._pool.page_size, flat=True)
        copied: memoryview = page.contiguous().view(torch.uint8).reshape(-1).numpy().data
        if copied.nbytes != self._page_bytes:
            raise InputError(f"expected a page of {self._page_bytes} bytes, found {copied.nbytes}")
        return copied
