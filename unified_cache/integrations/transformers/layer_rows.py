"""State of the layers of a stock cache object, read as rows and restored from rows.

A layer keeps its state in tensors of *rows* whose last row is the newest: K and V have a row for each token, a window
the last of them, a compressor a row for every so many tokens, and a recurrent state is one row that sums up all
before it. So "the pages before this boundary" is, of each tensor, its last rows, and resuming is giving them back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from unified_cache.errors import LayoutError

__all__ = ["CHECKPOINT", "LayerRows", "LayerState", "layer_state"]

CHECKPOINT = 0
"""Value of ``row_tokens`` for a recurrent state: one row that sums up all tokens, valid at one boundary alone."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """Rows that a layer keeps in one tensor at this moment."""

    pool: str
    """Pool of the layout that its pages belong to."""
    rows: torch.Tensor | None
    """Shape (rows, ...), the newest last. A view of the layer's own, true until the next forward. None before the
    layer has any; after a page of tokens it has."""
    row_tokens: int = 1
    """Tokens that a row stands for, or ``CHECKPOINT``."""
    rows_max: int | None = None
    """Largest number of rows that the layer looks back on; None for all."""


class LayerState(Protocol):
    """One layer of a model's own cache object, read and filled at page boundaries. Batches of one request."""

    def read(self) -> list[LayerRows]:
        """Return every tensor that the layer needs to go on, in an order that never changes."""
        ...

    def write(self, rows: Sequence[torch.Tensor], tokens: int) -> None:
        """Give an empty layer what ``read`` returned after ``tokens`` tokens, in that order.

        The tensors are the layer's from now on.
        """
        ...


class FullLayer:
    """State of full attention: keys and values of every token."""

    __slots__ = ("_layer",)

    def __init__(self, layer: DynamicLayer) -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return keys and values."""
        return [LayerRows("kv", _rows(self._layer.keys)), LayerRows("kv", _rows(self._layer.values))]

    def write(self, rows: Sequence[torch.Tensor], tokens: int) -> None:
        """Hand keys and values over."""
        keys, values = rows
        _fill(self._layer, keys, values)


class WindowLayer:
    """State of sliding-window attention: keys and values of the last ``sliding_window - 1`` tokens."""

    __slots__ = ("_layer",)

    def __init__(self, layer: DynamicSlidingWindowLayer) -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return keys and values."""
        rows_max = self._layer.sliding_window - 1
        return [LayerRows("swa", _rows(each), rows_max=rows_max) for each in (self._layer.keys, self._layer.values)]

    def write(self, rows: Sequence[torch.Tensor], tokens: int) -> None:
        """Hand keys and values over, and how many tokens there were up to the last of them."""
        keys, values = rows
        _fill(self._layer, keys, values)
        self._layer.cumulative_length = tokens


class RecurrentLayer:
    """State of linear attention: the inputs that its convolution looks back on, and its recurrent state."""

    __slots__ = ("_layer",)

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return the convolution's inputs and the recurrent state, of each pair that the layer keeps."""
        pairs = ((self._layer.conv_states[at], self._layer.recurrent_states[at]) for at in self._states())
        return [LayerRows("mamba", each, CHECKPOINT, rows_max=1) for pair in pairs for each in pair]

    def write(self, rows: Sequence[torch.Tensor], tokens: int) -> None:
        """Hand both over as the state after a prompt."""
        for at in self._states():
            self._layer.update_conv_state(rows[2 * at], state_idx=at)
            self._layer.update_recurrent_state(rows[2 * at + 1], state_idx=at)

    def _states(self) -> range:
        return range(self._layer.number_of_states)


