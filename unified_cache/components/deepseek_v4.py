"""DeepSeek-V4 as pools: what each layer keeps, in bytes per page, and which component it follows.

    component  pool                          layers      rows per page
    Full       kv                            none        none: a logical anchor, slots without bytes
               deepseek_v4_c4                ratio 4     page_size / 4
               deepseek_v4_c4_indexer        ratio 4     page_size / 4
               deepseek_v4_c4_indexer_scale  ratio 4     page_size / 4; only where scales lie apart
               deepseek_v4_c128              ratio 128   page_size / 128
    SWA        swa                           all         page_size
               deepseek_v4_c4_state          ratio 4     a ring, 8 or 16
               deepseek_v4_c4_indexer_state  ratio 4     a ring, 8 or 16

The state of the ratio-128 compressor belongs to a request and is never cached: a page is a multiple of 128 tokens,
so no group of 128 is pending at a page boundary. Names and formats as SGLang 0.5.23 has them
(``deepseek_v4_memory_pool.py``, ``dsv4/kv_layout.py``).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from unified_cache.components.kinds import Full, SlidingWindow
from unified_cache.errors import LayoutError
from unified_cache.pool import LayerPlace, ModelLayout, PoolSpec, place_layers

__all__ = [
    "INDEXER_FP4",
    "INDEXER_FP4_APART",
    "INDEXER_FP8",
    "PAGE_SIZE",
    "RATIO_CSA",
    "RATIO_HCA",
    "RATIO_SWA",
    "ROW_FORMATS",
    "DeepSeekV4",
    "IndexerFormat",
    "RowFormat",
]

PAGE_SIZE = 256
"""Tokens per page that its CUDA kernels are built for: 64 rows of ratio 4, 2 of ratio 128."""

RATIO_SWA = 0
"""A layer that has its sliding window and nothing else."""
RATIO_CSA = 4
"""Compressed sparse attention: one row per 4 tokens, chosen by an indexer."""
RATIO_HCA = 128
"""Heavily compressed attention: one row per 128 tokens."""

HEAD_DIM = 512
"""448 values without and 64 with rotary position; the row formats below are made for it."""

_WINDOW_POOLS = ("swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state")
"""Pools that follow the slots of the sliding window; the others follow Full's."""

_POOLS_OF_RATIO: Mapping[int, tuple[str, ...]] = {
    RATIO_SWA: ("swa",),
    RATIO_CSA: (
        "deepseek_v4_c4",
        "deepseek_v4_c4_indexer",
        "deepseek_v4_c4_indexer_scale",
        "swa",
        "deepseek_v4_c4_state",
        "deepseek_v4_c4_indexer_state",
    ),
    RATIO_HCA: ("deepseek_v4_c128", "swa"),
}
"""Pools that a layer keeps state in; the table above, by layer."""

