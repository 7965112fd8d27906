"""From a Hugging Face ``config.json`` to the layout of what the model keeps.

Field names and defaults are those of the configuration classes of transformers 5 and of the configurations that
were published before it. Which rule reads an architecture is in ``families``; what is in none of them is laid out as
attention where its fields speak of nothing else, or refused.
"""

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from unified_cache.components.layouts.attention import FULL, Rule, no_layer, plain, windowed
from unified_cache.components.layouts.deepseek import latent
from unified_cache.components.layouts.families import RULES, SYNONYMS, WRAPPERS, class_of
from unified_cache.components.layouts.fields import Fields, read_config
from unified_cache.components.layouts.sizes import AUTO, DTYPE_DEFAULT, Choice, SizedLayout
from unified_cache.core.errors import LayoutError, did_you_mean
from unified_cache.core.pool import ModelLayout

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where a multimodal model has the configuration of its text model; the first that is there."""
DRAFT_LAYERS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "num_mtp_layers",
    "num_mtp_modules",
)
"""Numbers of draft layers for speculative decoding: of DeepSeek, GLM and Step, of Qwen, of Megatron, of MiniMax."""
ATTENTION_POOLS = frozenset({"kv", "swa"})
"""Pools of layers of attention, as draft layers are."""
NESTED_MAX = 3
"""Most configurations that are read within one another."""
OTHER_STATE = re.compile(
    r".*(mamba|ssm|rwkv|lightning|recurrent|time_mix|state_size|compress|conv|cross_attention|sparse_attention)"
    r"|.*(cycles|loop_num|param_sink).*"
    r"|(linear_|attn_layer_|index_|hybrid_|wkv).*"
    r"|(full_attn_idxs|attn_type_list|block_configs|layers_block_type|num_kv_shared_layers|expand)$"
)
"""Names of fields that mean state other than K and V of each layer's own, or of layers that differ."""

KEPT_DTYPES = {"FP8": "fp8", "INT8": "int8", "NVFP4": "nvfp4"}
"""Names of what K and V are kept in, in a quantised checkpoint's configuration."""

DECODER_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


class LayoutWarning(UserWarning):
    """An architecture is not known, and its layout was made of what its configuration says of attention."""


def from_hf_config(
    config: Mapping[str, object] | str | Path, *, page_size: int | None = None, dtype: str | None = None
) -> ModelLayout:
    """Return the layout of a model, given its configuration as a mapping, a JSON file or a model directory.

    ``page_size`` is in tokens; None for the architecture's usual. ``dtype`` is what K and V are kept in; None for
    what the configuration says. DeepSeek-V4 takes a row format there (``deepseek_v4.ROW_FORMATS``). An architecture
    that is not known, and has fields of plain attention, is laid out as that, with a ``LayoutWarning``.

    Raises:
        LayoutError: the architecture is unknown and keeps more than attention, or a field is missing, senseless or
            contradicts another.
        OSError: the file cannot be read.
    """
    sized = size_hf_config(config, page_size=page_size, dtype=dtype)
    for note in sized.notes:
        warnings.warn(note, LayoutWarning, stacklevel=2)
    return sized.layout


def size_hf_config(
    config: Mapping[str, object] | str | Path, *, page_size: int | None = None, dtype: str | None = None
) -> SizedLayout:
    """Return what ``from_hf_config`` does, with the layers behind each pool; warnings are in ``notes``."""
    whole = read_config(config)
    text, model_type = _text_model(whole)
    kept = kept_dtype(whole, text) if dtype in {None, AUTO} else dtype
    choice = Choice(page_size, kept, _model_dtype(text, whole))
    known = text.with_values({"model_type": model_type}).with_synonyms(SYNONYMS)
    if model_type in RULES:
        sized = RULES[model_type](known, choice)
    else:
        check_decoder(whole)
        sized = rule_of_fields(known)(known, choice)
        sized = replace(sized, notes=(what_is_assumed(known, sized, (*RULES, *WRAPPERS)),))
    return replace(sized, left_out=_left_out(text, sized))


