"""Attention metadata of one forward, computed once, before its first layer."""

from dataclasses import dataclass
from enum import Enum
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from unified_cache.core.errors import InputError
from unified_cache.core.pool import ModelLayout
from unified_cache.forward.batch import ForwardBatch, ForwardMode
from unified_cache.forward.translation import SwaTranslation, sent


class LayerKind(Enum):
    """Pool that a layer of a hybrid model reads and writes."""

    FULL = "full"
    """The Full pool, or one that follows its slots."""
    SWA = "swa"
    """The sliding-window pool, with slots of its own."""

    @classmethod
    def of(cls, layout: ModelLayout, pool: str) -> "LayerKind":
        """Return how layers find their tokens in a pool of ``layout``.

        Raises:
            InputError: the layout has no such pool, or one of states, which are not kept token by token.
        """
        for number, component in enumerate(layout.components):
            if any(each.name == pool for each in component.pools):
                if number == 0:
                    return cls.FULL
                if component.mapped:
                    return cls.SWA
                raise InputError(f"layers keep rows of tokens in Full's pools and mapped ones, found {pool!r}")
        raise InputError(f"expected a pool of {[each.name for each in layout.pools]}, found {pool!r}")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One forward of a model whose layers all live in the Full pool. The tensors are the batch's own."""

    out_cache_loc: torch.Tensor
    """Full token locs that are written, int64, shape (tokens,): the very tensor of the batch."""
    page_table: torch.Tensor
    """Full page slots, int32, shape (requests, pages_max)."""
    cache_lens: torch.Tensor
    """Tokens that attention reads for each request, those written now included, int32, shape (requests,)."""
    query_starts: torch.Tensor
    """Where the new tokens of each request begin, and where those of the last one end, int32, shape (requests + 1,).

    As cu_seqlens_q of FlashAttention."""


@dataclass(frozen=True, slots=True, eq=False)
class HybridAttentionMetadata(AttentionMetadata):
    """One forward of a model with sliding-window layers; true for that forward and dropped with it."""

    swa_out_cache_loc: torch.Tensor
    """SWA token locs that are written, int32, shape (tokens,)."""
    swa_page_table: torch.Tensor
    """SWA page slots, int32, shape (requests, pages_max); the sink where a page has left the window."""
    writes_count: int
    """How often ``out_cache_loc`` had been written to when it was translated; see ``writes_count_of``."""
    map_version: int
    """Version of the map that it was translated by."""

    def is_current(self, batch: ForwardBatch, translation: SwaTranslation) -> bool:
        """Return whether ``swa_out_cache_loc`` is what translating the batch now would give; waits for no device.

        Yes only if the batch holds the very tensor that was translated, nobody has written into it since, and the
        map is at the same version:

        * Equal length does not do: draft-extend binds another ``out_cache_loc`` of the same length. Nor does the same
          address, which the allocator hands out again; this metadata holds the tensor, so its *object* is one.
        * torch counts writes in place, for all views of one memory; but not for tensors made under inference mode, nor
          what another library or a replayed graph writes: there ``ForwardBatch`` says that nobody does.
        * A load between two forwards may bind the same Full slots to new SWA slots, under another version.
        """
        return (
            batch.out_cache_loc is self.out_cache_loc
            and writes_count_of(self.out_cache_loc) == self.writes_count
            and translation.map_version == self.map_version
        )


@overload
def init_metadata(batch: ForwardBatch, translation: None) -> AttentionMetadata: ...
@overload
def init_metadata(batch: ForwardBatch, translation: SwaTranslation) -> HybridAttentionMetadata: ...
def init_metadata(batch: ForwardBatch, translation: SwaTranslation | None) -> AttentionMetadata:
    """Build the metadata of one forward, translated once for all layers if the model is hybrid.

    Call it after every allocation and load of this forward has changed the map, and again for each forward.
    As init_forward_metadata in SGLang 0.5.23.
    """
    starts = sent(query_starts(batch, batch.requests_count), batch.seq_lens.device)
    if translation is None:
        return AttentionMetadata(batch.out_cache_loc, batch.page_table, batch.seq_lens, starts)
    return HybridAttentionMetadata(
        batch.out_cache_loc,
        batch.page_table,
        batch.seq_lens,
        starts,
        swa_out_cache_loc=translation.translate_locs(batch.out_cache_loc),
        swa_page_table=translation.translate_pages(batch.page_table),
        writes_count=writes_count_of(batch.out_cache_loc),
        map_version=translation.map_version,
    )


def write_locs(
    kind: LayerKind,
    batch: ForwardBatch,
    metadata: HybridAttentionMetadata | None,
    translation: SwaTranslation,
) -> torch.Tensor:
    """Choose where a layer of a hybrid model writes: SWA locs, int32, or Full locs, int64; shape (tokens,).

    As get_swa_out_cache_loc in SGLang 0.5.23. SWA layers take the translation on the metadata where ``is_current``
    says that it is this batch's. Otherwise, without metadata, and for an idle batch, whose metadata may be what an
    earlier forward left behind, the batch is translated now. Other layers take the batch's own locs, as every layer
    does of a model that is not hybrid.
    """
    if kind is LayerKind.FULL:
        return batch.out_cache_loc
    if metadata is not None and batch.mode is not ForwardMode.IDLE and metadata.is_current(batch, translation):
        return metadata.swa_out_cache_loc
    return translation.translate_locs(batch.out_cache_loc)


def query_starts(batch: ForwardBatch, requests_count: int) -> npt.NDArray[np.int32]:
    """Return where the tokens of ``requests_count`` requests begin and end, those past the batch's having none."""
    starts = np.zeros(requests_count + 1, np.int32)
    starts[1 : batch.requests_count + 1] = batch.query_lens
    return np.cumsum(starts, dtype=np.int32)


def writes_count_of(tensor: torch.Tensor) -> int:
    """Return how often torch has written into a tensor's memory since it was made; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it