_STATE_ROW_VALUES = 4
"""Rows of the head dimension in one row of ratio-4 compressor state: kv and score of two overlapping groups."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Format of the rows of one layer in a page: all values, then all scales, then padding."""

    value_bytes: int
    """Bytes of one row that its values take."""
    scale_bytes: int
    """Bytes of one row that its scales take."""
    align_bytes: int
    """A page is a multiple of this."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, before a page is padded."""
        return self.value_bytes + self.scale_bytes

    def page_bytes(self, rows: int) -> int:
        """Return the bytes of a page of ``rows`` rows, padding included."""
        return -(-rows * self.row_bytes // self.align_bytes) * self.align_bytes


@dataclass(frozen=True, slots=True)
class IndexerFormat:
    """Bytes of one indexer key; where ``scale_apart`` is set, its scale lies in a pool of its own."""

    values_per_byte: int
    scale_apart: bool = False

    def key_bytes(self, index_head_dim: int) -> int:
        """Return the bytes of one key in the indexer's own pool."""
        return index_head_dim // self.values_per_byte + (0 if self.scale_apart else INDEXER_SCALE_BYTES)


ROW_FORMATS: Mapping[str, tuple[RowFormat, RowFormat]] = {
    # name: (rows of the sliding window, rows of the compressed pools)
    "v4": (RowFormat(576, 8, 576), RowFormat(576, 8, 576)),
    "v41": (RowFormat(512, 16, 512), RowFormat(512, 16, 512)),
    "v41_fp4": (RowFormat(512, 16, 512), RowFormat(256, 32, 256)),
    "uniform_fp8": (RowFormat(512, 0, 1), RowFormat(512, 0, 1)),
}
"""As ``SGLANG_DSV4_KV_LAYOUT`` names them. ``v4``: 448 fp8 and 64 bf16, 7 scales and a byte of padding."""

INDEXER_SCALE_BYTES = 4
"""One fp32 for 128 fp8 values; four bytes of block scales for 128 fp4 values."""
INDEXER_FP8 = IndexerFormat(values_per_byte=1)
INDEXER_FP4 = IndexerFormat(values_per_byte=2)
INDEXER_FP4_APART = IndexerFormat(values_per_byte=2, scale_apart=True)
"""Indexer format on ROCm."""


@dataclass(frozen=True, slots=True)
class DeepSeekV4:
    """Layers of a DeepSeek-V4 model and the formats an engine keeps them in."""

    compress_ratios: tuple[int, ...]
    """Compression ratio of every decoder layer; a draft (MTP) layer's entry does not belong here."""
    window_tokens: int = 128
    index_head_dim: int = 128
    rows: str = "v4"
    """A name in ``ROW_FORMATS``."""
    indexer: IndexerFormat = INDEXER_FP8
    state_value_bytes: int = 4
    """fp32; 2 for bf16."""
    ring_rows: int = 8
    """Rows of compressor state per page of the sliding window; 16 with speculative decoding."""

    def __post_init__(self) -> None:
        strange = sorted({ratio for ratio in self.compress_ratios if ratio not in _POOLS_OF_RATIO})
        if strange:
            raise LayoutError(f"compress_ratios must be among {tuple(_POOLS_OF_RATIO)}, found {strange}")
        if not any(self.compress_ratios):
            raise LayoutError("compress_ratios must name a compressed layer (4 or 128), found none")
        if self.rows not in ROW_FORMATS:
            raise LayoutError(f"rows must be one of {sorted(ROW_FORMATS)}, found {self.rows!r}")
        if self.state_value_bytes not in (2, 4):
            raise LayoutError(f"state_value_bytes must be 2 (bf16) or 4 (fp32), found {self.state_value_bytes}")
        if self.index_head_dim <= 0 or self.index_head_dim % self.indexer.values_per_byte:
            raise LayoutError(f"index_head_dim must be positive and fill whole bytes, found {self.index_head_dim}")

    def check_page_size(self, page_size: int) -> None:
        """Check the rules that make a page boundary a place where nothing is pending.

        Raises:
            LayoutError: a compression group or a ring would straddle two pages, or a page would not hold windows.
        """
        for name, value in (("ratio", RATIO_HCA), ("window", self.window_tokens), ("ring_rows", self.ring_rows)):
            if page_size <= 0 or value <= 0 or page_size % value:
                raise LayoutError(f"page_size must be a multiple of the {name} {value}, found {page_size}")
        if self.ring_rows % RATIO_CSA:
            raise LayoutError(f"ring_rows must be a multiple of the ratio {RATIO_CSA}, found {self.ring_rows}")

    def layers_mapping(self) -> tuple[tuple[LayerPlace, ...], ...]:
        """Return the pools of each layer, as ``ModelLayout`` has them."""
        absent = set() if self.indexer.scale_apart else {"deepseek_v4_c4_indexer_scale"}
        return place_layers(
            [pool for pool in _POOLS_OF_RATIO[ratio] if pool not in absent] for ratio in self.compress_ratios
        )

    def layer_page_bytes(self, page_size: int) -> Mapping[str, int]:
        """Return the bytes of one page of one layer in each pool, by name, anchors first."""
        window_rows, compressed_rows = ROW_FORMATS[self.rows]
        csa_rows = page_size // RATIO_CSA
        state_row_bytes = _STATE_ROW_VALUES * self.state_value_bytes
        return {
            "kv": 0,
            "deepseek_v4_c4": compressed_rows.page_bytes(csa_rows),
            "deepseek_v4_c4_indexer": csa_rows * self.indexer.key_bytes(self.index_head_dim),
            "deepseek_v4_c4_indexer_scale": csa_rows * INDEXER_SCALE_BYTES,
            "deepseek_v4_c128": compressed_rows.page_bytes(page_size // RATIO_HCA),
            "swa": window_rows.page_bytes(page_size),
            "deepseek_v4_c4_state": self.ring_rows * state_row_bytes * HEAD_DIM,
            "deepseek_v4_c4_indexer_state": self.ring_rows * state_row_bytes * self.index_head_dim,
        }

    def layout(self, page_size: int = PAGE_SIZE) -> ModelLayout:
        """Return the layout of these layers.

        Raises:
            LayoutError: ``page_size`` breaks a rule of ``check_page_size``.
        """
        self.check_page_size(page_size)
        mapping = self.layers_mapping()
        layers = Counter(place.pool for layer in mapping for place in layer)
        specs = {
            name: PoolSpec(name, layers[name] * page_bytes, replicated=True)
            for name, page_bytes in self.layer_page_bytes(page_size).items()
            if layers[name] or name == "kv"
        }
        window = tuple(specs.pop(name) for name in _WINDOW_POOLS if name in specs)
        components = (Full(tuple(specs.values())), SlidingWindow(self.window_tokens, page_size, window))
        return ModelLayout(page_size, components, mapping)
