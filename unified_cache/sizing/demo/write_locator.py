"""Write locations of one forward's tokens in every pool (SGLang: ``out_cache_loc``), found once per forward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from unified_cache.forward import ForwardBatch, LayerKind, SwaTranslation, init_metadata, write_locs

__all__ = ["PagedWriteLocator", "WriteLocator", "WriteLocs", "own_length"]


@dataclass(frozen=True, slots=True, eq=False)
class WriteLocs:
    """Location of each token of a forward; locations past the batch's own tokens are padding."""

    full: torch.Tensor
    """Full token locs, int64, shape (tokens,)."""
    swa: torch.Tensor | None
    """SWA token locs, int32, shape (tokens,); None for a model without sliding windows."""

    def head(self, count: int) -> "WriteLocs":
        """Return those of the first ``count`` tokens."""
        return WriteLocs(self.full[:count], None if self.swa is None else self.swa[:count])

    def tail(self, count: int) -> "WriteLocs":
        """Return those of the tokens after the first ``count``."""
        return WriteLocs(self.full[count:], None if self.swa is None else self.swa[count:])


class WriteLocator(Protocol):
    """Turns a batch into write locations. Called once in every iteration, for idle batches as well."""

    def __call__(self, batch: ForwardBatch) -> WriteLocs:
        """Return a location for every token of ``batch``, and for as many more as padding adds."""
        ...


def own_length(tokens_count: int) -> int:
    """Return the length that other ranks need a batch to have, of one that has no other ranks: its own."""
    return tokens_count


class PagedWriteLocator:
    """Pads a batch to the length that all ranks agree on, builds its metadata, and reads the locations from it."""

    __slots__ = ("_padded_tokens", "_translation")

    def __init__(self, translation: SwaTranslation | None, padded_tokens: Callable[[int], int] = own_length) -> None:
        """Translate by ``translation``, None where no component is reached through Full's slots."""
        self._translation = translation
        self._padded_tokens = padded_tokens

    def __call__(self, batch: ForwardBatch) -> WriteLocs:
        """Pad, build the metadata of this forward, and have it say where both kinds of layers write."""
        batch = batch.padded(self._padded_tokens(batch.tokens_count))
        if self._translation is None:
            return WriteLocs(init_metadata(batch, None).out_cache_loc, None)
        metadata = init_metadata(batch, self._translation)
        full, swa = (write_locs(kind, batch, metadata, self._translation) for kind in (LayerKind.FULL, LayerKind.SWA))
        return WriteLocs(full, swa)
