"""Pages of a trace as numbers in arrays: 4 bytes for each page that a request asks for.

    requests   |-------- r = 0 --------|------- r = 1 -------|
    numbers     0  1  2  3  4  5        0  1  2  6  7          the first three pages are the same

A page has a number for its tokens and all before them. Equal hash ids stand for equal blocks after equal prefixes, so
the number follows from the id of the block in which the page ends, and from the place of that end in the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import TraceError
from unified_cache.sizing.replay.trace import TraceRequest

Numbers = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TracePages:
    """Pages of every prompt of a trace, in the order of the requests."""

    page_size: int
    """Tokens of a page."""
    starts: Counts
    """Where the pages of each request begin in ``numbers``, and the end of all, shape (requests + 1,)."""
    numbers: Numbers
    """Number of every page asked for, shape (pages asked for,): below ``distinct_count``."""
    distinct_count: int
    times_s: Floats
    """Arrivals, rising, in seconds since the trace began, shape (requests,)."""
    input_tokens: Counts
    """Tokens of each prompt, shape (requests,)."""

    @classmethod
    def of(cls, requests: Sequence[TraceRequest], page_size: int, *, padded: bool) -> "TracePages":
        """Number the pages of requests as ``read_trace`` returns them: ordered, their blocks numbered from 0.

        ``padded`` counts a prompt's last block as a whole one, as block-level figures do.
        """
        if not requests:
            raise TraceError("a plan needs a trace of at least one request, found none")
        block_tokens = requests[0].block_tokens
        lengths = np.array([len(request.hash_ids) for request in requests], np.int64)
        blocks = np.concatenate([np.array(request.hash_ids, np.int32) for request in requests])
        input_tokens = np.array([request.input_length for request in requests], np.int64)
        pages_counts = (lengths * block_tokens if padded else input_tokens) // page_size
        numbers, distinct_count = _page_numbers(blocks, lengths, block_tokens, pages_counts, page_size)
        return cls(
            page_size=page_size,
            starts=_starts(pages_counts),
            numbers=numbers,
            distinct_count=distinct_count,
            times_s=np.array([request.timestamp / 1000 for request in requests], np.float64),
            input_tokens=input_tokens,
        )

    @property
    def requests_count(self) -> int:
        """Requests of the trace."""
        return len(self.starts) - 1

    @property
    def pages_counts(self) -> Counts:
        """Pages that each request asks for, shape (requests,)."""
        return np.diff(self.starts)

    @property
    def longest_pages(self) -> int:
        """Pages of the longest prompt."""
        return int(self.pages_counts.max())

    def tokens_of(self, ends: Counts) -> Counts:
        """Return the tokens of so many pages of each prompt, its last block at its true length, shape (requests,)."""
        tokens: Counts = np.minimum(ends * self.page_size, self.input_tokens)
        return tokens

    def token_ratio(self, ends: Counts) -> float:
        """Return what share of all tokens so many pages of each prompt are."""
        return float(self.tokens_of(ends).sum()) / max(1, int(self.input_tokens.sum()))

    def cut(self, pages_max: int) -> "TracePages":
        """Return the trace with every prompt cut to its first ``pages_max`` pages."""
        if pages_max >= self.longest_pages:
            return self
        return self._of_requests(slice(None), np.minimum(self.pages_counts, pages_max))

    def dealt_to(self, number: int, count: int) -> "TracePages":
        """Return the requests of one of ``count`` engines that take them in turn; every engine has one."""
        mine = slice(number, None, count)
        return self._of_requests(mine, self.pages_counts[mine])

    def _of_requests(self, taken: slice, counts: Counts) -> "TracePages":
        """Return some of the requests, and of each prompt the first ``counts`` pages, shape (requests taken,)."""
        return replace(
            self,
            starts=_starts(counts),
            numbers=self.numbers[_joined_ranges(self.starts[:-1][taken], counts)],
            times_s=self.times_s[taken],
            input_tokens=self.input_tokens[taken],
        )

    def seen_ends(self) -> Counts:
        """Return for each request how many pages of its prompt an earlier one asked for, shape (requests,)."""
        is_first = np.zeros(len(self.numbers) + 1, np.int64)
        is_first[np.unique(self.numbers, return_index=True)[1] + 1] = 1
        new: Counts = np.diff(np.cumsum(is_first)[self.starts])
        return self.pages_counts - new


def _starts(counts: Counts) -> Counts:
    starts: Counts = np.concatenate([[0], np.cumsum(counts)])
    return starts


def _joined_ranges(starts: Counts, counts: Counts) -> Counts:
    """Return the numbers of [start, start + count) for each start, one range after the other."""
    first = np.repeat(starts - _starts(counts)[:-1], counts)
    ranges: Counts = first + np.arange(len(first))
    return ranges


def _page_numbers(
    blocks: Numbers, lengths: Counts, block_tokens: int, pages: Counts, page_size: int
) -> tuple[Numbers, int]:
    """Number the first ``pages[r]`` pages of each request, whose blocks follow each other in ``blocks``."""
    if not len(blocks):
        return np.empty(0, np.int32), 0
    depths = _joined_ranges(np.zeros(len(lengths), np.int64), lengths)
    # Pages that end before a block, and in it: those of a block depend on how deep it stands unless one size divides
    # the other.
    ended = depths * block_tokens // page_size
    in_block = (depths + 1) * block_tokens // page_size - ended
    pages_of_block = np.zeros(int(blocks.max()) + 1, np.int64)
    pages_of_block[blocks] = in_block
    first_number = _starts(pages_of_block)
    taken = np.clip(np.repeat(pages, lengths) - ended, 0, in_block)
    numbers = _joined_ranges(first_number[blocks], taken).astype(np.int32)
    # Numbers without gaps, so that what is counted by number is no larger than what there is.
    is_used = np.zeros(int(first_number[-1]), np.bool_)
    is_used[numbers] = True
    dense = np.cumsum(is_used, dtype=np.int32) - 1
    return dense[numbers], int(is_used.sum())
