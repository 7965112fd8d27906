"""DeepSeek-V4 and V4.1 as pools: what each layer keeps, in bytes per page, and which component it follows.

    component  pool                          layers      rows per page
    Full       kv                            none        none: a logical anchor, slots without bytes
               deepseek_v4_c4                ratio 4     page_size / 4
               deepseek_v4_c4_indexer        ratio 4     page_size / 4
               deepseek_v4_c128              ratio 128   page_size / 128
    SWA        swa                           all         page_size
               deepseek_v4_c4_state          ratio 4     a ring of 8
               deepseek_v4_c4_indexer_state  ratio 4     a ring of 8

The state of the ratio-128 compressor belongs to a request and is never cached: a page is a multiple of 128 tokens,
so no group of 128 is pending at a page boundary. Names and formats as SGLang 0.5.23 has them
(``deepseek_v4_memory_pool.py``, ``dsv4/kv_layout.py``).

V4.1 has ratios 0, 1 and 2. Of its compressed layers a few, the *sources*, keep rows and the keys of the indexer, each
for itself and for the layers up to the next; no state is cached, since a page is a multiple of 2 tokens:

    component  pool                          layers      rows per page
    Full       kv                            none        none
               deepseek_v4_c1                sources     page_size
               deepseek_v4_c1_indexer        sources     page_size; fp4 always
               deepseek_v4_c2, and so on     sources     page_size / 2
    SWA        swa                           all         page_size

Names and formats as SGLang has them (#38954, ``hicache_storage.PoolName``), where windows are paged.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from unified_cache.components import Full, SlidingWindow
from unified_cache.core.errors import LayoutError
from unified_cache.core.pool import ModelLayout, PoolSpec

PAGE_SIZE = 256
"""Tokens per page that its CUDA kernels are built for: 64 rows of ratio 4, 2 of ratio 128."""

RATIO_SWA = 0
"""A layer that has its sliding window and nothing else."""
RATIO_CSA = 4
"""Compressed sparse attention: one row per 4 tokens, chosen by an indexer."""
RATIO_HCA = 128
"""Heavily compressed attention: one row per 128 tokens."""
RATIO_LATENT = 1
"""V4.1: one row per token, chosen by an indexer."""
RATIO_PAIR = 2
"""V4.1: one row per 2 tokens, chosen by an indexer."""

HEAD_DIM = 512
"""448 values without and 64 with rotary position; the row formats below are made for it."""

_WINDOW_POOLS = ("swa", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state")
"""Pools that follow the slots of the sliding window; the others follow Full's."""

_POOLS_OF_RATIO: Mapping[int, tuple[str, ...]] = {
    RATIO_SWA: ("swa",),
    RATIO_CSA: (
        "deepseek_v4_c4",
        "deepseek_v4_c4_indexer",
        "swa",
        "deepseek_v4_c4_state",
        "deepseek_v4_c4_indexer_state",
    ),
    RATIO_HCA: ("deepseek_v4_c128", "swa"),
    RATIO_LATENT: ("deepseek_v4_c1", "deepseek_v4_c1_indexer", "swa"),
    RATIO_PAIR: ("deepseek_v4_c2", "deepseek_v4_c2_indexer", "swa"),
}
"""Pools that a layer keeps state in; the tables above, by layer. Of V4.1 a source; others have their windows alone."""

_V4_RATIOS = frozenset({RATIO_SWA, RATIO_CSA, RATIO_HCA})
_V41_RATIOS = frozenset({RATIO_SWA, RATIO_LATENT, RATIO_PAIR})

