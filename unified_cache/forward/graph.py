"""Buffers at fixed addresses that captured graphs read, and how they are filled before a replay.

bucket             size of a graph  new tokens of a request  of padding
decode             requests         1                        1, written to the sink
target verify      requests         as many each             as many, written to the sink
draft extend       requests         as many each             as many, written to the sink
prefill            tokens           any number               none: its tokens are no request's
"""

from dataclasses import dataclass

import torch

from unified_cache.core.errors import ConfigError, InputError
from unified_cache.forward.batch import ForwardBatch, ForwardMode
from unified_cache.forward.metadata import AttentionMetadata, HybridAttentionMetadata, query_starts, writes_count_of
from unified_cache.forward.translation import SwaTranslation, sent


@dataclass(frozen=True, slots=True)
class GraphBucket:
    """Forwards of one mode whose graphs share buffers, and the most that one of them may have."""

    mode: ForwardMode
    requests_max: int
    """Most requests in one forward."""
    tokens_max: int
    """Most tokens in one forward: shared out evenly among the requests, or by prefill in any way."""
    pages_max: int
    """Most pages of one request."""
    padding_len: int = 1
    """Tokens of a request that is padding, all in the sink: 0 makes most attention kernels divide by nothing."""

    def __post_init__(self) -> None:
        if min(self.requests_max, self.tokens_max, self.pages_max) <= 0:
            raise ConfigError(f"a graph needs requests, tokens and pages, found {self}")
        if self.padding_len < 0:
            raise ConfigError(f"padding has 0 tokens or more, found {self.padding_len}")
        if self.mode is ForwardMode.IDLE:
            raise ConfigError("an idle forward has no graph of its own; it replays one of any other mode")
        if not self.is_prefill and self.tokens_max % self.requests_max:
            raise ConfigError(f"{self.requests_max} requests must have as many tokens each, found {self.tokens_max}")

    @classmethod
    def decode(cls, requests_max: int, pages_max: int) -> "GraphBucket":
        """Return the bucket of forwards of one token per request; a ConfigError for numbers that are not positive."""
        return cls(ForwardMode.DECODE, requests_max, requests_max, pages_max)

    @classmethod
    def target_verify(cls, requests_max: int, query_len: int, pages_max: int) -> "GraphBucket":
        """Return the bucket of forwards that verify ``query_len`` drafted tokens of each request."""
        return cls(ForwardMode.TARGET_VERIFY, requests_max, requests_max * query_len, pages_max)

    @classmethod
    def draft_extend(cls, requests_max: int, query_len: int, pages_max: int) -> "GraphBucket":
        """Return the bucket of forwards in which a draft model catches up on ``query_len`` tokens of each request.

        Where fewer were accepted, the engine fills the request's tokens up with padding.
        """
        return cls(ForwardMode.DRAFT_EXTEND, requests_max, requests_max * query_len, pages_max)

    @classmethod
    def prefill(cls, requests_max: int, tokens_max: int, pages_max: int) -> "GraphBucket":
        """Return the bucket of forwards of any number of tokens per request, ``tokens_max`` together."""
        return cls(ForwardMode.EXTEND, requests_max, tokens_max, pages_max)

    @property
    def is_prefill(self) -> bool:
        """Whether requests have numbers of tokens of their own; graphs then have a size in tokens."""
        return self.mode is ForwardMode.EXTEND

    @property
    def query_len(self) -> int:
        """New tokens of every request, where all have as many."""
        return self.tokens_max // self.requests_max

    def fits(self, batch: ForwardBatch) -> bool:
        """Return whether a graph of this bucket can run a batch: the mode, its numbers of tokens, and room enough."""
        if batch.mode is ForwardMode.IDLE:
            return batch.tokens_count <= self.tokens_max
        return (
            batch.mode is self.mode
            and batch.requests_count <= self.requests_max
            and batch.tokens_count <= self.tokens_max
            and batch.page_table.shape[1] <= self.pages_max
            and (self.is_prefill or set(batch.query_lens) <= {self.query_len})
        )

    def size_of(self, batch: ForwardBatch) -> int:
        """Return the size of the smallest graph that holds a batch which fits: replay one at least as large."""
        return batch.tokens_count if self.is_prefill else -(-batch.tokens_count // self.query_len)

    def shape(self, size: int) -> tuple[int, int]:
        """Return the requests and tokens of a graph of ``size``: requests, or for prefill tokens."""
        largest = self.tokens_max if self.is_prefill else self.requests_max
        if not 0 < size <= largest:
            raise InputError(f"a graph of {self.mode.value} has a size of 1 to {largest}, found {size}")
        return (self.requests_max, size) if self.is_prefill else (size, size * self.query_len)


class GraphBuffers:
    """Input buffers of the graphs of one bucket, for models whose layers all use the Full pool.

    Graphs of every size share the buffers: each reads their front. What no request fills is padding, which writes to
    the sink and reads the sink alone. Owns its tensors; they are never replaced.
    """

    __slots__ = ("bucket", "out_cache_loc", "page_table", "query_starts", "seq_lens")

    def __init__(self, bucket: GraphBucket, device: torch.device) -> None:
        """Take memory for the largest forward of ``bucket``, all padding."""
        self.bucket = bucket
        self.out_cache_loc = torch.zeros(bucket.tokens_max, dtype=torch.int64, device=device)
        """Full token loc that each token is written to, int64, shape (tokens_max,)."""
        self.seq_lens = torch.full((bucket.requests_max,), bucket.padding_len, dtype=torch.int32, device=device)
        """Tokens of each request, int32, shape (requests_max,)."""
        self.page_table = torch.zeros((bucket.requests_max, bucket.pages_max), dtype=torch.int32, device=device)
        """Full page slots, int32, shape (requests_max, pages_max)."""
        self.query_starts = torch.arange(bucket.requests_max + 1, dtype=torch.int32, device=device)
        """Where the tokens of each request begin, and of the last one end, int32, shape (requests_max + 1,)."""
        self.query_starts *= 0 if bucket.is_prefill else bucket.query_len

    def clear(self) -> None:
        """Fill every buffer with padding: before a capture, so that what it runs touches the sink alone."""
        self.out_cache_loc.zero_()
        self.seq_lens.fill_(self.bucket.padding_len)
        self.page_table.zero_()
        if self.bucket.is_prefill:
            self.query_starts.zero_()

    def refill(self, batch: ForwardBatch) -> bool:
        """Copy a batch to the front and pad the rest, in place, before a replay; nothing waits for the device.

        False, and nothing changed, if the batch does not fit: then run it without a graph.
        """
        if not self.bucket.fits(batch):
            return False
        self.clear()
        if batch.mode is ForwardMode.IDLE:
            return True
        self.out_cache_loc[: batch.tokens_count].copy_(batch.out_cache_loc)
        self.seq_lens[: batch.requests_count].copy_(batch.seq_lens)
        _corner(self.page_table, batch).copy_(batch.page_table)
        if self.bucket.is_prefill:
            starts = query_starts(batch, self.bucket.requests_max)
            self.query_starts.copy_(sent(starts, self.query_starts.device))
        return True

    def views(self, size: int) -> tuple[ForwardBatch, AttentionMetadata]:
        """Return the front, as views, in the shape that a forward takes; capture the graph of ``size`` with them."""
        batch = self._batch(size)
        return batch, AttentionMetadata(batch.out_cache_loc, batch.page_table, batch.seq_lens, self._starts(batch))

    def _batch(self, size: int) -> ForwardBatch:
        """Return the batch that the buffers hold once they are cleared."""
        requests_count, tokens_count = self.bucket.shape(size)
        return ForwardBatch(
            self.bucket.mode,
            self.out_cache_loc[:tokens_count],
            self.seq_lens[:requests_count],
            self.page_table[:requests_count],
            (0 if self.bucket.is_prefill else self.bucket.query_len,) * requests_count,
        )

    def _starts(self, batch: ForwardBatch) -> torch.Tensor:
        return self.query_starts[: batch.requests_count + 1]


class HybridGraphBuffers(GraphBuffers):
    """The same for a model with sliding-window layers: the buffers hold the translation of one replay as well.

    That is the only place where a translation outlives a call. Each ``refill`` overwrites all of it, before the one
    replay that reads it.
    """

    __slots__ = ("_translation", "out_cache_loc_swa", "page_table_swa")

    def __init__(self, bucket: GraphBucket, translation: SwaTranslation) -> None:
        """Take memory as for Full, and as much for SWA, where ``translation`` has its table."""
        device = translation.table.device
        super().__init__(bucket, device)
        self._translation = translation
        self.out_cache_loc_swa = torch.zeros(bucket.tokens_max, dtype=torch.int32, device=device)
        """SWA token loc of each token, int32, shape (tokens_max,)."""
        self.page_table_swa = torch.zeros_like(self.page_table)
        """SWA page slots, int32, shape (requests_max, pages_max)."""

    def clear(self) -> None:
        """Fill every buffer with padding."""
        super().clear()
        self.out_cache_loc_swa.zero_()
        self.page_table_swa.zero_()

    def refill(self, batch: ForwardBatch) -> bool:
        """Copy and translate a batch, as ``GraphBuffers.refill``; errors as ``SwaTranslation.refresh``."""
        self._translation.refresh()
        if not super().refill(batch):
            return False
        if batch.mode is not ForwardMode.IDLE:
            locs = self._translation.translate_locs(batch.out_cache_loc)
            self.out_cache_loc_swa[: batch.tokens_count].copy_(locs)
            _corner(self.page_table_swa, batch).copy_(self._translation.translate_pages(batch.page_table))
        return True

    def views(self, size: int) -> tuple[ForwardBatch, HybridAttentionMetadata]:
        """Return the front, as views. ``write_locs`` gives SWA layers the buffer until the next ``refill``.

        Capture right after: what Python chose then is what every replay reads.

        Raises:
            InputError: the bucket has no graph of that size.
        """
        batch = self._batch(size)
        return batch, HybridAttentionMetadata(
            batch.out_cache_loc,
            batch.page_table,
            batch.seq_lens,
            self._starts(batch),
            swa_out_cache_loc=self.out_cache_loc_swa[: batch.tokens_count],
            swa_page_table=self.page_table_swa[: batch.requests_count],
            writes_count=writes_count_of(batch.out_cache_loc),
            map_version=self._translation.map_version,
        )


def _corner(buffer: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Return the part of a buffer, shape (requests_max, pages_max), that a batch's page table goes to."""
    rows_count, columns_count = batch.page_table.shape
    return buffer[:rows_count, :columns_count]
