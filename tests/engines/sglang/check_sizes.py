"""Bytes of layouts against those of SGLang's own pools: both read the same configurations of published models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.engines.published import configuration
from tests.engines.sglang.bench import Bench
from tests.engines.sglang.install import install_transformers
from unified_cache.components.layouts import size_hf_config

PUBLISHED: Mapping[str, Sequence[str]] = {
    "full": (
        "llama-3.1-8b",
        "qwen2.5-7b",
        "qwen3-8b",
        "qwen3-30b-a3b",
        "mixtral-8x7b",
        "glm-4.5-air",
        "phi-4",
        "olmo-2-7b",
        "granite-3.3-8b",
        "minimax-m2",
        "gemma-2-9b",
        "gemma-3-27b",
        "command-r7b",
        "exaone-4.0-32b",
    ),
    "mla": (
        "deepseek-v2-lite",
        "deepseek-v3",
        "deepseek-v3.2",
        "kimi-k2",
    ),
    "swa": (
        "gpt-oss-20b",
        "gpt-oss-120b",
        "llama-4-scout",
        "gemma-4-31b",
        "mimo-v2-flash",
    ),
    "dsv4": (
        "deepseek-v4-flash",
        "deepseek-v4-pro",
    ),
    "mamba": (
        "qwen3-next-80b-a3b",
        "qwen3.5-397b-a17b",
        "nemotron-3-nano-30b-a3b",
        "nemotron-h-8b",
    ),
}
"""Published models of each stack."""


def check_the_bytes_of_published_models_in_full_size_are_those_of_the_engines_host_pools(bench: Bench) -> None:
    configurations = {name: configuration(name) for names in PUBLISHED.values() for name in names}
    layouts = {name: size_hf_config(each).layout for name, each in configurations.items()}
    directories = {name: _written(bench.root / f"sizes-{name}", each) for name, each in configurations.items()}
    page_tokens = {str(directories[name]): layout.page_size for name, layout in layouts.items()}
    engine = bench.understood("sizes", json.dumps(page_tokens), packages=install_transformers(bench.installation))
    for name, layout in layouts.items():
        ours = {pool.name: pool.page_bytes for pool in layout.pools}
        # SGLang keeps the windows of some models in the pool of full attention.
        is_joined = "swa" in ours and name in PUBLISHED["full"]
        assert engine[str(directories[name])] == ({"kv": sum(ours.values())} if is_joined else ours), name


def _written(directory: Path, configuration: Mapping[str, object]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    return directory
