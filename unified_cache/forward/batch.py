"""Batch of one forward, from the scheduler to the kernels: its tokens and the Full locations of their state."""

from dataclasses import dataclass
from enum import Enum

import torch

from unified_cache.core.errors import InputError

PADDING_LOC = 0
"""Token loc that padding writes to: the first of page 0, the sink, which no allocator hands out."""


class ForwardMode(Enum):
    """Kind of a forward: the modes of ForwardMode in SGLang 0.5.23 that differ in what they write."""

    EXTEND = "extend"
    """Prefill: any number of tokens per request."""
    DECODE = "decode"
    """One token per request."""
    IDLE = "idle"
    """Nothing of our own; another data-parallel rank has work, and collectives need everyone. Padding only."""
    DRAFT_EXTEND = "draft_extend"
    """A draft model catches up on the tokens that were accepted."""
    TARGET_VERIFY = "target_verify"
    """The target model checks drafted tokens, the same number per request."""


ONE_TOKEN_MODES = frozenset({ForwardMode.DECODE, ForwardMode.IDLE})
"""Modes in which a request and a token are one row."""

EVEN_MODES = ONE_TOKEN_MODES | {ForwardMode.TARGET_VERIFY}
"""Modes in which every request has the same number of new tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One forward, as scheduled. A value: a change makes another.

    The tensors are the engine's, on one device. Nobody writes into ``out_cache_loc`` once metadata was built from it.
    """

    mode: ForwardMode
    out_cache_loc: torch.Tensor
    """Location of each new token in the Full pool, int64, shape (tokens,): ``slot * page_size + offset``."""
    seq_lens: torch.Tensor
    """Tokens of each request once this forward is done, int32, shape (requests,)."""
    page_table: torch.Tensor
    """Full page slots of each request, int32, shape (requests, pages_max); 0 or -1 behind the last page."""
    query_lens: tuple[int, ...]
    """New tokens of each request, in the order of the tokens. Tokens behind those of the last request are padding."""

    def __post_init__(self) -> None:
        """Raise InputError unless shapes, dtypes and devices are as the fields say; waits for no device."""
        _check("out_cache_loc", self.out_cache_loc, torch.int64, 1)
        _check("seq_lens", self.seq_lens, torch.int32, 1)
        _check("page_table", self.page_table, torch.int32, 2)
        requests_count, tokens_count = len(self.seq_lens), len(self.out_cache_loc)
        if len(self.page_table) != requests_count or len(self.query_lens) != requests_count:
            raise InputError(
                f"page_table must have {requests_count} rows and query_lens as many numbers, found "
                f"{len(self.page_table)} and {len(self.query_lens)}"
            )
        if min(self.query_lens, default=0) < 0 or sum(self.query_lens) > tokens_count:
            raise InputError(f"query_lens must share out at most {tokens_count} tokens, found {self.query_lens}")
        if self.mode in ONE_TOKEN_MODES and (tokens_count != requests_count or sum(self.query_lens) != tokens_count):
            raise InputError(f"{self.mode.value} has a token per request, found {tokens_count} for {requests_count}")
        if self.mode in EVEN_MODES and len(set(self.query_lens)) > 1:
            raise InputError(f"{self.mode.value} has as many tokens of each request, found {self.query_lens}")
        if not self.out_cache_loc.device == self.seq_lens.device == self.page_table.device:
            raise InputError("out_cache_loc, seq_lens and page_table must be on one device")

    @classmethod
    def idle(cls, device: torch.device, pages_max: int) -> "ForwardBatch":
        """Return the batch of a rank without work: no request; ``padded`` gives it the length of the others'."""
        return cls(
            ForwardMode.IDLE,
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.zeros(0, dtype=torch.int32, device=device),
            torch.zeros((0, pages_max), dtype=torch.int32, device=device),
            (),
        )

    @property
    def tokens_count(self) -> int:
        """Tokens that this forward writes, padding included."""
        return len(self.out_cache_loc)

    @property
    def requests_count(self) -> int:
        """Rows of the page table."""
        return len(self.seq_lens)

    def padded(self, tokens_count: int) -> "ForwardBatch":
        """Return this batch with padding behind, ``tokens_count`` tokens long, in tensors of its own.

        Padding tokens go to ``PADDING_LOC``. In modes where all requests have as many tokens, so have requests of
        padding: length 0, every page the sink. Other padding belongs to no request.

        Raises:
            InputError: the batch has more tokens than that.
        """
        extra_count = tokens_count - self.tokens_count
        if extra_count < 0:
            raise InputError(f"a batch of {self.tokens_count} tokens cannot be padded to {tokens_count}")
        query_len = max(self.query_lens, default=1)
        rows_count = extra_count // query_len if self.mode in EVEN_MODES and query_len else 0
        locs = self.out_cache_loc.new_full((extra_count,), PADDING_LOC)
        lens = self.seq_lens.new_zeros((rows_count,))
        rows = self.page_table.new_zeros((rows_count, self.page_table.shape[1]))
        return ForwardBatch(
            self.mode,
            torch.cat((self.out_cache_loc, locs)),
            torch.cat((self.seq_lens, lens)),
            torch.cat((self.page_table, rows)),
            self.query_lens + (query_len,) * rows_count,
        )


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, dimensions_count: int) -> None:
    if tensor.dtype != dtype or tensor.dim() != dimensions_count:
        raise InputError(
            f"{name} must be {dtype} with {dimensions_count} dimensions, found {tensor.dtype} {tuple(tensor.shape)}"
        )
