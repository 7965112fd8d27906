"""Architectures by family: which rule turns the configuration of each into a layout.

A family is one rule and the ``model_type`` of every text model that it is true of. The rules are functions of the
modules beside this one; a new architecture is a name in a row here, or a new rule and its row.

rule                          layers                                              where
plain                         full attention alone                                attention.py
windowed(...)                 full and sliding-window layers                      attention.py
gemma4, llama4, mimo, step3p5 windows, with heads or chunks of their own          attention.py
latent, longcat, indexed      one latent row per token (MLA), maybe an indexer    deepseek.py
deepseek_v4, deepseek_v41     windows and compressed rows                         deepseek.py
decilm, step3_text            heads that differ by layer, or one for all          attention.py
delta_net, lightning, ...     recurrent state between or beside attention         recurrent.py
"""

from collections.abc import Mapping
from dataclasses import dataclass

from unified_cache.components.layouts.attention import (
    GEMMA_PATTERN,
    Rule,
    after_dense,
    alternating,
    decilm,
    exaone_pattern,
    from_the_last,
    gemma4,
    last_layers,
    layer_count,
    listed,
    llama4,
    mimo,
    no_layer,
    periodic,
    plain,
    step3_text,
    step3p5,
    where_named,
    windowed,
)
from unified_cache.components.layouts.deepseek import deepseek_v4, deepseek_v41, hy_v4, indexed, latent, longcat
from unified_cache.components.layouts.fields import Fields
from unified_cache.components.layouts.recurrent import (
    bailing_v2_5,
    bailing_v3,
    delta_net,
    falcon_h1,
    jamba,
    kimi_linear,
    lightning,
    mamba,
    mamba2,
    nemotron_h,
    numbered,
    olmo_hybrid,
    short_convolution,
    with_mamba2,
    zamba2,
)
from unified_cache.components.layouts.sizes import Choice, SizedLayout

__all__ = ["RULES", "SYNONYMS", "WRAPPERS", "Family", "class_of"]


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures whose configurations are read by one rule."""

    rule: Rule
    models: str
    """``model_type`` of each text model, with spaces between."""


def gemma3(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Gemma3TextConfig: every sixth layer is full; the window counts the query."""
    # The smaller published configurations leave these to the class.
    known = fields.with_defaults({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256})
    return windowed(periodic("sliding_window_pattern", GEMMA_PATTERN), counts_query=True)(known, choice)


def dbrx(fields: Fields, choice: Choice) -> SizedLayout:
    """Read DbrxConfig or MptConfig: full attention, with the heads of K and V in ``attn_config``."""
    if "attn_config" not in fields:
        return plain(fields, choice)
    heads = fields.inner("attn_config")
    known = {"num_key_value_heads": heads.count("kv_n_heads")} if "kv_n_heads" in heads else {}
    return plain(fields.with_values(known), choice)


def gemma3n(fields: Fields, choice: Choice) -> SizedLayout:
    """Read Gemma3nTextConfig: every fifth layer is full, all with the same heads; the last layers borrow K and V."""
    known = fields.with_values({"global_head_dim": fields.count("head_dim")})
    if "layer_types" not in fields:
        known = known.with_values({"layer_types": periodic("sliding_window_pattern", 5)(fields, layer_count(fields))})
    return gemma4(known, choice)


