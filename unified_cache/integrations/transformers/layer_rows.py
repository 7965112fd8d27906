"""State of the layers of a stock cache object, read as rows and restored from rows.

A layer keeps its state in tensors of *rows* whose last row is the newest: K and V have a row for each token, a window
the last of them, a compressor a row for every so many tokens, and a recurrent state is one row that sums up all
before it. So "the pages before this boundary" is, of each tensor, its last rows, and resuming is giving them back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from unified_cache.core.errors import LayoutError

if TYPE_CHECKING:
    # Found by their names at run time: importing a model's module for its cache layer would load the whole model.
    from transformers.cache_utils import (
        DynamicIndexedLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionCacheLayerMixin,
    )
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLSparseCacheLayer

__all__ = ["CHECKPOINT", "FULL_POOLS", "STATE_POOLS", "WINDOW_POOLS", "LayerRows", "LayerState", "layer_state"]

CHECKPOINT = 0
"""Value of ``row_tokens`` for a recurrent state: one row that sums up all tokens, valid at one boundary alone."""

FULL_POOLS = ("kv", "indexer", "deepseek_v4_c4", "deepseek_v4_c4_indexer", "deepseek_v4_c128")
"""Pools of full attention, in the order of a layout: rows of all tokens. The first is there without bytes too."""
WINDOW_POOLS = ("swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state")
"""Pools of sliding windows: rows of the last tokens, and what follows their pages."""
STATE_POOLS = ("mamba",)
"""Pools of recurrent state."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """Rows that a layer keeps in one tensor at this moment."""

    pool: str
    """Pool of the layout that its pages belong to."""
    rows: torch.Tensor | None
    """Shape (rows, ...), the newest last. A view of the layer's own, true until the next forward. None before the
    layer has any, and for good where ``is_optional`` and a model does without."""
    row_tokens: int = 1
    """Tokens that a row stands for, or ``CHECKPOINT``."""
    rows_max: int | None = None
    """Largest number of rows that the layer looks back on; None for all."""
    is_optional: bool = False
    """Whether there are models whose layers of this class keep nothing here."""


class LayerState(Protocol):
    """One layer of a model's own cache object, read and filled at page boundaries. Batches of one request."""

    def read(self) -> list[LayerRows]:
        """Return every tensor that the layer needs to go on, in an order that never changes."""
        ...

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Give an empty layer what ``read`` returned after ``tokens`` tokens, in that order.

        None stands for what the model does without. The tensors are the layer's from now on.
        """
        ...


class FullLayer:
    """State of full attention: keys and values of every token."""

    __slots__ = ("_layer",)

    def __init__(self, layer: "DynamicLayer") -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return keys and values."""
        return [LayerRows("kv", _rows(self._layer.keys)), LayerRows("kv", _rows(self._layer.values))]

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Hand keys and values over."""
        keys, values = _all(rows)
        _fill(self._layer, keys, values)


class IndexedLayer:
    """State of sparse attention: keys and values, and the indexer's keys of every token.

    A layer that goes by the choice of another one has no indexer of its own.
    """

    __slots__ = ("_layer",)

    def __init__(self, layer: "DynamicIndexedLayer") -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return keys and values; then the indexer's keys, and their positions where the model keeps those."""
        keys, places = self._layer.indexer_keys, self._layer.indexer_position_ids
        return [
            *FullLayer(self._layer).read(),
            LayerRows("indexer", None if keys is None else keys[0], is_optional=True),
            LayerRows("indexer", None if places is None else places[:, 0].transpose(0, 1), is_optional=True),
        ]

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Hand keys and values over, and what there is of the indexer."""
        keys_values, (keys, places) = rows[:2], rows[2:]
        FullLayer(self._layer).write(keys_values, tokens)
        if keys is not None:
            self._layer.update_indexer(keys.unsqueeze(0))
        if places is not None:
            self._layer.indexer_position_ids = places.transpose(0, 1).unsqueeze(1)


class BlockIndexedLayer:
    """State of MiniMax-M3's sparse attention: keys and values, and the keys that blocks are chosen by."""

    __slots__ = ("_layer",)

    def __init__(self, layer: "MiniMaxM3VLSparseCacheLayer") -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return keys and values, then the indexer's keys."""
        return [*FullLayer(self._layer).read(), LayerRows("indexer", _rows(self._layer.idx_keys))]

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Hand all of it over."""
        *keys_values, indexed = _all(rows)
        FullLayer(self._layer).write(keys_values, tokens)
        self._layer.idx_keys = indexed.transpose(0, 1).unsqueeze(0)


class WindowLayer:
    """State of sliding-window attention: keys and values of the last ``sliding_window - 1`` tokens."""

    __slots__ = ("_layer",)

    def __init__(self, layer: "DynamicSlidingWindowLayer") -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return keys and values."""
        rows_max = self._layer.sliding_window - 1
        return [LayerRows("swa", _rows(each), rows_max=rows_max) for each in (self._layer.keys, self._layer.values)]

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Hand keys and values over, and how many tokens there were up to the last of them."""
        keys, values = _all(rows)
        _fill(self._layer, keys, values)
        self._layer.cumulative_length = tokens


class RecurrentLayer:
    """State of linear attention: the inputs that its convolution looks back on, and its recurrent state.

    Some models have the convolution alone, some the recurrent state alone, some several pairs.
    """

    __slots__ = ("_layer",)

    def __init__(self, layer: "LinearAttentionCacheLayerMixin") -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return the convolution's inputs and the recurrent state, of each pair that the layer keeps."""
        pairs = ((self._layer.conv_states[at], self._layer.recurrent_states[at]) for at in self._states())
        return [LayerRows("mamba", each, CHECKPOINT, rows_max=1, is_optional=True) for pair in pairs for each in pair]

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Hand over what there is of both, as the state after a prompt."""
        for at in self._states():
            inputs, state = rows[2 * at : 2 * at + 2]
            if inputs is not None:
                self._layer.update_conv_state(inputs, state_idx=at)
            if state is not None:
                self._layer.update_recurrent_state(state, state_idx=at)

    def _states(self) -> range:
        return range(self._layer.number_of_states)


class JoinedLayer:
    """State of a layer that keeps several kinds of it side by side: that of the one, then that of the other."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: LayerState) -> None:
        self._parts = parts

    def read(self) -> list[LayerRows]:
        """Return what every part keeps."""
        return [kept for part in self._parts for kept in part.read()]

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Give each part its own."""
        bounds = accumulate((len(part.read()) for part in self._parts), initial=0)
        for part, (start, end) in zip(self._parts, pairwise(bounds), strict=True):
            part.write(rows[start:end], tokens)


class HeavilyCompressedLayer:
    """State of DeepSeek-V4's heavily compressed attention: its window, whose keys are its values, and compressed rows.

    At a page boundary no group of tokens waits to be compressed: pages are whole groups.
    """

    __slots__ = ("_layer",)

    def __init__(self, layer: "DeepseekV4HCACache") -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return the window and the compressed rows."""
        return [_window(self._layer), _compressed(self._layer, "compressor", "deepseek_v4_c128")]

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Fill the window and the compressed rows."""
        window, compressed = _all(rows)
        _fill_window(self._layer, window, tokens)
        self._layer.update_compressor_states("compressor", compressed.unsqueeze(0))


class CompressedSparseLayer:
    """State of DeepSeek-V4's compressed sparse attention.

    It has a window, compressed rows of the compressor and of the indexer, and the last group of both, which the next
    group overlaps.
    """

    __slots__ = ("_layer",)

    def __init__(self, layer: "DeepseekV4CSACache") -> None:
        self._layer = layer

    def read(self) -> list[LayerRows]:
        """Return the window; then compressed rows and overlapping group, of the compressor and of the indexer."""
        kept = [_window(self._layer)]
        for name, pool in _CSA_POOLS.items():
            overlap = (self._layer.overlap_kv[name], self._layer.overlap_gate[name])
            kept.append(_compressed(self._layer, name, pool))
            kept += [LayerRows(f"{pool}_state", each, CHECKPOINT, rows_max=1) for each in overlap]
        return kept

    def write(self, rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        """Fill all of it."""
        window, *rest = _all(rows)
        _fill_window(self._layer, window, tokens)
        for at, name in enumerate(_CSA_POOLS):
            compressed, kv, gate = rest[3 * at : 3 * at + 3]
            self._layer.update_compressor_states(name, compressed.unsqueeze(0))
            self._layer.overlap_kv[name], self._layer.overlap_gate[name] = kv, gate


_CSA_POOLS = {"compressor": "deepseek_v4_c4", "indexer": "deepseek_v4_c4_indexer"}
"""The two compressors of a compressed-sparse layer, and where their rows belong."""

_STATES: Mapping[str, Callable[..., LayerState]] = {
    "transformers.cache_utils.DummyLayer": lambda _: JoinedLayer(),
    "transformers.cache_utils.DynamicIndexedLayer": IndexedLayer,
    "transformers.cache_utils.DynamicLayer": FullLayer,
    "transformers.cache_utils.DynamicSlidingWindowLayer": WindowLayer,
    "transformers.cache_utils.LinearAttentionAndFullAttentionLayer": (
        lambda layer: JoinedLayer(FullLayer(layer), RecurrentLayer(layer))
    ),
    "transformers.cache_utils.LinearAttentionAndSlidingWindowAttentionLayer": (
        lambda layer: JoinedLayer(WindowLayer(layer), RecurrentLayer(layer))
    ),
    "transformers.cache_utils.LinearAttentionLayer": RecurrentLayer,
    "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4CSACache": CompressedSparseLayer,
    "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4HCACache": HeavilyCompressedLayer,
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLSparseCacheLayer": BlockIndexedLayer,
}
"""Readers by the exact class of a layer: a subclass may keep more state than its base."""


def layer_state(layer: object) -> LayerState:
    """Return the reader and filler of one layer of a cache object.

    Raises:
        LayoutError: its class is none that is known.
    """
    kind = type(layer)
    found = _STATES.get(f"{kind.__module__}.{kind.__qualname__}")
    if found is None:
        known = ", ".join(name.rpartition(".")[2] for name in _STATES)
        raise LayoutError(
            f"a layer of the model's cache must be one of {known}, found {kind.__name__}; "
            f"what else a layer keeps would be lost with its pages"
        )
    return found(layer)


def _all(rows: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return rows of which none may be absent."""
    found = [each for each in rows if each is not None]
    assert len(found) == len(rows), "a layer is given what it has kept"
    return found


def _rows(states: torch.Tensor | None) -> torch.Tensor | None:
    """View (1, heads, tokens, dimensions) as (tokens, heads, dimensions)."""
    return None if states is None else states[0].transpose(0, 1)


def _fill(layer: "DynamicLayer", keys: torch.Tensor, values: torch.Tensor) -> None:
    """Give an empty layer keys and values of shape (tokens, heads, dimensions), without a copy.

    The layer has them as (1, heads, tokens, dimensions); its next update copies them behind one another.
    """
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = (rows.transpose(0, 1).unsqueeze(0) for rows in (keys, values))


def _window(layer: "DeepseekV4HCACache") -> LayerRows:
    return LayerRows("swa", _rows(layer.keys), rows_max=layer.sliding_window - 1)


def _fill_window(layer: "DeepseekV4HCACache", rows: torch.Tensor, tokens: int) -> None:
    _fill(layer, rows, rows)
    layer.values = layer.keys
    layer.cumulative_length = tokens


def _compressed(layer: "DeepseekV4HCACache", name: str, pool: str) -> LayerRows:
    compressed = layer.compressed_kv[name]
    return LayerRows(pool, None if compressed is None else compressed[0], layer.compress_rate)
