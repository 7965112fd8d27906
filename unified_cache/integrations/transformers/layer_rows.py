"""State of the layers of a stock cache object, read as rows and restored from rows.

A layer keeps its state in tensors of *rows* whose last row is the newest: K and V have a row for each token, a window
the last of them, a compressor a row for every so many tokens, and a recurrent state is one row that sums up all
before it. So "the pages before this boundary" is, of each tensor, its last rows, and resuming is giving them back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer of a model's own cache object, read and filled at page boundaries. Batches of one request."""

    read: Callable[[], list[LayerRows]]
    """Return every tensor that the layer needs to go on, in an order that never changes."""
    write: Callable[[Sequence[torch.Tensor | None], int], None]
    """Give an empty layer what ``read`` returned after so many tokens, in that order.

    None stands for what the model does without. The tensors are the layer's from now on.
    """


def _full(layer: "DynamicLayer") -> LayerState:
    """Keys and values of every token."""

    def read() -> list[LayerRows]:
        return [LayerRows("kv", _rows(layer.keys)), LayerRows("kv", _rows(layer.values))]

    def write(rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        keys, values = _all(rows)
        _fill(layer, keys, values)

    return LayerState(read, write)


def _indexed(layer: "DynamicIndexedLayer") -> LayerState:
    """Keys and values, then the indexer's keys of every token, and their positions where the model keeps those.

    A layer that goes by the choice of another one has no indexer of its own.
    """
    full = _full(layer)

    def read() -> list[LayerRows]:
        keys, places = layer.indexer_keys, layer.indexer_position_ids
        return [
            *full.read(),
            LayerRows("indexer", None if keys is None else keys[0], is_optional=True),
            LayerRows("indexer", None if places is None else places[:, 0].transpose(0, 1), is_optional=True),
        ]

    def write(rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        keys_values, (keys, places) = rows[:2], rows[2:]
        full.write(keys_values, tokens)
        if keys is not None:
            layer.update_indexer(keys.unsqueeze(0))
        if places is not None:
            layer.indexer_position_ids = places.transpose(0, 1).unsqueeze(1)

    return LayerState(read, write)


def _block_indexed(layer: "MiniMaxM3VLSparseCacheLayer") -> LayerState:
    """Keys and values, then the keys that MiniMax-M3's sparse attention chooses blocks by."""
    full = _full(layer)

    def read() -> list[LayerRows]:
        return [*full.read(), LayerRows("indexer", _rows(layer.idx_keys))]

    def write(rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        *keys_values, indexed = _all(rows)
        full.write(keys_values, tokens)
        layer.idx_keys = indexed.transpose(0, 1).unsqueeze(0)

    return LayerState(read, write)


def _sliding(layer: "DynamicSlidingWindowLayer") -> LayerState:
    """Keys and values of the last ``sliding_window - 1`` tokens."""

    def read() -> list[LayerRows]:
        rows_max = layer.sliding_window - 1
        return [LayerRows("swa", _rows(each), rows_max=rows_max) for each in (layer.keys, layer.values)]

    def write(rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        keys, values = _all(rows)
        _fill(layer, keys, values)
        layer.cumulative_length = tokens

    return LayerState(read, write)


def _recurrent(layer: "LinearAttentionCacheLayerMixin") -> LayerState:
    """Inputs that the convolution of linear attention looks back on, and its recurrent state.

    Some models have the convolution alone, some the recurrent state alone, some several pairs.
    """

    def read() -> list[LayerRows]:
        pairs = ((layer.conv_states[at], layer.recurrent_states[at]) for at in range(layer.number_of_states))
        return [LayerRows("mamba", each, CHECKPOINT, rows_max=1, is_optional=True) for pair in pairs for each in pair]

    def write(rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        for at in range(layer.number_of_states):
            inputs, state = rows[2 * at : 2 * at + 2]
            if inputs is not None:
                layer.update_conv_state(inputs, state_idx=at)
            if state is not None:
                layer.update_recurrent_state(state, state_idx=at)

    return LayerState(read, write)


def _joined(*parts: LayerState) -> LayerState:
    """Several kinds of state side by side: that of the one, then that of the other."""

    def read() -> list[LayerRows]:
        return [kept for part in parts for kept in part.read()]

    def write(rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        bounds = accumulate((len(part.read()) for part in parts), initial=0)
        for part, (start, end) in zip(parts, pairwise(bounds), strict=True):
            part.write(rows[start:end], tokens)

    return LayerState(read, write)


def _heavily_compressed(layer: "DeepseekV4HCACache") -> LayerState:
    """A window whose keys are its values, and compressed rows, of DeepSeek-V4's heavily compressed attention.

    At a page boundary no group of tokens waits to be compressed: pages are whole groups.
    """

    def read() -> list[LayerRows]:
        return [_window(layer), _compressed(layer, "compressor", "deepseek_v4_c128")]

    def write(rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        window, compressed = _all(rows)
        _fill_window(layer, window, tokens)
        layer.update_compressor_states("compressor", compressed.unsqueeze(0))

    return LayerState(read, write)


def _compressed_sparse(layer: "DeepseekV4CSACache") -> LayerState:
    """State of DeepSeek-V4's compressed sparse attention.

    It has a window, then of the compressor and of the indexer compressed rows and their last group, which the next
    group overlaps.
    """

    def read() -> list[LayerRows]:
        kept = [_window(layer)]
        for name, pool in _CSA_POOLS.items():
            overlap = (layer.overlap_kv[name], layer.overlap_gate[name])
            kept.append(_compressed(layer, name, pool))
            kept += [LayerRows(f"{pool}_state", each, CHECKPOINT, rows_max=1) for each in overlap]
        return kept

    def write(rows: Sequence[torch.Tensor | None], tokens: int) -> None:
        window, *rest = _all(rows)
        _fill_window(layer, window, tokens)
        for at, name in enumerate(_CSA_POOLS):
            compressed, kv, gate = rest[3 * at : 3 * at + 3]
            layer.update_compressor_states(name, compressed.unsqueeze(0))
            layer.overlap_kv[name], layer.overlap_gate[name] = kv, gate

    return LayerState(read, write)


_CSA_POOLS = {"compressor": "deepseek_v4_c4", "indexer": "deepseek_v4_c4_indexer"}
"""The two compressors of a compressed-sparse layer, and where their rows belong."""

_STATES: Mapping[str, Callable[..., LayerState]] = {
    "transformers.cache_utils.DummyLayer": lambda _: _joined(),
    "transformers.cache_utils.DynamicIndexedLayer": _indexed,
    "transformers.cache_utils.DynamicLayer": _full,
    "transformers.cache_utils.DynamicSlidingWindowLayer": _sliding,
    "transformers.cache_utils.LinearAttentionAndFullAttentionLayer": (
        lambda layer: _joined(_full(layer), _recurrent(layer))
    ),
    "transformers.cache_utils.LinearAttentionAndSlidingWindowAttentionLayer": (
        lambda layer: _joined(_sliding(layer), _recurrent(layer))
    ),
    "transformers.cache_utils.LinearAttentionLayer": _recurrent,
    "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4CSACache": _compressed_sparse,
    "transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4HCACache": _heavily_compressed,
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLSparseCacheLayer": _block_indexed,
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