class HeavilyCompressedLayer:
    """State of DeepSeek-V4's heavily compressed attention: its window, whose keys are its values, and compressed rows.

    At a page boundary no group of tokens waits to be compressed: pages are whole groups.
    """

    __slots__ = ("_layer",)

    def __init__(self, layer: DeepseekV4HCACache) -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return the window and the compressed rows."""
        return [_window(self._layer), _compressed(self._layer, "compressor", "deepseek_v4_c128")]

    def write(self, rows: Sequence[torch.Tensor], tokens: int) -> None:
        """Fill the window and the compressed rows."""
        window, compressed = rows
        _fill_window(self._layer, window, tokens)
        self._layer.update_compressor_states("compressor", compressed.unsqueeze(0))


class CompressedSparseLayer:
    """State of DeepSeek-V4's compressed sparse attention.

    It has a window, compressed rows of the compressor and of the indexer, and the last group of both, which the next
    group overlaps.
    """

    __slots__ = ("_layer",)

    def __init__(self, layer: DeepseekV4CSACache) -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return the window; then compressed rows and overlapping group, of the compressor and of the indexer."""
        kept = [_window(self._layer)]
        for name, pool in _CSA_POOLS.items():
            overlap = (self._layer.overlap_kv[name], self._layer.overlap_gate[name])
            kept.append(_compressed(self._layer, name, pool))
            kept += [LayerRows(f"{pool}_state", each, CHECKPOINT, rows_max=1) for each in overlap]
        return kept

    def write(self, rows: Sequence[torch.Tensor], tokens: int) -> None:
        """Fill all of it."""
        window, *rest = rows
        _fill_window(self._layer, window, tokens)
        for at, name in enumerate(_CSA_POOLS):
            compressed, kv, gate = rest[3 * at : 3 * at + 3]
            self._layer.update_compressor_states(name, compressed.unsqueeze(0))
            self._layer.overlap_kv[name], self._layer.overlap_gate[name] = kv, gate


_CSA_POOLS = {"compressor": "deepseek_v4_c4", "indexer": "deepseek_v4_c4_indexer"}
"""The two compressors of a compressed-sparse layer, and where their rows belong."""

_STATES: Mapping[type[object], Callable[..., LayerState]] = {
    DynamicLayer: FullLayer,
    DynamicSlidingWindowLayer: WindowLayer,
    LinearAttentionLayer: RecurrentLayer,
    DeepseekV4HCACache: HeavilyCompressedLayer,
    DeepseekV4CSACache: CompressedSparseLayer,
}
"""Readers by the exact class of a layer: a subclass may keep more state than its base."""


def layer_state(layer: object) -> LayerState:
    """Return the reader and filler of one layer of a cache object.

    Raises:
        LayoutError: its class is none that is known.
    """
    found = _STATES.get(type(layer))
    if found is None:
        known = ", ".join(each.__name__ for each in _STATES)
        raise LayoutError(f"a layer of the model's cache must be one of {known}, found {type(layer).__name__}")
    return found(layer)


def _rows(states: torch.Tensor | None) -> torch.Tensor | None:
    """View (1, heads, tokens, dimensions) as (tokens, heads, dimensions)."""
    return None if states is None else states[0].transpose(0, 1)


def _fill(layer: DynamicLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Give an empty layer keys and values of shape (tokens, heads, dimensions), without a copy.

    The layer has them as (1, heads, tokens, dimensions); its next update copies them behind one another.
    """
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = (rows.transpose(0, 1).unsqueeze(0) for rows in (keys, values))


def _window(layer: DeepseekV4HCACache) -> LayerRows:
    return LayerRows("swa", _rows(layer.keys), rows_max=layer.sliding_window - 1)


def _fill_window(layer: DeepseekV4HCACache, rows: torch.Tensor, tokens: int) -> None:
    _fill(layer, rows, rows)
    layer.values = layer.keys
    layer.cumulative_length = tokens


def _compressed(layer: DeepseekV4HCACache, name: str, pool: str) -> LayerRows:
    compressed = layer.compressed_kv[name]
    return LayerRows(pool, None if compressed is None else compressed[0], layer.compress_rate)
