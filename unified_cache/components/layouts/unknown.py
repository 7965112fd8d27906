"""Architectures that no family has: laid out as attention where their fields speak of nothing else, or refused."""

import re
from collections.abc import Collection

from unified_cache.components.layouts.attention import FULL, Rule, no_layer, plain, windowed
from unified_cache.components.layouts.deepseek import latent
from unified_cache.components.layouts.fields import Fields
from unified_cache.components.layouts.sizes import SizedLayout
from unified_cache.core.errors import LayoutError, did_you_mean

__all__ = ["check_decoder", "rule_of_fields", "what_is_assumed"]

OTHER_STATE = re.compile(
    r".*(mamba|ssm|rwkv|lightning|recurrent|time_mix|state_size|compress|conv|cross_attention|sparse_attention)"
    r"|.*(cycles|loop_num|param_sink).*"
    r"|(linear_|attn_layer_|index_|hybrid_|wkv).*"
    r"|(full_attn_idxs|attn_type_list|block_configs|layers_block_type|num_kv_shared_layers|expand)$"
)
"""Names of fields that mean state other than K and V of each layer's own, or of layers that differ."""

DECODER_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def check_decoder(fields: Fields) -> None:
    """Refuse a configuration of an encoder, or of one together with a decoder.

    Raises:
        LayoutError: it is that.
    """
    if fields.flag("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", "false: a decoder alone keeps a prefix")
    classes = (
        [item for item in fields.items("architectures") if isinstance(item, str)] if ("architectures" in fields) else []
    )
    if classes and not any(name.endswith(DECODER_ENDINGS) for name in classes):
        raise fields.error("architectures", f"a decoder's, whose name ends with {' or '.join(DECODER_ENDINGS)}")


def rule_of_fields(fields: Fields) -> Rule:
    """Return the rule that the fields of an unknown architecture speak for.

    Raises:
        LayoutError: some of them mean state that is not attention's; the message names the first of them.
    """
    telling = sorted(name for name in fields.values if name in fields and OTHER_STATE.match(name))
    if telling:
        raise LayoutError(
            f"{fields.path}model_type must be one that is known, found {fields.text('model_type')!r}, whose field "
            f"{telling[0]} means more than plain attention; give --layers, --heads and --head-dim if it is not so"
        )
    if "kv_lora_rank" in fields:
        if "layer_types" in fields:
            fields.texts("layer_types", (FULL,))
        return latent
    return windowed(no_layer) if "layer_types" in fields else plain


def what_is_assumed(fields: Fields, sized: SizedLayout, known: Collection[str]) -> str:
    """Return a sentence that says how an unknown architecture was laid out, and by which fields."""
    name = fields.text("model_type")
    layers = ", ".join(f"{count} in {pool}" for pool, count in sized.layers.items() if count)
    kind = "latent rows" if "kv_lora_rank" in fields else "plain attention"
    ignored = ""
    if "sliding_window" in fields and "layer_types" not in fields:
        ignored = "; its sliding_window is left out, since layer_types does not say which layers have it"
    close = did_you_mean(name, known)
    return f"model_type {name!r} is not known, and was laid out as {kind}, layers {layers}{ignored}{close}"
