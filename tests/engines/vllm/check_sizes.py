"""Bytes of layouts against those that vLLM counts of the same configurations, in full size and without weights."""

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from tests.engines.published import configuration, with_text
from tests.engines.vllm.installation import engine_python
from tests.sources import ROOT
from unified_cache.components.layouts import size_hf_config

PUBLISHED = (
    "command-r7b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "exaone-4.0-32b",
    "gemma-2-9b",
    "glm-4.5-air",
    "gpt-oss-20b",
    "granite-3.3-8b",
    "llama-3.1-8b",
    "minimax-m2",
    "mixtral-8x7b",
    "nemotron-3-nano-30b-a3b",
    "olmo-2-7b",
    "phi-4",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
    "qwen3-8b",
    "qwen3-next-80b-a3b",
)
"""Published models of which the engine reads a configuration here."""

MAMBA_2 = {
    "mamba_n_heads": 64,
    "mamba_d_head": 128,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
HEADS = {"num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8}
OTHERS: Mapping[str, Mapping[str, object]] = {
    "cohere2_moe": {
        **HEADS,
        "head_dim": 128,
        "first_k_dense_replace": 1,
        "sliding_window": 4096,
        "architectures": ["Cohere2MoeForCausalLM"],
    },
    "mistral_large_3": {
        **HEADS,
        **LATENT,
        "num_key_value_heads": 32,
        "architectures": ["MistralLarge3ForCausalLM"],
    },
    "step3_text": {
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_attention_groups": 1,
        "head_dim": 256,
        "share_q_dim": 2048,
        "architectures": ["Step3TextForCausalLM"],
    },
    "zamba2": {
        **HEADS,
        "num_key_value_heads": 32,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 2,
        "n_mamba_heads": 128,
        "kv_channels": 128,
        "layers_block_type": [*["mamba"] * 3, "hybrid"] * 2,
        "architectures": ["Zamba2ForCausalLM"],
    },
    "falcon_h1": {**HEADS, **MAMBA_2, "mamba_d_ssm": 8192, "architectures": ["FalconH1ForCausalLM"]},
    "granitemoehybrid": {
        **HEADS,
        **MAMBA_2,
        "layer_types": [*["mamba"] * 7, "attention"],
        "architectures": ["GraniteMoeHybridForCausalLM"],
    },
    "jamba": {
        **HEADS,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "architectures": ["JambaForCausalLM"],
    },
    "lfm2": {
        **HEADS,
        "full_attn_idxs": [2, 5],
        "conv_L_cache": 3,
        "conv_dim": 4096,
        "architectures": ["Lfm2ForCausalLM"],
    },
}
"""Configurations of families without a published model here, by ``model_type``."""


TYPES_HERE: Mapping[str, str] = {
    "mistral_large_3": "deepseek_v3",
}
"""``model_type`` that the engine is given where its own comes with code of the checkpoint, which is not here."""


def configurations() -> dict[str, dict[str, object]]:
    """Return every configuration that both sides read."""
    published = {name: configuration(name) for name in PUBLISHED}
    return published | {name: with_text({**fields, "model_type": name}) for name, fields in OTHERS.items()}


@pytest.fixture(scope="module")
def engine_sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the engine says of all of them."""
    root = tmp_path_factory.mktemp("configurations")
    paths: dict[str, str] = {}
    for name, config in configurations().items():
        directory = root / name
        directory.mkdir()
        given = {**config, "model_type": TYPES_HERE.get(name, config["model_type"])}
        (directory / "config.json").write_text(json.dumps(given))
        paths[name] = str(directory)
    command = [str(engine_python()), "-m", "tests.engines.vllm.config_sizes", *paths.values()]
    ended = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=900)
    said = json.loads(ended.stdout.splitlines()[-1])
    return {name: said[path] for name, path in paths.items()}


@pytest.mark.parametrize("name", sorted(configurations()))
def check_bytes_are_those_that_the_engine_counts(name: str, engine_sizes: dict[str, Any]) -> None:
    """Layers of attention, bytes of a token in one of them, and bytes of a recurrent state."""
    theirs = engine_sizes[name]
    assert "refused" not in theirs, theirs
    sized = size_hf_config(configurations()[name], page_size=1)
    pools = {pool.name: pool.page_bytes for pool in sized.layout.pools}
    attention = ("kv", "swa")
    assert sum(sized.layers.get(pool, 0) for pool in attention) == theirs["attention_layers"]
    assert sum(pools.get(pool, 0) for pool in attention) == theirs["attention_layers"] * theirs["row_bytes"]
    if theirs["state"] is None:
        assert "mamba" not in pools
        return
    # A convolution's inputs in the model's dtype; the state in fp32, or as the engine was told.
    values = [count * (4 if number else size) for number, (count, size) in enumerate(theirs["state"])]
    assert pools["mamba"] == sized.layers["mamba"] * sum(values)
