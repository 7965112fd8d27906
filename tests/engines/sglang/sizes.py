"""Bytes of layouts against those of SGLang's own pools: both read the same configurations of published models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.engines.published import configuration
from tests.engines.sglang.bench import Bench
from tests.engines.sglang.install import install_transformers
from unified_cache.components.layouts import size_hf_config
from unified_cache.components.layouts.sizes import SizedLayout

__all__ = ["sizes"]

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


def sizes(bench: Bench) -> None:
    """Bytes of layouts against those of SGLang's host pools, for published models in full size."""
    configurations = {name: configuration(name) for names in PUBLISHED.values() for name in names}
    layouts = {name: size_hf_config(each) for name, each in configurations.items()}
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
