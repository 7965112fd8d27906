"""Tiny checkpoints with random weights, large enough that attention to the wrong bytes changes the answer."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from tests.engines.vllm.deepseek_v4 import DRAWN

TOKENS = 512
"""Size of the vocabulary."""

CONTEXT = 2048

COMMON: Mapping[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of every family that transformers makes weights for."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A family of models, made small."""

    config: Callable[[], PreTrainedConfig] | Mapping[str, object]
    """Plain values where transformers makes no weights that vLLM takes: then there is a loader in ``options``."""
    dtype: str = "float32"
    block_size: int | None = 32
    """Tokens of a block of vLLM's; None where vLLM has its own idea."""
    runner: tuple[str, ...] = ()
    """Module that the engine's process is run by, if it is not run as it is."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Of vLLM's, for this family."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the tier's, for this family."""


def _llama() -> PreTrainedConfig:
    return LlamaConfig(
        **COMMON,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


def _gemma3() -> PreTrainedConfig:
    return Gemma3TextConfig(
        **COMMON,
        intermediate_size=160,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=[*["sliding_attention"] * 2, "full_attention"] * 2,
        pad_token_id=0,
    )


def _qwen3_next() -> PreTrainedConfig:
    return Qwen3NextConfig(
        **COMMON,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=256,
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        # vLLM's kernels for the CPU take heads of 128 only.
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


DEEPSEEK_V4: Mapping[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": TOKENS,
    "hidden_size": 256,
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "attention_bias": False,
    # A window alone, and beside it each kind of compression; the layer that compresses by 4 has an indexer as well.
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160_000.0,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    # vLLM's kernel for the CPU that routes by hashes takes 256 experts only.
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 64,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "expert_dtype": "fp8",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65_536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 2 * CONTEXT,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

MODELS: Mapping[str, EngineModel] = {
    "llama": EngineModel(_llama),
    "gemma3": EngineModel(_gemma3),
    "qwen3_next": EngineModel(_qwen3_next, "bfloat16", None),
    "deepseek_v4": EngineModel(
        DEEPSEEK_V4,
        "bfloat16",
        None,
        ("tests.engines.vllm.deepseek_v4",),
        {"load_format": DRAWN, "max_model_len": 3072, "model_loader_extra_config": {"seed": 1}},
        {"revision": "drawn from 1"},
    ),
}


def checkpoint(directory: Path, name: str, seed: int = 1) -> Path:
    """Write a checkpoint into ``directory``; two seeds give two models of one shape."""
    config = MODELS[name].config
    if isinstance(config, Mapping):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": MODELS[name].dtype}, indent=1))
        return directory
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config()).float()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory, safe_serialization=True)
    settings = json.loads((directory / "config.json").read_text())
    settings["torch_dtype"] = MODELS[name].dtype
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    return directory