FAMILIES: tuple[Family, ...] = (
    Family(
        plain,
        "apertus arcee aquila baichuan bailing_moe bailing_moe_v2 bitnet bloom chatglm codegen cohere deepseek "
        "diffllama ernie4_5_moe exaone falcon glm glm4 glm4_moe glm4v_moe_text glm4v_text gpt2 "
        "gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared grok-1 helium hunyuan_v1_dense hunyuan_v1_moe "
        "hyperclovax internlm internlm2 internlm3 iquestcoder jais2 jetmoe k2_horizon llama mimo minicpm "
        "nanbeige nemotron olmo olmo2 olmoe opt orion pangu_embedded param2moe persimmon phi qwen "
        "sarvam_moe solar stablelm step1 teleflm telechat telechat2 telechat3 xverse",
    ),
    Family(dbrx, "dbrx mpt"),
    Family(windowed(where_named), "ministral ministral3 mistral mixtral phi3 phi4mm phimoe starcoder2"),
    Family(
        windowed(last_layers),
        "dots1 qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_vl qwen2_vl_text qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text "
        "qwen3_vl_text",
    ),
    Family(windowed(last_layers, needs_head_dim=True), "qwen3"),
    Family(windowed(periodic("global_attn_every_n_layers", 4)), "afmoe"),
    Family(windowed(periodic("sliding_window_pattern", 4)), "cohere2"),
    Family(windowed(after_dense, needs_head_dim=True), "cohere2_moe"),
    Family(windowed(periodic("full_attention_interval", 4)), "olmo3"),
    Family(windowed(from_the_last, needs_head_dim=True), "muse_glimmer_text"),
    Family(windowed(exaone_pattern), "exaone4 exaone_moe"),
    Family(windowed(listed), "cwm granite_swa granitemoe_swa"),
    Family(windowed(listed, needs_head_dim=True), "laguna mellum"),
    Family(windowed(no_layer), "qwen2_moe smollm3"),
    Family(windowed(alternating, counts_query=True, needs_head_dim=True), "gemma2 gpt_oss vaultgemma"),
    Family(windowed(no_layer, needs_head_dim=True), "ernie4_5 gemma hy_v3 minimax_m2 seed_oss solar_open"),
    Family(gemma3, "gemma3_text"),
    Family(gemma3n, "gemma3n_text"),
    Family(gemma4, "gemma4_text gemma4_unified_text"),
    Family(llama4, "llama4_text"),
    Family(mimo, "mimo_v2 mimo_v2_flash"),
    Family(step3p5, "step3p5"),
    Family(decilm, "deci decilm nemotron-nas"),
    Family(step3_text, "step3_text"),
    Family(
        latent,
        "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 minicpm3 mistral4 mistral_large_3 pangu_ultra_moe "
        "sarvam_mla youtu",
    ),
    Family(longcat, "longcat_flash longcat_flash_ngram"),
    Family(indexed, "axk2 deepseek_v32 glm_moe_dsa"),
    Family(hy_v4, "hy_v4"),
    Family(deepseek_v4, "deepseek_v4"),
    Family(deepseek_v41, "deepseek_v41 deepseek_v41_text"),
    Family(delta_net, "qwen3_5_moe_text qwen3_5_text qwen3_next"),
    Family(olmo_hybrid, "olmo_hybrid"),
    Family(lightning, "minimax minimax_m1 minimax_text_01"),
    Family(kimi_linear, "kimi_linear"),
    Family(short_convolution, "lfm2 lfm2_moe"),
    Family(bailing_v2_5, "bailing_moe_v2_5"),
    Family(bailing_v3, "bailing_moe_v3"),
    Family(nemotron_h, "nemotron_h"),
    Family(with_mamba2(numbered("attn_layer_indices")), "bamba granitemoehybrid"),
    Family(zamba2, "zamba2"),
    Family(falcon_h1, "falcon_h1"),
    Family(jamba, "jamba"),
    Family(mamba, "falcon_mamba mamba"),
    Family(mamba2, "mamba2"),
)

RULES: Mapping[str, Rule] = {model: family.rule for family in FAMILIES for model in family.models.split()}
"""Rule of each ``model_type`` of a text model."""

WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma3n": ("gemma3n_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "glm4v_moe": ("glm4v_moe_text",),
    "hyperclovax_vision_v2": ("hyperclovax",),
    "kimi_k25": ("kimi_k2", "deepseek_v3"),
    "kimi_vl": ("deepseek_v3",),
    "llama4": ("llama4_text",),
    "mistral3": ("mistral", "ministral3", "mistral4"),
    "muse_glimmer": ("muse_glimmer_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "step3_vl": ("step3_text",),
    "step3p7": ("step3p5",),
}
"""Multimodal models, and what their ``text_config`` may be; the first where it does not say."""

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
}
"""Fields of plain attention, and what other configurations call them."""

_OTHER_CLASSES = {
    "ChatGLMModel": "chatglm",
    "HCXVisionV2ForCausalLM": "hyperclovax_vision_v2",
    "Step3TextForCausalLM": "step3_text",
}
"""Classes that are not named as their type is."""

_CLASS_ENDINGS = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel")


def class_of(name: str) -> str | None:
    """Return the ``model_type`` that the class of a model speaks of, such as llama of LlamaForCausalLM; None if none.

    A class is named as its type is, in capitals and without underscores; that of a multimodal model ends otherwise
    than that of its text model.
    """
    if name in _OTHER_CLASSES:
        return _OTHER_CLASSES[name]
    ending = next((each for each in _CLASS_ENDINGS if name.endswith(each)), None)
    if ending is None:
        return None
    stem = name.removesuffix(ending).lower().replace("_", "")
    known = _WRAPPER_STEMS if ending == _CLASS_ENDINGS[0] else _TEXT_STEMS
    return known.get(stem)


# A model that is its own text model goes before the text model of a multimodal one.
_TEXT_STEMS = {
    name.removesuffix("_text").replace("_", ""): name
    for name in sorted(RULES, key=lambda name: not name.endswith("_text"))
}
_WRAPPER_STEMS = _TEXT_STEMS | {name.replace("_", ""): name for name in WRAPPERS}
