"""Architectures by family: which rule turns the configuration of each into a layout.

A family is one rule and the ``model_type`` of every text model that it is true of. A new architecture is a name in a
row here, or a new rule in a module beside this one, and its row.
"""

from collections.abc import Mapping

from unified_cache.components.layouts import attention, deepseek, recurrent

FAMILIES: tuple[tuple[attention.Rule, str], ...] = (
    (
        attention.plain,
        "apertus arcee aquila baichuan bailing_moe bailing_moe_v2 bitnet bloom chatglm codegen cohere deepseek "
        "diffllama ernie4_5_moe exaone falcon glm glm4 glm4_moe glm4v_moe_text glm4v_text gpt2 "
        "gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared grok-1 helium hunyuan_v1_dense hunyuan_v1_moe "
        "hyperclovax internlm internlm2 internlm3 iquestcoder jais2 jetmoe k2_horizon llama mimo minicpm "
        "nanbeige nemotron olmo olmo2 olmoe opt orion pangu_embedded param2moe persimmon phi qwen "
        "sarvam_moe solar stablelm step1 teleflm telechat telechat2 telechat3 xverse",
    ),
    (attention.dbrx, "dbrx mpt"),
    (attention.windowed(attention.where_named), "ministral ministral3 mistral mixtral phi3 phi4mm phimoe starcoder2"),
    (
        attention.windowed(attention.last_layers),
        "dots1 qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_vl qwen2_vl_text qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text "
        "qwen3_vl_text",
    ),
    (attention.windowed(attention.last_layers, needs_head_dim=True), "qwen3"),
    (attention.windowed(attention.periodic("global_attn_every_n_layers", 4)), "afmoe"),
    (attention.windowed(attention.periodic("sliding_window_pattern", 4)), "cohere2"),
    (attention.windowed(attention.after_dense, needs_head_dim=True), "cohere2_moe"),
    (attention.windowed(attention.periodic("full_attention_interval", 4)), "olmo3"),
    (attention.windowed(attention.from_the_last, needs_head_dim=True), "muse_glimmer_text"),
    (attention.windowed(attention.exaone_pattern), "exaone4 exaone_moe"),
    (attention.windowed(attention.listed), "cwm granite_swa granitemoe_swa"),
    (attention.windowed(attention.listed, needs_head_dim=True), "laguna mellum"),
    (attention.windowed(attention.no_layer), "qwen2_moe smollm3"),
    (attention.windowed(attention.alternating, counts_query=True, needs_head_dim=True), "gemma2 gpt_oss vaultgemma"),
    (
        attention.windowed(attention.no_layer, needs_head_dim=True),
        "ernie4_5 gemma hy_v3 minimax_m2 seed_oss solar_open",
    ),
    (attention.gemma3, "gemma3_text"),
    (attention.gemma3n, "gemma3n_text"),
    (attention.gemma4, "gemma4_text gemma4_unified_text"),
    (attention.llama4, "llama4_text"),
    (attention.mimo, "mimo_v2 mimo_v2_flash"),
    (attention.step3p5, "step3p5"),
    (attention.decilm, "deci decilm nemotron-nas"),
    (attention.step3_text, "step3_text"),
    (
        deepseek.latent,
        "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 minicpm3 mistral4 mistral_large_3 pangu_ultra_moe "
        "sarvam_mla youtu",
    ),
    (deepseek.longcat, "longcat_flash longcat_flash_ngram"),
    (deepseek.indexed, "axk2 deepseek_v32 glm_moe_dsa"),
    (deepseek.hy_v4, "hy_v4"),
    (deepseek.deepseek_v4, "deepseek_v4"),
    (deepseek.deepseek_v41, "deepseek_v41 deepseek_v41_text"),
    (recurrent.delta_net, "qwen3_5_moe_text qwen3_5_text qwen3_next"),
    (recurrent.olmo_hybrid, "olmo_hybrid"),
    (recurrent.lightning, "minimax minimax_m1 minimax_text_01"),
    (recurrent.kimi_linear, "kimi_linear"),
    (recurrent.short_convolution, "lfm2 lfm2_moe"),
    (recurrent.bailing_v2_5, "bailing_moe_v2_5"),
    (recurrent.bailing_v3, "bailing_moe_v3"),
    (recurrent.nemotron_h, "nemotron_h"),
    (recurrent.with_mamba2(recurrent.numbered("attn_layer_indices")), "bamba granitemoehybrid"),
    (recurrent.zamba2, "zamba2"),
    (recurrent.falcon_h1, "falcon_h1"),
    (recurrent.jamba, "jamba"),
    (recurrent.mamba, "falcon_mamba mamba"),
    (recurrent.mamba2, "mamba2"),
)
"""Rule, and the ``model_type`` of each text model that it is true of, with spaces between."""

RULES: Mapping[str, attention.Rule] = {model: rule for rule, models in FAMILIES for model in models.split()}
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
    """Return the ``model_type`` that the class of a model speaks of, such as llama of LlamaForCausalLM; or None."""
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
