"""Models of recurrent layers (Mamba 2, gated delta net) with full-attention ones between them.

A recurrent layer keeps the last inputs of its convolution, in the model's dtype, and its state, in fp32 unless the
configuration says otherwise, as ``mamba_utils.py`` of SGLang 0.5.23 counts them.
"""

from collections.abc import Callable, Mapping

from unified_cache.components.layouts.attention import PAGE_SIZE, kv_row_bytes, layer_count
from unified_cache.components.layouts.fields import LAYERS_MAX, Fields
from unified_cache.components.layouts.sizes import Choice, LayerBytes, SizedLayout, value_bytes
from unified_cache.errors import LayoutError

__all__ = ["RECURRENT_READERS"]

FULL = "full_attention"
LINEAR = "linear_attention"

NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}
"""``hybrid_override_pattern``; configuration_nemotron_h.py."""

NEMOTRON_TYPES = {"mamba": LINEAR, "attention": FULL} | {kind: kind for kind in NEMOTRON_LETTERS.values()}
"""``layers_block_type``, as saved before and since transformers 5."""


def state_value_bytes(fields: Fields, name: str) -> int:
    """Return the bytes of one value of recurrent state."""
    return value_bytes(fields.text(name), name) if name in fields else 4


def convolution_bytes(channels: int, kernel: int, value_size: int) -> int:
    """Return the bytes of the inputs that a convolution looks back on: all of its kernel but the newest."""
    return channels * (kernel - 1) * value_size


def qwen3_next(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Qwen3NextConfig or Qwen3_5(Moe)TextConfig: every fourth layer is full, the others a gated delta net."""
    layers = layer_count(fields)
    if "layer_types" in fields:
        kinds = fields.texts("layer_types", (FULL, LINEAR))
        fields.of_layers("layer_types", layers)
    else:
        period = fields.count("full_attention_interval", default=4)
        kinds = [LINEAR if (number + 1) % period else FULL for number in range(layers)]
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads {key_heads}")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    kernel = fields.count("linear_conv_kernel_dim")
    state = value_heads * key_dim * value_dim * state_value_bytes(fields, "mamba_ssm_dtype")
    return _recurrent(fields, choice, kinds, convolution_bytes(channels, kernel, choice.model_value_bytes) + state)


def nemotron_kinds(fields: Fields) -> list[str]:
    """Return the kinds of all layers of a Nemotron-H."""
    name = fields.one_of(("layers_block_type", "layer_types", "hybrid_override_pattern"))
    if name == "hybrid_override_pattern":
        pattern = fields.text(name)
        if set(pattern) - set(NEMOTRON_LETTERS):
            raise fields.error(name, f"of the letters {' '.join(NEMOTRON_LETTERS)}")
        kinds = [NEMOTRON_LETTERS[letter] for letter in pattern]
    else:
        kinds = [NEMOTRON_TYPES[each] for each in fields.texts(name, NEMOTRON_TYPES)]
    if not 0 < len(kinds) <= LAYERS_MAX:
        raise fields.error(name, f"1 to {LAYERS_MAX} layers")
    if "num_hidden_layers" in fields and layer_count(fields) != len(kinds):
        raise fields.error("num_hidden_layers", f"{len(kinds)}, as {name} has")
    return kinds


def nemotron_h(fields: Fields, choice: Choice) -> SizedLayout:
    """Read NemotronHConfig: Mamba 2, attention and feed-forward parts are layers of their own."""
    kinds = nemotron_kinds(fields)
    heads, head_dim = fields.count("mamba_num_heads"), fields.count("mamba_head_dim")
    state_size = fields.count("ssm_state_size")
    groups = fields.count(fields.one_of(("n_groups", "mamba_n_groups")))
    if heads % groups:
        raise fields.error("mamba_num_heads", f"a multiple of n_groups {groups}")
    channels = heads * head_dim + 2 * groups * state_size
    kernel = fields.count(fields.one_of(("conv_kernel", "mamba_d_conv")))
    state = heads * head_dim * state_size * state_value_bytes(fields, "mamba_ssm_cache_dtype")
    # The first published ones call it attention_head_dim; it is not hidden_size over heads.
    known = fields.with_defaults({"head_dim": fields.count(fields.one_of(("head_dim", "attention_head_dim")))})
    return _recurrent(known, choice, kinds, convolution_bytes(channels, kernel, choice.model_value_bytes) + state)


def _recurrent(fields: Fields, choice: Choice, kinds: list[str], layer_bytes: int) -> SizedLayout:
    architecture = fields.text("model_type")
    if FULL not in kinds:
        raise LayoutError(f"{architecture} must have a full-attention layer, found none")
    kept = {FULL: {"kv": kv_row_bytes(fields, choice.kv_value_bytes)}, LINEAR: {"mamba": layer_bytes}}
    return LayerBytes([kept.get(kind, {}) for kind in kinds]).sized(architecture, choice.page(PAGE_SIZE), None)


RECURRENT_READERS: Mapping[str, Callable[[Fields, Choice], SizedLayout]] = {
    "nemotron_h": nemotron_h,
    "qwen3_5_moe_text": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_next": qwen3_next,
}
"""Layout function of each ``model_type`` of the text model."""
