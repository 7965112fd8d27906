"""Bytes of layouts against those of SGLang's own pools: both read the same configurations of published models."""

import json
from collections.abc import Mapping
from pathlib import Path

from tests.engines.sglang.bench import Bench
from tests.engines.sglang.install import install_transformers
from unified_cache.components.layouts import PRESETS, size_hf_config
from unified_cache.components.layouts.sizes import SizedLayout

__all__ = ["sizes"]

TEXT = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 8192, "max_position_embeddings": 4096}
"""What an engine needs of a configuration and a layout does not."""

PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "full": {
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
    },
    "mla": {
        "deepseek-v2-lite": "DeepseekV2ForCausalLM",
        "deepseek-v3": "DeepseekV3ForCausalLM",
        "deepseek-v3.2": "DeepseekV32ForCausalLM",
        "kimi-k2": "DeepseekV3ForCausalLM",
    },
    "swa": {
        "gpt-oss-20b": "GptOssForCausalLM",
        "gpt-oss-120b": "GptOssForCausalLM",
        "llama-4-scout": "Llama4ForConditionalGeneration",
        "gemma-4-31b": "Gemma4ForConditionalGeneration",
        "mimo-v2-flash": "MiMoV2FlashForCausalLM",
    },
    "dsv4": {"deepseek-v4-flash": "DeepseekV4ForCausalLM", "deepseek-v4-pro": "DeepseekV4ForCausalLM"},
    "mamba": {
        "qwen3-next-80b-a3b": "Qwen3NextForCausalLM",
        "qwen3.5-397b-a17b": "Qwen3_5MoeForConditionalGeneration",
        "nemotron-3-nano-30b-a3b": "NemotronHForCausalLM",
        "nemotron-h-8b": "NemotronHForCausalLM",
    },
}
"""Published models of each stack, and the class by which SGLang knows them."""

CHANGED: Mapping[str, Mapping[str, object]] = {
    "exaone-4.0-32b": {"sliding_window_pattern": 4},
    "deepseek-v3.2": {"index_topk": 2048},
}
"""Fields that SGLang reads in another of their forms, or that it tells an indexer by."""


def sizes(bench: Bench) -> None:
    """Bytes of layouts against those of SGLang's host pools, for published models in full size."""
    configurations = {name: _configuration(name, kind) for of in PUBLISHED.values() for name, kind in of.items()}
    layouts = {name: size_hf_config(configuration) for name, configuration in configurations.items()}
    directories = {name: _written(bench.root / f"sizes-{name}", each) for name, each in configurations.items()}
    page_tokens = {str(directories[name]): sized.layout.page_size for name, sized in layouts.items()}
    engine = bench.understood(
        "sizes", "sizes", json.dumps(page_tokens), packages=install_transformers(bench.installation)
    )
    if engine is None:
        return
    for stack, published in PUBLISHED.items():
        for name in published:
            bench.line(*_compared(f"sizes {stack} {name}", layouts[name], engine[str(directories[name])]))


def _configuration(name: str, architecture: str) -> dict[str, object]:
    return {
        "torch_dtype": "bfloat16",
        **TEXT,
        **PRESETS[name],
        **CHANGED.get(name, {}),
        "architectures": [architecture],
    }


def _written(directory: Path, configuration: Mapping[str, object]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    return directory


def _compared(name: str, sized: SizedLayout, engine: Mapping[str, int | str]) -> tuple[bool, str, str]:
    """Compare pool by pool. SGLang keeps the windows of some models in the pool of full attention."""
    ours: dict[str, int | str] = {pool.name: pool.page_bytes for pool in sized.layout.pools}
    told = f"{sized.layout.page_size} tokens: {_told(ours)}"
    is_joined = "swa" in ours and name.split()[1] == "full"
    expected = {"kv": sum(pool.page_bytes for pool in sized.layout.pools)} if is_joined else ours
    if expected != engine:
        return False, name, f"{told}; the engine has {_told(engine)}"
    return True, name, f"{told}; in one pool of the engine" if is_joined else told


def _told(pools: Mapping[str, int | str]) -> str:
    return ", ".join(f"{pool} {count}" for pool, count in sorted(pools.items()))
