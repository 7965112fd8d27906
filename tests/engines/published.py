"""Published models in full size, as engines read their configurations and layouts do."""

from collections.abc import Mapping

from unified_cache.components.layouts import PRESETS

ARCHITECTURES: Mapping[str, str] = {
    "command-r7b": "Cohere2ForCausalLM",
    "deepseek-v2-lite": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "deepseek-v3.2": "DeepseekV32ForCausalLM",
    "deepseek-v4-flash": "DeepseekV4ForCausalLM",
    "deepseek-v4-pro": "DeepseekV4ForCausalLM",
    "exaone-4.0-32b": "Exaone4ForCausalLM",
    "gemma-2-9b": "Gemma2ForCausalLM",
    "gemma-3-27b": "Gemma3ForConditionalGeneration",
    "gemma-4-31b": "Gemma4ForConditionalGeneration",
    "glm-4.5-air": "Glm4MoeForCausalLM",
    "gpt-oss-120b": "GptOssForCausalLM",
    "gpt-oss-20b": "GptOssForCausalLM",
    "granite-3.3-8b": "GraniteForCausalLM",
    "kimi-k2": "DeepseekV3ForCausalLM",
    "llama-3.1-8b": "LlamaForCausalLM",
    "llama-4-scout": "Llama4ForConditionalGeneration",
    "mimo-v2-flash": "MiMoV2FlashForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "mixtral-8x7b": "MixtralForCausalLM",
    "nemotron-3-nano-30b-a3b": "NemotronHForCausalLM",
    "nemotron-h-8b": "NemotronHForCausalLM",
    "olmo-2-7b": "Olmo2ForCausalLM",
    "phi-4": "Phi3ForCausalLM",
    "qwen2.5-7b": "Qwen2ForCausalLM",
    "qwen3-30b-a3b": "Qwen3MoeForCausalLM",
    "qwen3-8b": "Qwen3ForCausalLM",
    "qwen3-next-80b-a3b": "Qwen3NextForCausalLM",
    "qwen3.5-397b-a17b": "Qwen3_5MoeForConditionalGeneration",
}
"""Class of each model by its preset."""

TEXT = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 8192, "max_position_embeddings": 4096}
"""What an engine needs of a configuration and a layout does not."""

CHANGED: Mapping[str, Mapping[str, object]] = {
    "exaone-4.0-32b": {"sliding_window_pattern": 4},
    "deepseek-v3.2": {"index_topk": 2048},
}
"""Fields that engines read in another of their forms, or that SGLang tells an indexer by."""


def configuration(name: str) -> dict[str, object]:
    """Return the configuration of a published model, and what an engine needs beside a layout, in bfloat16."""
    return {
        **TEXT,
        "torch_dtype": "bfloat16",
        **PRESETS[name],
        **CHANGED.get(name, {}),
        "architectures": [ARCHITECTURES[name]],
    }
