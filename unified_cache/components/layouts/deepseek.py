"""DeepSeek models: one latent row per token, sparse-attention indexers, and the compressed pools of V4."""

from collections.abc import Callable, Mapping

from unified_cache.components.deepseek_v4 import (
    HEAD_DIM,
    PAGE_SIZE,
    RATIO_CSA,
    RATIO_HCA,
    RATIO_SWA,
    ROW_FORMATS,
    DeepSeekV4,
)
from unified_cache.components.layouts.attention import layer_count
from unified_cache.components.layouts.fields import Fields
from unified_cache.components.layouts.sizes import DTYPE_BYTES, Choice, LayerBytes, SizedLayout, value_bytes
from unified_cache.errors import LayoutError

__all__ = ["DEEPSEEK_READERS"]

DSA_PAGE_SIZE = 64
"""Tokens per page of the sparse-attention kernels of V3.2; model_overrides/deepseek_v2.py of SGLang 0.5.23."""

SCALE_BYTES = 4
"""One fp32 per block of fp8 values."""
SCALED_VALUES = 128
"""Values that share a scale."""
ROPE_VALUE_BYTES = 2
"""The rotary part stays in bf16 where the rest is scaled fp8."""

RAW_FP8 = "fp8_raw"
"""One byte per value and no scales, as the TensorRT-LLM kernels keep it."""

RATIO_OF_LAYER_TYPE = {
    "sliding_attention": RATIO_SWA,
    "compressed_sparse_attention": RATIO_CSA,
    "heavily_compressed_attention": RATIO_HCA,
}
"""configuration_deepseek_v4.py."""


def latent_row_bytes(fields: Fields, choice: Choice, *, scaled: bool) -> int:
    """Return the bytes of one token's latent and rotary part; ``scaled`` where fp8 comes with scales."""
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    if choice.dtype == RAW_FP8:
        return rank + rope
    size = choice.kv_value_bytes
    if size == 1 and scaled:
        if rank % SCALED_VALUES:
            raise fields.error("kv_lora_rank", f"a multiple of {SCALED_VALUES} for fp8 with scales")
        return rank + rank // SCALED_VALUES * SCALE_BYTES + rope * ROPE_VALUE_BYTES
    return (rank + rope) * size


def deepseek_v3(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeepseekV3Config: full attention over one latent row per token."""
    rows = [{"kv": latent_row_bytes(fields, choice, scaled=False)}] * layer_count(fields)
    return LayerBytes(rows, replicated=True).sized(fields.text("model_type"), choice.page(DSA_PAGE_SIZE), None)


def deepseek_v32(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeepseekV32Config: as V3, and an indexer of fp8 keys with a scale in every layer."""
    layers = layer_count(fields)
    if "layer_types" in fields:
        fields.texts("layer_types", ("indexed_attention", "full_attention"))
        fields.of_layers("layer_types", layers)
    page_size = choice.page(DSA_PAGE_SIZE)
    if page_size % DSA_PAGE_SIZE:
        raise LayoutError(f"page_size of a sparse-attention model must be a multiple of 64, found {page_size}")
    key = fields.count("index_head_dim")
    if key % SCALED_VALUES:
        raise fields.error("index_head_dim", f"a multiple of {SCALED_VALUES}")
    row = {
        "kv": latent_row_bytes(fields, choice, scaled=True),
        "indexer": key + key // SCALED_VALUES * SCALE_BYTES,
    }
    return LayerBytes([row] * layers, replicated=True).sized(fields.text("model_type"), page_size, None)


def compress_ratios(fields: Fields) -> tuple[int, ...]:
    """Return the ratio of every decoder layer.

    ``compress_ratios`` goes on with those of draft (MTP) layers, which are no layers of the cache.
    """
    layers = layer_count(fields)
    drafts = fields.number("num_nextn_predict_layers", default=1)
    found: list[list[int]] = []
    if "compress_ratios" in fields:
        fields.of_layers("compress_ratios", layers, drafts)
        found.append(fields.numbers("compress_ratios", tuple(RATIO_OF_LAYER_TYPE.values()))[:layers])
    if "layer_types" in fields:
        fields.of_layers("layer_types", layers, drafts)
        names = fields.texts("layer_types", RATIO_OF_LAYER_TYPE)[:layers]
        found.append([RATIO_OF_LAYER_TYPE[name] for name in names])
    if not found:
        raise fields.error("compress_ratios", "a list with a ratio per layer")
    if found[0] != found[-1]:
        raise fields.error("compress_ratios", "what layer_types says")
    return tuple(found[0])


def deepseek_v4(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeepseekV4Config. ``Choice.dtype`` names a row format; any fp8 stands for the default one."""
    for name, expected in (("head_dim", HEAD_DIM), ("num_key_value_heads", 1), ("qk_rope_head_dim", 64)):
        if name in fields and fields.count(name) != expected:
            raise fields.error(name, f"{expected}, which the row formats are made for")
    if "compress_rates" in fields:
        rates = fields.inner("compress_rates")
        for name in rates.values:
            if not rates.holds(name, RATIO_OF_LAYER_TYPE.get(name)):
                raise rates.error(name, f"one of {RATIO_OF_LAYER_TYPE}")
    rows = choice.dtype or "v4"
    if rows in DTYPE_BYTES and value_bytes(rows, "dtype") == 1:
        rows = "v4"
    if rows not in ROW_FORMATS:
        raise LayoutError(f"dtype of DeepSeek-V4 must be fp8 or one of {', '.join(ROW_FORMATS)}, found {rows!r}")
    model = DeepSeekV4(
        compress_ratios(fields),
        window_tokens=fields.count("sliding_window"),
        index_head_dim=fields.count("index_head_dim"),
        rows=rows,
    )
    layout = model.layout(choice.page(PAGE_SIZE))
    return SizedLayout(fields.text("model_type"), layout, model.window_tokens)


DEEPSEEK_READERS: Mapping[str, Callable[[Fields, Choice], SizedLayout]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "deepseek_v4": deepseek_v4,
}
"""Layout function of each ``model_type``."""
