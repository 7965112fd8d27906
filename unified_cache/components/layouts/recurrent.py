"""Models of recurrent layers (Mamba, gated delta net, lightning attention, short convolutions) beside attention.

A recurrent layer keeps the last inputs of its convolution, in the model's dtype, and its state, in fp32 unless the
configuration says otherwise, as ``mamba_utils.py`` of SGLang 0.5.23 and of vLLM 0.32 count them.
"""

from collections.abc import Mapping, Sequence

from unified_cache.components.layouts.attention import (
    FULL,
    PAGE_SIZE,
    LayersWithWindow,
    Rule,
    kv_row_bytes,
    layer_count,
    periodic,
    with_heads,
)
from unified_cache.components.layouts.fields import LAYERS_MAX, Fields
from unified_cache.components.layouts.sizes import Choice, LayerBytes, SizedLayout, value_bytes
from unified_cache.core.errors import LayoutError

LINEAR = "linear_attention"
BOTH = "hybrid"
"""A layer with attention and a recurrent part side by side."""

SPELLINGS: Mapping[str, str] = {
    FULL: FULL,
    LINEAR: LINEAR,
    BOTH: BOTH,
    "attention": FULL,
    "conv": LINEAR,
    "mamba": LINEAR,
    "moe": "moe",
    "mlp": "mlp",
}
"""Kinds of layers as configurations spell them, before and since transformers 5."""

NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}
"""``hybrid_override_pattern``; configuration_nemotron_h.py."""


def state_value_bytes(fields: Fields, name: str) -> int:
    """Return the bytes of one value of recurrent state."""
    return value_bytes(fields.text(name), name) if name in fields else 4


def convolution_bytes(channels: int, kernel: int, value_size: int) -> int:
    """Return the bytes of the inputs that a convolution looks back on: all of its kernel but the newest."""
    return channels * (kernel - 1) * value_size


def layer_kinds(fields: Fields, kinds_of: LayersWithWindow) -> list[str]:
    """Return the kinds of all layers: as ``layer_types`` or ``layers_block_type`` lists them, else ``kinds_of``."""
    layers = layer_count(fields)
    name = fields.one_of(("layer_types", "layers_block_type"))
    if name not in fields:
        return kinds_of(fields, layers)
    fields.of_layers(name, layers)
    return [SPELLINGS[each] for each in fields.texts(name, SPELLINGS)]


def all_linear(fields: Fields, layers: int) -> list[str]:
    """Make all layers recurrent."""
    return [LINEAR] * layers


def numbered(name: str) -> LayersWithWindow:
    """Return the kinds: full for the layers that ``name`` lists, recurrent for the others."""

    def kinds(fields: Fields, layers: int) -> list[str]:
        full = set(fields.numbers(name, range(layers))) if name in fields else set()
        return [FULL if number in full else LINEAR for number in range(layers)]

    return kinds


