"""Bytes of layouts against those of SGLang's own pools: both read the same configurations of published models."""

import json
from collections.abc import Mapping

from tests.engines.sglang.install import install_transformers
from tests.engines.sglang.runner import EngineRunner
from unified_cache.components.layouts import PRESETS, size_hf_config

JOINED: Mapping[str, str] = {
    "llama-3.1-8b": "LlamaForCausalLM",
    "qwen2.5-7b": "Qwen2ForCausalLM",
    "qwen3-8b": "Qwen3ForCausalLM",
    "qwen3-30b-a3b": "Qwen3MoeForCausalLM",
    "mixtral-8x7b": "MixtralForCausalLM",
    "glm-4.5-air": "Glm4MoeForCausalLM",
    "phi-4": "Phi3ForCausalLM",
    "olmo-2-7b": "Olmo2ForCausalLM",
    "granite-3.3-8b": "GraniteForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "gemma-2-9b": "Gemma2ForCausalLM",
    "gemma-3-27b": "Gemma3ForConditionalGeneration",
    "command-r7b": "Cohere2ForCausalLM",
    "exaone-4.0-32b": "Exaone4ForCausalLM",
}
"""Class of each published model whose windows, if it has any, SGLang keeps in the pool of full attention."""

PUBLISHED: Mapping[str, str] = {
    **JOINED,
    "deepseek-v2-lite": "DeepseekV2ForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "deepseek-v3.2": "DeepseekV32ForCausalLM",
    "kimi-k2": "DeepseekV3ForCausalLM",
    "gpt-oss-20b": "GptOssForCausalLM",
    "gpt-oss-120b": "GptOssForCausalLM",
    "llama-4-scout": "Llama4ForConditionalGeneration",
    "gemma-4-31b": "Gemma4ForConditionalGeneration",
    "mimo-v2-flash": "MiMoV2FlashForCausalLM",
    "deepseek-v4-flash": "DeepseekV4ForCausalLM",
    "deepseek-v4-pro": "DeepseekV4ForCausalLM",
    "qwen3-next-80b-a3b": "Qwen3NextForCausalLM",
    "qwen3.5-397b-a17b": "Qwen3_5MoeForConditionalGeneration",
    "nemotron-3-nano-30b-a3b": "NemotronHForCausalLM",
    "nemotron-h-8b": "NemotronHForCausalLM",
}
"""Class of each published model by its preset."""

TEXT = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 8192, "max_position_embeddings": 4096}
"""What an engine needs of a configuration and a layout does not."""

CHANGED: Mapping[str, Mapping[str, object]] = {
    "exaone-4.0-32b": {"sliding_window_pattern": 4},
    "deepseek-v3.2": {"index_topk": 2048},
}
"""Fields that engines read in another of their forms, or that SGLang tells an indexer by."""


def configuration(name: str) -> dict[str, object]:
    """Return the configuration of a published model, in bfloat16."""
    own = {"architectures": [PUBLISHED[name]]}
    return {**TEXT, "torch_dtype": "bfloat16", **PRESETS[name], **CHANGED.get(name, {}), **own}


def check_the_bytes_of_published_models_in_full_size_are_those_of_the_engines_host_pools(runner: EngineRunner) -> None:
    page_tokens: dict[str, int] = {}
    layouts = {name: size_hf_config(configuration(name)).layout for name in PUBLISHED}
    for name, layout in layouts.items():
        directory = runner.root / f"sizes-{name}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(configuration(name)), encoding="utf-8")
        page_tokens[str(directory)] = layout.page_size
    engine = runner.understood("sizes", json.dumps(page_tokens), packages=install_transformers(runner.installation))
    for name, layout in layouts.items():
        ours = {pool.name: pool.page_bytes for pool in layout.pools}
        is_joined = "swa" in ours and name in JOINED
        assert engine[str(runner.root / f"sizes-{name}")] == ({"kv": sum(ours.values())} if is_joined else ours), name
