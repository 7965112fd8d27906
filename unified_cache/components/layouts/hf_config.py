"""From a Hugging Face ``config.json`` to the layout of what the model keeps.

Field names and defaults are those of the configuration classes of transformers 5 and of the configurations that
were published before it.
"""

from collections.abc import Mapping
from pathlib import Path

from unified_cache.components.layouts.attention import ATTENTION_READERS
from unified_cache.components.layouts.deepseek import DEEPSEEK_READERS
from unified_cache.components.layouts.fields import Fields, read_config
from unified_cache.components.layouts.recurrent import RECURRENT_READERS
from unified_cache.components.layouts.sizes import DTYPE_DEFAULT, Choice, SizedLayout
from unified_cache.pool import ModelLayout

__all__ = ["from_hf_config", "size_hf_config"]

READERS = {**ATTENTION_READERS, **DEEPSEEK_READERS, **RECURRENT_READERS}

WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "llama4": ("llama4_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "step3p7": ("step3p5",),
}
"""Multimodal models, and what their ``text_config`` may be; the first where it does not say."""

ARCHITECTURES: Mapping[str, str] = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash",
    "MiMoV2ForCausalLM": "mimo_v2",
    "Ministral3ForCausalLM": "ministral3",
    "MinistralForCausalLM": "ministral",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "mistral",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Step3p5ForCausalLM": "step3p5",
    "Step3p7ForConditionalGeneration": "step3p7",
}
"""Model classes, for configurations without a ``model_type``, and to contradict one that is wrong."""


def from_hf_config(
    config: Mapping[str, object] | str | Path, *, page_size: int | None = None, dtype: str | None = None
) -> ModelLayout:
    """Return the layout of a model, given its configuration as a mapping, a JSON file or a model directory.

    ``page_size`` is in tokens; None for the architecture's usual. ``dtype`` is what K and V are kept in; None for
    the model's own. DeepSeek-V4 takes a row format there (``deepseek_v4.ROW_FORMATS``).

    Raises:
        LayoutError: the architecture is unknown, or a field is missing, senseless or contradicts another.
        OSError: the file cannot be read.
    """
    return size_hf_config(config, page_size=page_size, dtype=dtype).layout


def size_hf_config(
    config: Mapping[str, object] | str | Path, *, page_size: int | None = None, dtype: str | None = None
) -> SizedLayout:
    """Return what ``from_hf_config`` returns, together with the layers behind each pool.

    Raises:
        LayoutError: as ``from_hf_config``.
        OSError: as ``from_hf_config``.
    """
    fields = read_config(config)
    model_type = _model_type(fields)
    text = fields
    if model_type in WRAPPERS:
        text = fields.inner("text_config")
        if "model_type" not in text:
            model_type = WRAPPERS[model_type][0]
        elif text.text("model_type") in WRAPPERS[model_type]:
            model_type = text.text("model_type")
        else:
            raise text.error("model_type", f"one of {', '.join(WRAPPERS[model_type])} within {model_type}")
    choice = Choice(page_size, dtype, _model_dtype(text, fields))
    return READERS[model_type](text.with_values({"model_type": model_type}), choice)


def _model_type(fields: Fields) -> str:
    """Return a key of ``READERS`` or ``WRAPPERS``."""
    classes = fields.items("architectures") if "architectures" in fields else []
    named = [ARCHITECTURES[item] for item in classes if isinstance(item, str) and item in ARCHITECTURES]
    if "model_type" not in fields:
        if not named:
            expected = "known, or model_type be given" if classes else "given"
            raise fields.error("architectures" if classes else "model_type", expected)
        return named[0]
    model_type = fields.text("model_type")
    if model_type not in READERS and model_type not in WRAPPERS:
        raise fields.error("model_type", f"one of {', '.join(sorted({*READERS, *WRAPPERS}))}")
    if named and model_type not in named:
        raise fields.error("model_type", f"{named[0]}, as architectures says")
    return model_type


def _model_dtype(*places: Fields) -> str:
    for fields in places:
        for name in ("dtype", "torch_dtype"):
            if name in fields:
                return fields.text(name)
    return DTYPE_DEFAULT
