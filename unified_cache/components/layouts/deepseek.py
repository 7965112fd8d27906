"""Models of latent attention: one row per token, sparse-attention indexers, and the compressed pools of DeepSeek-V4."""

from unified_cache.components.deepseek_v4 import (
    HEAD_DIM,
    PAGE_SIZE,
    RATIO_CSA,
    RATIO_HCA,
    RATIO_LATENT,
    RATIO_PAIR,
    RATIO_SWA,
    ROW_FORMATS,
    DeepSeekV4,
)
from unified_cache.components.layouts.attention import layer_count
from unified_cache.components.layouts.fields import LAYERS_MAX, Fields
from unified_cache.components.layouts.sizes import DTYPE_BYTES, Choice, LayerBytes, SizedLayout, value_bytes
from unified_cache.core.errors import LayoutError

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


def latent(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeepseekV2Config, DeepseekV3Config or one like them: full attention over one latent row per token."""
    return _latent_rows(fields, choice, layer_count(fields))


def longcat(fields: Fields, choice: Choice) -> SizedLayout:
    """Read LongcatFlashConfig: latent attention, twice in each of ``num_layers``."""
    return _latent_rows(fields, choice, 2 * fields.count("num_layers", most=LAYERS_MAX // 2))


def _latent_rows(fields: Fields, choice: Choice, layers: int) -> SizedLayout:
    rows = [{"kv": latent_row_bytes(fields, choice, scaled=False)}] * layers
    return LayerBytes(rows, replicated=True).sized(fields.text("model_type"), choice.page(DSA_PAGE_SIZE), None)


def indexing_layers(fields: Fields, layers: int) -> list[bool]:
    """Return for each layer whether it has its own indexer; the others use the choice of the one before."""
    if "indexer_types" in fields:
        fields.of_layers("indexer_types", layers)
        return [each == "full" for each in fields.texts("indexer_types", ("full", "shared"))]
    if "index_topk_pattern" in fields:
        pattern = fields.text("index_topk_pattern")
        if len(pattern) != layers or set(pattern) - {"F", "S"}:
            raise fields.error("index_topk_pattern", f"{layers} of the letters F and S")
        return [letter == "F" for letter in pattern]
    # As configuration_glm_moe_dsa.py derives them; of DeepSeek-V3.2 each layer has one.
    period = fields.count("index_topk_freq", default=1)
    offset = fields.number("index_skip_topk_offset", default=2)
    return [max(number - offset + 1, 0) % period == 0 for number in range(layers)]


def indexed(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeepseekV32Config or GlmMoeDsaConfig: latent rows, and an indexer of fp8 keys with a scale."""
    layers = layer_count(fields)
    if "layer_types" in fields:
        fields.texts("layer_types", ("indexed_attention", "deepseek_sparse_attention", "full_attention"))
        fields.of_layers("layer_types", layers)
    page_size = choice.page(DSA_PAGE_SIZE)
    if page_size % DSA_PAGE_SIZE:
        raise LayoutError(f"page_size of a sparse-attention model must be a multiple of 64, found {page_size}")
    key = fields.count("index_head_dim")
    if key % SCALED_VALUES:
        raise fields.error("index_head_dim", f"a multiple of {SCALED_VALUES}")
    row = {"kv": latent_row_bytes(fields, choice, scaled=True)}
    indexer = {"indexer": key + key // SCALED_VALUES * SCALE_BYTES}
    rows = [{**row, **indexer} if has_own else row for has_own in indexing_layers(fields, layers)]
    return LayerBytes(rows, replicated=True).sized(fields.text("model_type"), page_size, None)


def hy_v4(fields: Fields, choice: Choice) -> SizedLayout:
    """Read HYV4Config: as ``indexed``; a layer that it calls full has no indexer, so all have to be sparse."""
    if "layer_types" in fields:
        fields.texts("layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    return indexed(fields, choice)


def compress_ratios(fields: Fields) -> tuple[int, ...]:
    """Return the ratio of every decoder layer; ``compress_ratios`` goes on with those of draft (MTP) layers."""
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


def row_format(fields: Fields, choice: Choice) -> str:
    """Return the row format that ``Choice.dtype`` names; any fp8 means the default one."""
    for name, expected in (("head_dim", HEAD_DIM), ("num_key_value_heads", 1), ("qk_rope_head_dim", 64)):
        if name in fields and fields.count(name) != expected:
            raise fields.error(name, f"{expected}, which the row formats are made for")
    rows = choice.dtype or "v4"
    if rows in DTYPE_BYTES and value_bytes(rows, "dtype") == 1:
        rows = "v4"
    if rows not in ROW_FORMATS:
        raise LayoutError(f"dtype of DeepSeek-V4 must be fp8 or one of {', '.join(ROW_FORMATS)}, found {rows!r}")
    return rows


def deepseek_v4(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeepseekV4Config."""
    rows = row_format(fields, choice)
    if "compress_rates" in fields:
        rates = fields.inner("compress_rates")
        for name in rates.values:
            if not rates.holds(name, RATIO_OF_LAYER_TYPE.get(name)):
                raise rates.error(name, f"one of {RATIO_OF_LAYER_TYPE}")
    model = DeepSeekV4(
        compress_ratios(fields),
        window_tokens=fields.count("sliding_window"),
        index_head_dim=fields.count("index_head_dim"),
        rows=rows,
    )
    layout = model.layout(choice.page(PAGE_SIZE))
    return SizedLayout(fields.text("model_type"), layout, model.layers, model.window_tokens)


def deepseek_v41(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeepseekV41Config or its text model's: ratios 0, 1 and 2, of which few layers keep rows for all."""
    rows = row_format(fields, choice)
    layers = layer_count(fields)
    fields.of_layers("compress_ratios", layers, fields.number("num_nextn_predict_layers", default=0))
    ratios = fields.numbers("compress_ratios", (RATIO_SWA, RATIO_LATENT, RATIO_PAIR))[:layers]
    model = DeepSeekV4(
        tuple(ratios),
        window_tokens=fields.count("sliding_window"),
        index_head_dim=fields.count("index_head_dim"),
        rows=rows,
        source_layers=tuple(fields.numbers("kv_source_layer_ids", range(layers))),
    )
    layout = model.layout(choice.page(PAGE_SIZE))
    return SizedLayout(fields.text("model_type"), layout, model.layers, model.window_tokens)