_STATE_VALUE_BYTES = 8 * 4 * 4
"""Bytes of ratio-4 compressor state in a page for each value of the head: 8 rows, kv and score of two overlapping
groups, fp32."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Format of the rows of one layer in a page: all values, then all scales, then padding."""

    row_bytes: int
    """Bytes of one row, its values and scales, before a page is padded."""
    align_bytes: int
    """A page is a multiple of this."""

    def page_bytes(self, rows: int) -> int:
        """Return the bytes of a page of ``rows`` rows, padding included."""
        return -(-rows * self.row_bytes // self.align_bytes) * self.align_bytes


ROW_FORMATS: Mapping[str, tuple[RowFormat, RowFormat]] = {
    # name: (rows of the sliding window, rows of the compressed pools), each of values + scales
    "v4": (RowFormat(576 + 8, 576), RowFormat(576 + 8, 576)),
    "v41": (RowFormat(512 + 16, 512), RowFormat(512 + 16, 512)),
    "v41_fp4": (RowFormat(512 + 16, 512), RowFormat(256 + 32, 256)),
    "uniform_fp8": (RowFormat(512, 1), RowFormat(512, 1)),
}
"""As ``SGLANG_DSV4_KV_LAYOUT`` names them. ``v4``: 448 fp8 and 64 bf16, 7 scales and a byte of padding."""

INDEXER_SCALE_BYTES = 4
"""One fp32 for 128 fp8 values; four bytes of block scales for 128 fp4 values."""


@dataclass(frozen=True, slots=True)
class DeepSeekV4:
    """Layers of a DeepSeek-V4 or V4.1 model and the formats an engine keeps them in."""

    compress_ratios: tuple[int, ...]
    """Compression ratio of every decoder layer; a draft (MTP) layer's entry does not belong here."""
    window_tokens: int = 128
    index_head_dim: int = 128
    rows: str = "v4"
    """A name in ``ROW_FORMATS``."""
    source_layers: tuple[int, ...] = ()
    """Of V4.1: layers that keep rows and keys for themselves and those up to the next; ascending."""

    def __post_init__(self) -> None:
        ratios = frozenset(self.compress_ratios)
        if not (ratios <= _V4_RATIOS or ratios <= _V41_RATIOS):
            expected = f"among {sorted(_V4_RATIOS)} of V4 or {sorted(_V41_RATIOS)} of V4.1"
            raise LayoutError(f"compress_ratios must be {expected}, found {sorted(ratios)}")
        if not any(self.compress_ratios):
            raise LayoutError("compress_ratios must name a compressed layer, found none")
        self._check_sources()
        if self.rows not in ROW_FORMATS:
            raise LayoutError(f"rows must be one of {sorted(ROW_FORMATS)}, found {self.rows!r}")
        if self.index_head_dim <= 0 or self.index_head_dim % self.index_values_per_byte:
            raise LayoutError(f"index_head_dim must be positive and fill whole bytes, found {self.index_head_dim}")

    @property
    def has_sources(self) -> bool:
        """Whether it is of V4.1, where few layers keep rows for all."""
        return not _V4_RATIOS.issuperset(self.compress_ratios)

    @property
    def index_values_per_byte(self) -> int:
        """Values of an indexer key in a byte: fp8, of V4.1 fp4."""
        return 2 if self.has_sources else 1

    def _check_sources(self) -> None:
        """Check that every compressed layer of V4.1 has a source of its ratio, and that no layer of V4 needs one."""
        if not self.has_sources:
            if self.source_layers:
                raise LayoutError(f"ratios of V4 have no source_layers, found {self.source_layers}")
            return
        known = range(len(self.compress_ratios))
        if list(self.source_layers) != sorted(set(self.source_layers) & set(known)):
            raise LayoutError(f"source_layers must be ascending layers of {len(known)}, found {self.source_layers}")
        for layer, ratio in enumerate(self.compress_ratios):
            source = max((source for source in self.source_layers if source <= layer), default=None)
            if ratio and (source is None or self.compress_ratios[source] != ratio):
                raise LayoutError(f"layer {layer} of ratio {ratio} must have a source layer of it, found {source}")

    def check_page_size(self, page_size: int) -> None:
        """Raise LayoutError if anything would be pending at a page boundary, or a page would not hold windows."""
        multiples = [("ratio", RATIO_PAIR if self.has_sources else RATIO_HCA), ("window", self.window_tokens)]
        for name, value in multiples:
            if page_size <= 0 or value <= 0 or page_size % value:
                raise LayoutError(f"page_size must be a multiple of the {name} {value}, found {page_size}")

    @property
    def layers(self) -> Mapping[str, int]:
        """Layers that keep state in a pool, by its name; 0 for the anchor."""
        counts = Counter({"kv": 0})
        for layer, ratio in enumerate(self.compress_ratios):
            keeps_rows = not self.has_sources or layer in self.source_layers
            counts.update(pool for pool in _POOLS_OF_RATIO[ratio] if pool == "swa" or keeps_rows)
        return counts

    def layer_page_bytes(self, page_size: int) -> Mapping[str, int]:
        """Return the bytes of one page of one layer in each pool, by name, anchors first."""
        window_rows, compressed_rows = ROW_FORMATS[self.rows]
        key_bytes = self.index_head_dim // self.index_values_per_byte + INDEXER_SCALE_BYTES
        sizes = {"kv": 0}
        for ratio in (RATIO_LATENT, RATIO_PAIR) if self.has_sources else (RATIO_CSA, RATIO_HCA):
            rows, pool = page_size // ratio, f"deepseek_v4_c{ratio}"
            sizes[pool] = compressed_rows.page_bytes(rows)
            sizes[f"{pool}_indexer"] = rows * key_bytes
        sizes["swa"] = window_rows.page_bytes(page_size)
        sizes["deepseek_v4_c4_state"] = _STATE_VALUE_BYTES * HEAD_DIM
        sizes["deepseek_v4_c4_indexer_state"] = _STATE_VALUE_BYTES * self.index_head_dim
        return sizes

    def layout(self, page_size: int = PAGE_SIZE) -> ModelLayout:
        """Return the layout of these layers; errors as ``check_page_size``."""
        self.check_page_size(page_size)
        sizes = self.layer_page_bytes(page_size)
        layers = self.layers
        specs = {name: PoolSpec(name, layers[name] * sizes[name], replicated=True) for name in sizes if name in layers}
        window = tuple(specs.pop(name) for name in _WINDOW_POOLS if name in specs)
        components = (Full(tuple(specs.values())), SlidingWindow(self.window_tokens, page_size, window))
        return ModelLayout(page_size, components)
