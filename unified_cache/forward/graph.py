"""Buffers at fixed addresses that captured decode graphs read, and how they are filled before a replay."""

import torch

from unified_cache.errors import ConfigError, InputError
from unified_cache.forward.batch import ONE_TOKEN_MODES, ForwardBatch, ForwardMode
from unified_cache.forward.metadata import AttentionMetadata, HybridAttentionMetadata, writes_count_of
from unified_cache.forward.translation import SwaTranslation

__all__ = ["DecodeGraphBuffers", "HybridDecodeGraphBuffers"]


class DecodeGraphBuffers:
    """Input buffers of decode graphs of up to ``requests_max`` requests, for models whose layers all use the Full pool.

    Graphs of every size share the buffers: each reads the first rows. A row that no request fills is padding, which
    writes to the sink and reads nothing. Owns its tensors; they are never replaced.
    """

    __slots__ = ("out_cache_loc", "page_table", "seq_lens")

    def __init__(self, requests_max: int, pages_max: int, device: torch.device) -> None:
        """Take memory for ``requests_max`` rows of ``pages_max`` pages, all padding.

        Raises:
            ConfigError: a size that is not positive.
        """
        if requests_max <= 0 or pages_max <= 0:
            raise ConfigError(f"a graph needs requests and pages, found {requests_max} and {pages_max}")
        self.out_cache_loc = torch.zeros(requests_max, dtype=torch.int64, device=device)
        """Full token loc that each request's token is written to, int64, shape (requests_max,)."""
        self.seq_lens = torch.zeros(requests_max, dtype=torch.int32, device=device)
        """Tokens of each request, int32, shape (requests_max,)."""
        self.page_table = torch.zeros((requests_max, pages_max), dtype=torch.int32, device=device)
        """Full page slots, int32, shape (requests_max, pages_max)."""

    @property
    def requests_max(self) -> int:
        """Most requests in one forward."""
        return len(self.out_cache_loc)

    @property
    def pages_max(self) -> int:
        """Most pages of one request."""
        return self.page_table.shape[1]

    def fits(self, batch: ForwardBatch) -> bool:
        """Tell whether a graph can run this batch: a token per request, and rows and columns enough."""
        return (
            batch.mode in ONE_TOKEN_MODES
            and batch.requests_count <= self.requests_max
            and batch.page_table.shape[1] <= self.pages_max
        )

    def clear(self) -> None:
        """Fill every buffer with padding: before a capture, so that what it runs touches the sink alone."""
        self.out_cache_loc.zero_()
        self.seq_lens.zero_()
        self.page_table.zero_()

    def refill(self, batch: ForwardBatch) -> bool:
        """Copy a batch to the front and pad the rest, in place, before a replay.

        False, and nothing changed, if the batch does not fit: then run it without a graph. No shape depends on
        values, nothing waits for the device.
        """
        if not self.fits(batch):
            return False
        _fill_front(self.out_cache_loc, batch.out_cache_loc)
        _fill_front(self.seq_lens, batch.seq_lens)
        _fill_corner(self.page_table, batch.page_table)
        return True

    def rows(self, requests_count: int) -> tuple[ForwardBatch, AttentionMetadata]:
        """Return the first rows, as views, in the shape that a forward takes; capture a graph of that size with them.

        Raises:
            InputError: there are not as many rows.
        """
        batch = self._batch(requests_count)
        return batch, AttentionMetadata(batch.out_cache_loc, batch.page_table, batch.seq_lens)

    def _batch(self, requests_count: int) -> ForwardBatch:
        if not 0 < requests_count <= self.requests_max:
            raise InputError(f"a graph has 1 to {self.requests_max} requests, found {requests_count}")
        return ForwardBatch(
            ForwardMode.DECODE,
            self.out_cache_loc[:requests_count],
            self.seq_lens[:requests_count],
            self.page_table[:requests_count],
        )


class HybridDecodeGraphBuffers(DecodeGraphBuffers):
    """The same for a model with sliding-window layers: the buffers hold the translation of one replay as well.

    That is the only place where a translation outlives a call. Each ``refill`` overwrites all of it, before the one
    replay that reads it.
    """

    __slots__ = ("_translation", "out_cache_loc_swa", "page_table_swa")

    def __init__(self, requests_max: int, pages_max: int, translation: SwaTranslation) -> None:
        """Take memory as for Full, and as much for SWA, where ``translation`` has its table.

        Raises:
            ConfigError: a size that is not positive.
        """
        device = translation.table.device
        super().__init__(requests_max, pages_max, device)
        self._translation = translation
        self.out_cache_loc_swa = torch.zeros(requests_max, dtype=torch.int32, device=device)
        """SWA token loc that each request's token is written to, int32, shape (requests_max,)."""
        self.page_table_swa = torch.zeros((requests_max, pages_max), dtype=torch.int32, device=device)
        """SWA page slots, int32, shape (requests_max, pages_max)."""

    def clear(self) -> None:
        """Fill every buffer with padding."""
        super().clear()
        self.out_cache_loc_swa.zero_()
        self.page_table_swa.zero_()

    def refill(self, batch: ForwardBatch) -> bool:
        """Copy and translate a batch to the front and pad the rest; False, and nothing changed, if it does not fit."""
        if not super().refill(batch):
            return False
        count = batch.requests_count
        _fill_front(self.out_cache_loc_swa, self._translation.translate_locs(self.out_cache_loc[:count]))
        _fill_corner(self.page_table_swa, self._translation.translate_pages(self.page_table[:count]))
        return True

    def rows(self, requests_count: int) -> tuple[ForwardBatch, HybridAttentionMetadata]:
        """Return the first rows, as views. ``write_locs`` gives SWA layers the buffer until the next ``refill``.

        Capture right after: what Python chose then is what every replay reads.

        Raises:
            InputError: there are not as many rows.
        """
        batch = self._batch(requests_count)
        return batch, HybridAttentionMetadata(
            batch.out_cache_loc,
            batch.page_table,
            batch.seq_lens,
            swa_out_cache_loc=self.out_cache_loc_swa[:requests_count],
            swa_page_table=self.page_table_swa[:requests_count],
            writes_count=writes_count_of(batch.out_cache_loc),
            map_version=self._translation.map_version,
        )


def _fill_front(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values``, shape (n,), to the front of ``buffer`` and zero the rest."""
    count = len(values)
    buffer[:count].copy_(values)
    buffer[count:].zero_()


def _fill_corner(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values``, shape (n, m), to the upper left of ``buffer`` and zero the rest."""
    rows_count, columns_count = values.shape
    buffer[:rows_count, :columns_count].copy_(values)
    buffer[:rows_count, columns_count:].zero_()
    buffer[rows_count:].zero_()