def delta_net(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Qwen3NextConfig or Qwen3_5(Moe)TextConfig: every fourth layer is full, the others a gated delta net."""
    kinds = layer_kinds(fields, periodic("full_attention_interval", 4, LINEAR))
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads {key_heads}")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    kernel = fields.count("linear_conv_kernel_dim")
    state = value_heads * key_dim * value_dim * state_value_bytes(fields, "mamba_ssm_dtype")
    layer_bytes = convolution_bytes(channels, kernel, choice.model_value_bytes) + state
    return _recurrent(fields, choice, kinds, layer_bytes)


def olmo_hybrid(fields: Fields, choice: Choice) -> SizedLayout:
    """Read OlmoHybridConfig: a gated delta net too, with heads that may be left out."""
    return delta_net(with_heads(fields), choice)


def lightning(fields: Fields, choice: Choice) -> SizedLayout:
    """Read MiniMaxConfig: lightning attention, whose state has a square of the head's dimension for each head."""
    name = "attn_type_list"
    if name in fields:  # as published: 1 for full attention
        fields.of_layers(name, layer_count(fields))
        kinds = [FULL if each else LINEAR for each in fields.numbers(name, (0, 1))]
    else:
        kinds = layer_kinds(fields, lambda _, layers: [LINEAR if number % 2 else FULL for number in range(layers)])
    known = with_heads(fields)
    heads, head_dim = known.count("num_attention_heads"), known.count("head_dim")
    # In the model's dtype: as linear_attention_state_dtype of vLLM 0.32.
    return _recurrent(known, choice, kinds, heads * head_dim * head_dim * choice.model_value_bytes)


def kimi_linear(fields: Fields, choice: Choice) -> SizedLayout:
    """Read KimiLinearConfig: Kimi delta attention, with one latent row per token in the full layers."""
    layers = layer_count(fields)
    known = fields
    kinds_of: LayersWithWindow = periodic("full_attention_interval", 4, LINEAR)
    if "linear_attn_config" in fields:  # as published
        linear = fields.inner("linear_attn_config")
        known = fields.with_defaults(
            {
                "linear_num_heads": linear.count("num_heads"),
                "linear_head_dim": linear.count("head_dim"),
                "linear_conv_kernel_dim": linear.count("short_conv_kernel_size"),
            }
        )
        full = {number - 1 for number in linear.numbers("full_attn_layers", range(1, layers + 1))}
        kinds_of = lambda _, count: [FULL if number in full else LINEAR for number in range(count)]  # noqa: E731
    kinds = layer_kinds(fields, kinds_of)
    heads, head_dim = known.count("linear_num_heads"), known.count("linear_head_dim")
    return _latent_between(known, choice, kinds, delta_bytes(known, choice, heads, head_dim, "linear_conv_kernel_dim"))


def delta_bytes(fields: Fields, choice: Choice, heads: int, head_dim: int, kernel: str) -> int:
    """Return the bytes that a layer of Kimi delta attention keeps; ``kernel`` names the field of its convolution."""
    convolution = convolution_bytes(3 * heads * head_dim, fields.count(kernel), choice.model_value_bytes)
    return convolution + heads * head_dim * head_dim * 4


def bailing_v2_5(fields: Fields, choice: Choice) -> SizedLayout:
    """Read the configuration of Bailing MoE v2.5: lightning attention, latent rows in each last layer of a group."""
    kinds = periodic("layer_group_size", 1, LINEAR)(fields, layer_count(fields))
    known = with_heads(fields)
    heads, head_dim = known.count("num_attention_heads"), known.count("head_dim")
    # In the model's dtype, as of ``lightning``.
    return _latent_between(known, choice, kinds, heads * head_dim * head_dim * choice.model_value_bytes)


def bailing_v3(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Bailing MoE v3: Kimi delta attention, latent rows in each last of a group and behind the last group."""
    layers, group = layer_count(fields), fields.count("layer_group_size")
    whole = layers // group * group
    kinds = periodic("layer_group_size", 1, LINEAR)(fields, whole) + [FULL] * (layers - whole)
    heads, head_dim = fields.count("num_attention_heads"), fields.count("head_dim")
    return _latent_between(
        fields, choice, kinds, delta_bytes(fields, choice, heads, head_dim, "short_conv_kernel_size")
    )


def _latent_between(fields: Fields, choice: Choice, kinds: Sequence[str], layer_bytes: int) -> SizedLayout:
    """Return the layout of layers with one latent row per token, or with recurrent state."""
    row = (fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")) * choice.kv_value_bytes
    rows = [{"kv": row} if kind == FULL else {"mamba": layer_bytes} for kind in kinds]
    return LayerBytes(rows, replicated=True).sized(fields.text("model_type"), choice.page(PAGE_SIZE), None)


def short_convolution(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Lfm2Config: layers that are a short convolution keep its last inputs and nothing else."""
    kinds = layer_kinds(fields, numbered("full_attn_idxs"))
    kernel = fields.count("conv_L_cache")
    layer_bytes = convolution_bytes(fields.count("hidden_size"), kernel, choice.model_value_bytes)
    return _recurrent(with_heads(fields), choice, kinds, layer_bytes)


def nemotron_kinds(fields: Fields) -> list[str]:
    """Return the kinds of all layers of a Nemotron-H."""
    name = fields.one_of(("layers_block_type", "layer_types", "hybrid_override_pattern"))
    if name == "hybrid_override_pattern":
        pattern = fields.text(name)
        if set(pattern) - set(NEMOTRON_LETTERS):
            raise fields.error(name, f"of the letters {' '.join(NEMOTRON_LETTERS)}")
        kinds = [NEMOTRON_LETTERS[letter] for letter in pattern]
    else:
        kinds = [SPELLINGS[each] for each in fields.texts(name, SPELLINGS)]
    if not 0 < len(kinds) <= LAYERS_MAX:
        raise fields.error(name, f"1 to {LAYERS_MAX} layers")
    if "num_hidden_layers" in fields and layer_count(fields) != len(kinds):
        raise fields.error("num_hidden_layers", f"{len(kinds)}, as {name} has")
    return kinds


def nemotron_h(fields: Fields, choice: Choice) -> SizedLayout:
    """Read NemotronHConfig: Mamba 2, attention and feed-forward parts are layers of their own."""
    kinds = nemotron_kinds(fields)
    # The first published ones call it attention_head_dim; it is not hidden_size over heads.
    known = fields.with_defaults({"head_dim": fields.count(fields.one_of(("head_dim", "attention_head_dim")))})
    heads, head_dim = fields.count("mamba_num_heads"), fields.count("mamba_head_dim")
    return _recurrent(known, choice, kinds, mamba2_bytes(fields, choice, heads, head_dim))


def mamba2_bytes(fields: Fields, choice: Choice, heads: int, head_dim: int) -> int:
    """Return the bytes that a Mamba 2 layer keeps."""
    state_size = fields.count(fields.one_of(("ssm_state_size", "mamba_d_state", "state_size")))
    groups = fields.count(fields.one_of(("n_groups", "mamba_n_groups", "mamba_ngroups")))
    if heads % groups:
        raise fields.error("mamba_num_heads", f"a multiple of n_groups {groups}")
    channels = heads * head_dim + 2 * groups * state_size
    kernel = fields.count(fields.one_of(("conv_kernel", "mamba_d_conv")))
    state = heads * head_dim * state_size * state_value_bytes(fields, "mamba_ssm_cache_dtype")
    return convolution_bytes(channels, kernel, choice.model_value_bytes) + state


def mamba2_heads(fields: Fields) -> tuple[int, int]:
    """Return heads and their dimension of a Mamba 2 layer of IBM's, Zyphra's or TII's; "auto" shares the width out."""
    heads = fields.count(fields.one_of(("mamba_n_heads", "n_mamba_heads", "num_heads")))
    width = fields.count(
        "mamba_d_ssm",
        default=fields.count("hidden_size") * fields.count(fields.one_of(("mamba_expand", "expand")), default=2),
    )
    name = fields.one_of(("mamba_d_head", "mamba_headdim"))
    if name not in fields or fields.holds(name, "auto"):
        if width % heads:
            raise fields.error("mamba_n_heads", f"a divisor of the width {width}")
        return heads, width // heads
    return heads, fields.count(name)


def with_mamba2(kinds_of: LayersWithWindow) -> Rule:
    """Make the rule of models whose layers are Mamba 2, attention, or both side by side, as their kinds say."""

    def rule(fields: Fields, choice: Choice) -> SizedLayout:
        kinds = layer_kinds(fields, kinds_of)
        attention = fields.with_synonyms({"head_dim": ("attention_head_dim",)})
        return _recurrent(with_heads(attention), choice, kinds, mamba2_bytes(fields, choice, *mamba2_heads(fields)))

    return rule


def zamba2(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Zamba2Config: Mamba 2 in every layer, and beside it in some an attention of twice the width."""
    heads = fields.count("num_attention_heads")
    head_dim, rest = divmod(2 * fields.count("hidden_size"), heads)
    if rest:
        raise fields.error("hidden_size", f"a multiple of half of num_attention_heads {heads}")
    if "layers_block_type" not in fields and "layer_types" not in fields:
        raise fields.error("layers_block_type", "a list with the kind of each layer")
    # What is published as kv_channels is half of what K and V have.
    known = fields.with_values({"head_dim": head_dim, "attention_head_dim": head_dim})
    return with_mamba2(all_linear)(known, choice)


def falcon_h1(fields: Fields, choice: Choice) -> SizedLayout:
    """Read FalconH1Config: attention and Mamba 2 side by side in every layer."""
    return with_mamba2(lambda _, layers: [BOTH] * layers)(fields, choice)


def jamba(fields: Fields, choice: Choice) -> SizedLayout:
    """Read JambaConfig: Mamba layers, and a full one in each ``attn_layer_period``."""
    period, offset = fields.count("attn_layer_period"), fields.number("attn_layer_offset", default=0)
    if offset >= period:
        raise fields.error("attn_layer_offset", f"less than attn_layer_period {period}")
    kinds = [FULL if number % period == offset else LINEAR for number in range(layer_count(fields))]
    width = fields.count("hidden_size") * fields.count("mamba_expand")
    layer_bytes = mamba_bytes(fields, choice, width, ("mamba_d_state", "mamba_d_conv"))
    return _recurrent(with_heads(fields), choice, kinds, layer_bytes)


def mamba_bytes(fields: Fields, choice: Choice, width: int, names: tuple[str, str]) -> int:
    """Return the bytes that a Mamba layer of so many channels keeps; ``names`` are state size and kernel."""
    state_size, kernel = (fields.count(name) for name in names)
    state = width * state_size * state_value_bytes(fields, "mamba_ssm_cache_dtype")
    return convolution_bytes(width, kernel, choice.model_value_bytes) + state


def mamba(fields: Fields, choice: Choice) -> SizedLayout:
    """Read MambaConfig or FalconMambaConfig: recurrent layers alone."""
    width = fields.count("intermediate_size", default=2 * fields.count("hidden_size"))
    layer_bytes = mamba_bytes(fields, choice, width, ("state_size", "conv_kernel"))
    return _stateful(fields, choice, all_linear(fields, layer_count(fields)), {}, layer_bytes)


def mamba2(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Mamba2Config: recurrent layers alone."""
    layer_bytes = mamba2_bytes(fields, choice, fields.count("num_heads"), fields.count("head_dim"))
    return _stateful(fields, choice, all_linear(fields, layer_count(fields)), {}, layer_bytes)


def _recurrent(fields: Fields, choice: Choice, kinds: Sequence[str], layer_bytes: int) -> SizedLayout:
    if not {FULL, BOTH} & set(kinds):
        raise LayoutError(f"{fields.text('model_type')} must have a full-attention layer, found none")
    return _stateful(fields, choice, kinds, {"kv": kv_row_bytes(fields, choice)}, layer_bytes)


def _stateful(
    fields: Fields, choice: Choice, kinds: Sequence[str], attention: Mapping[str, int], layer_bytes: int
) -> SizedLayout:
    state = {"mamba": layer_bytes}
    kept: Mapping[str, Mapping[str, int]] = {FULL: attention, LINEAR: state, BOTH: {**attention, **state}}
    layers = [kept.get(kind, {}) for kind in kinds]
    return LayerBytes(layers).sized(fields.text("model_type"), choice.page(PAGE_SIZE), None)