def size_by_hand(
    layers: int, heads: int, head_dim: int, *, page_size: int | None = None, dtype: str | None = None
) -> SizedLayout:
    """Return the layout of full attention in ``layers`` layers, each with ``heads`` of K and V of ``head_dim`` values.

    ``page_size`` is in tokens, None for 64; ``dtype`` is what K and V are kept in, None for bfloat16.

    Raises:
        LayoutError: a number that is not positive, or a dtype that is not known.
    """
    fields = {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": head_dim}
    choice = Choice(page_size, None if dtype == AUTO else dtype)
    return plain(Fields({**fields, "model_type": "plain attention"}), choice)


def _left_out(fields: Fields, sized: SizedLayout) -> tuple[str, ...]:
    """Return a line for each kind of draft layers that the layout leaves out, with the bytes that one costs."""
    page_size = sized.layout.page_size
    costs = [
        f"{pool.page_bytes / page_size / sized.layers[pool.name]:,.0f} bytes per token in {pool.name}"
        for pool in sized.layout.pools
        if pool.name in ATTENTION_POOLS and pool.page_bytes and sized.layers[pool.name]
    ]
    notes: list[str] = []
    for name in DRAFT_LAYERS:
        count = fields.values.get(name)
        if type(count) is int and count > 0 and fields.values.get("use_mtp") is not False:
            cost = f"; one like the model's own takes {' or '.join(costs)}" if costs else ""
            notes.append(f"draft (MTP) layers are left out, {name} says {count}{cost}")
    return tuple(notes)


def _text_model(whole: Fields) -> tuple[Fields, str]:
    """Return the fields of the text model and its ``model_type``, which may be one that no rule is known of."""
    outer = _model_type(whole)
    if outer in WRAPPERS:
        if "text_config" not in whole and "num_hidden_layers" in whole:
            return whole, WRAPPERS[outer][0]
        text = whole.inner("text_config")
        if "model_type" not in text:
            return text, WRAPPERS[outer][0]
        if text.text("model_type") not in WRAPPERS[outer]:
            raise text.error("model_type", f"one of {', '.join(WRAPPERS[outer])} within {outer}")
        return text, text.text("model_type")
    text = whole
    for _ in range(NESTED_MAX):
        name = text.one_of(TEXT_CONFIGS)
        if name not in text:
            break
        text = text.inner(name)
        outer = text.text("model_type") if "model_type" in text else outer
    return text, outer


def _model_type(fields: Fields) -> str:
    """Return the type that a configuration names, or that its class does where the type says nothing to us."""
    classes = fields.items("architectures") if "architectures" in fields else []
    named = [known for item in classes if isinstance(item, str) and (known := class_of(item)) is not None]
    if "model_type" not in fields:
        if not named:
            expected = "known, or model_type be given" if classes else "given"
            raise fields.error("architectures" if classes else "model_type", expected)
        return named[0]
    model_type = fields.text("model_type")
    known_types = {*RULES, *WRAPPERS}
    if model_type not in known_types:
        # A model with a type of its own that engines load by a class they know.
        return named[0] if named else model_type
    if named and all(_rule(model_type) is not _rule(name) for name in named):
        raise fields.error("model_type", f"{named[0]}, as architectures says")
    return model_type


def _rule(model_type: str) -> object:
    """Return what two types have in common if they are read alike: the rule, or the type of the text model within."""
    return RULES.get(WRAPPERS.get(model_type, (model_type,))[0])


def kept_dtype(*places: Fields) -> str | None:
    """Return the data type that a quantised checkpoint asks engines to keep K and V in; None where it does not say.

    A name that is none of ``KEPT_DTYPES`` is the model's own, as in vLLM 0.33.
    """
    for fields in places:
        if "quantization_config" not in fields:
            continue
        quantization = fields.inner("quantization_config")
        if "quantization" in quantization:
            quantization = quantization.inner("quantization")
        name = quantization.one_of(("kv_cache_scheme", "kv_cache_quant_algo"))
        said = quantization.values.get(name)
        if said is None or isinstance(said, str):
            return KEPT_DTYPES.get((said or "").upper())
        scheme = quantization.inner(name)
        if scheme.holds("num_bits", 4) and not scheme.holds("type", "int"):
            return "nvfp4"
        if not scheme.holds("num_bits", 8):
            raise scheme.error("num_bits", "8, or 4 of type float")
        return "int8" if scheme.holds("type", "int") else "fp8"
    return None


def _model_dtype(*places: Fields) -> str:
    for fields in places:
        for name in ("dtype", "torch_dtype"):
            if name in fields:
                return fields.text(name)
    return DTYPE_DEFAULT


def check_decoder(fields: Fields) -> None:
    """Raise LayoutError for a configuration of an encoder, or of one together with a decoder."""
    if fields.flag("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", "false: a decoder alone keeps a prefix")
    classes = (
        [item for item in fields.items("architectures") if isinstance(item, str)] if ("architectures" in fields) else []
    )
    if classes and not any(name.endswith(DECODER_ENDINGS) for name in classes):
        raise fields.error("architectures", f"a decoder's, whose name ends with {' or '.join(DECODER_ENDINGS)}")


def rule_of_fields(fields: Fields) -> Rule:
    """Return the rule that the fields of an unknown architecture speak for; a LayoutError if they mean other state."""
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
