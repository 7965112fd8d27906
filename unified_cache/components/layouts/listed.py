"""Models of attention whose configuration says of each layer, or of each pass through the layers, what it keeps."""

from collections.abc import Sequence

from unified_cache.components.layouts.attention import (
    CHUNKED,
    FULL,
    PAGE_SIZE,
    SLIDING,
    hybrid,
    kv_row_bytes,
    layer_count,
    layer_types,
    one_window,
    plain,
    with_heads,
)
from unified_cache.components.layouts.deepseek import latent
from unified_cache.components.layouts.fields import LAYERS_MAX, Fields
from unified_cache.components.layouts.sizes import Choice, LayerBytes, SizedLayout
from unified_cache.errors import LayoutError

__all__ = ["chunked", "decilm", "hrm_text", "looped", "pangu_v2", "plamo3", "step3_text"]

LISTED_WINDOWS = "interleaved_sliding_window"


def chunked(fields: Fields, choice: Choice) -> SizedLayout:
    """Read the configuration of Rnj-1: full layers, and such that attend within a chunk and the one before it.

    ``sliding_window`` counts the tokens of both, as vLLM 0.32 has it; they are kept as a window.
    """
    kinds = layer_types(fields, layer_count(fields), window=CHUNKED)
    return hybrid(with_heads(fields), choice, kinds, one_window(fields, "sliding_window", kinds))


def step3_text(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Step3TextConfig: full attention, with one head of K and V for all (MFA)."""
    fields.count("head_dim")
    return plain(fields.with_values({"num_key_value_heads": 1}), choice)


def listed_windows(fields: Fields, layers: int) -> tuple[list[str], int | None]:
    """Return the kinds of all layers and their window, from one number or a list that has null for full layers.

    A list that is shorter than the model is gone through again and again.

    Raises:
        LayoutError: it is neither, or has windows of several sizes.
    """
    if LISTED_WINDOWS not in fields:
        return [FULL] * layers, None
    found = fields.values[LISTED_WINDOWS]
    windows: Sequence[object] = found if isinstance(found, list) else [found]
    sizes = {each for each in windows if each is not None}
    if len(sizes) > 1 or any(type(each) is not int or each <= 0 for each in sizes) or not windows:
        raise fields.error(LISTED_WINDOWS, "a window, or a list of one window and of null")
    kinds = [FULL if windows[number % len(windows)] is None else SLIDING for number in range(layers)]
    (size,) = sizes or {None}
    return kinds, size if isinstance(size, int) else None


def plamo3(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Plamo3Config, which lists a window or null for each layer."""
    layers = layer_count(fields)
    fields.of_layers(LISTED_WINDOWS, layers)
    kinds, window_tokens = listed_windows(fields, layers)
    if "layer_types" in fields and layer_types(fields, layers) != kinds:
        raise fields.error("layer_types", f"what {LISTED_WINDOWS} says")
    fields.count("head_dim")
    return hybrid(with_heads(fields), choice, kinds, window_tokens)


def pangu_v2(fields: Fields, choice: Choice) -> SizedLayout:
    """Read the configuration of openPangu Pro MoE v2: latent rows, or heads whose keys are wider than their values.

    The sinks that such heads have beside the tokens are weights, alike for all prompts.
    """
    if "kv_lora_rank" in fields:
        return latent(fields, choice)
    known = fields
    if "param_sink_number" in fields:
        dimensions = {
            "head_dim": fields.count("qk_nope_dim") + fields.count("qk_rope_dim"),
            "v_head_dim": fields.count("v_channels"),
        }
        known = fields.with_values(dimensions)
    kinds, window_tokens = listed_windows(fields, layer_count(fields))
    return hybrid(with_heads(known), choice, kinds, window_tokens)


def looped(fields: Fields, choice: Choice) -> SizedLayout:
    """Read the configuration of IQuest LoopCoder: the layers are passed ``loop_num`` times, each pass keeps its own.

    The first pass attends to all tokens, the others to a window.
    """
    layers = layer_count(fields)
    loops = fields.count("loop_num", default=2)
    if layers * loops > LAYERS_MAX:
        raise fields.error("loop_num", f"at most {LAYERS_MAX} layers in all passes together")
    row = kv_row_bytes(with_heads(fields), choice)
    rows = [{"kv": row}] * layers + [{"swa": row}] * (layers * (loops - 1))
    window_tokens = fields.count("loop_window_size", default=64) if loops > 1 else None
    return LayerBytes(rows).sized(fields.text("model_type"), choice.page(PAGE_SIZE), window_tokens)


def hrm_text(fields: Fields, choice: Choice) -> SizedLayout:
    """Read HrmTextConfig: two stacks that are passed again and again, each pass with K and V of its own.

    Raises:
        LayoutError: tokens of a prompt see those behind them (``prefix_lm``), so no prefix of it can be cached.
    """
    if not fields.holds("prefix_lm", False):
        raise fields.error("prefix_lm", "false, since a prefix of a model that looks ahead cannot be cached")
    passes = fields.count("H_cycles", default=2) * (fields.count("L_cycles", default=3) + 1)
    # Where the one is there, the other is the product already; configuration_hrm_text.py.
    name = "num_layers_per_stack" if "num_layers_per_stack" in fields else "num_hidden_layers"
    layers = fields.count(name, most=LAYERS_MAX // passes) * passes
    fields.count("head_dim")
    return plain(fields.with_values({"num_hidden_layers": layers}), choice)


def decilm(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DeciLMConfig of Nemotron-NAS: each block has heads of its own number, or no attention.

    The first DeciLM lists heads alone, in ``num_key_value_heads_per_layer``.
    """
    layers = layer_count(fields)
    query_heads = fields.count("num_attention_heads")
    known = with_heads(fields.with_values({"num_key_value_heads": query_heads}))
    heads = _heads_of_blocks(fields, layers, query_heads)
    rows = [
        {"kv": kv_row_bytes(known.with_values({"num_key_value_heads": count}), choice)} if count else {}
        for count in heads
    ]
    if not any(heads):
        raise LayoutError(f"{fields.text('model_type')} must have a layer with attention, found none")
    return LayerBytes(rows).sized(fields.text("model_type"), choice.page(PAGE_SIZE), None)


def _heads_of_blocks(fields: Fields, layers: int, query_heads: int) -> list[int]:
    """Return the heads of K and V of each layer; 0 for one without attention."""
    if "block_configs" not in fields:
        name = "num_key_value_heads_per_layer"
        fields.of_layers(name, layers)
        return fields.numbers(name, range(1, query_heads + 1))
    found: list[int] = []
    fields.of_layers("block_configs", layers)
    for block in fields.objects("block_configs"):
        attention = block.inner("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            found.append(0)
            continue
        group = attention.count("n_heads_in_group")
        if query_heads % group:
            raise attention.error("n_heads_in_group", f"a divisor of num_attention_heads {query_heads}")
        found.append(query_heads // group)
    return found
