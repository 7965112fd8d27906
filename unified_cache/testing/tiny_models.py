"""Small models of random weights, one of each family: made from stock configurations, alike in every process.

Needs the extra ``transformers``.

    family           layers                                       page   window
    tiny-llama       full, full                                     32        -
    tiny-gemma3      sliding, sliding, full                         16       40   touches three pages
    tiny-gpt-oss     sliding, full                                  16       25   in bfloat16
    tiny-qwen3-next  recurrent, full                                16        -
    tiny-deepseek-v4 sliding, compressed sparse, heavily compressed 128     128
"""

from collections.abc import Mapping
from dataclasses import dataclass

from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import needs_extra

with needs_extra("transformers", "unified_cache.testing.tiny_models"):
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        PreTrainedModel,
    )

__all__ = ["TINY_MODELS", "tiny_model"]

VOCABULARY = 256
"""Token ids are below this in every family: a byte of text each."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A configuration with one layer of each kind, and the page size that exercises its windows and groups."""

    model_type: str
    fields: Mapping[str, object]
    """Fields of the stock configuration."""
    page_size: int
    """Tokens per page."""


_ATTENTION: Mapping[str, object] = {
    "hidden_size": 64,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}

TINY_MODELS: Mapping[str, TinyModel] = {
    "tiny-llama": TinyModel("llama", dict(**_ATTENTION, intermediate_size=128, num_hidden_layers=2), 32),
    "tiny-gemma3": TinyModel(
        "gemma3_text",
        dict(
            **_ATTENTION,
            intermediate_size=128,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            sliding_window=40,
            tie_word_embeddings=False,
        ),
        16,
    ),
    "tiny-gpt-oss": TinyModel(
        "gpt_oss",
        dict(
            **_ATTENTION,
            intermediate_size=64,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=25,
            num_local_experts=4,
            num_experts_per_tok=2,
            dtype="bfloat16",
        ),
        16,
    ),
    "tiny-qwen3-next": TinyModel(
        "qwen3_next",
        dict(
            **_ATTENTION,
            intermediate_size=64,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            num_experts=4,
            num_experts_per_tok=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        16,
    ),
    "tiny-deepseek-v4": TinyModel(
        "deepseek_v4",
        {
            "hidden_size": 64,
            "vocab_size": VOCABULARY,
            "num_attention_heads": 2,
            "initializer_range": 0.2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "sliding_window": 128,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 64,
            "index_topk": 32,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
        },
        128,
    ),
}
"""Tiny models by name."""


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Build a model with the weights of ``seed``, on the CPU; leaves torch's own random state as it was.

    Raises:
        ConfigError: no family has this name.
    """
    if name not in TINY_MODELS:
        raise ConfigError(f"a tiny model must be one of {', '.join(TINY_MODELS)}, found {name!r}")
    tiny = TINY_MODELS[name]
    config = AutoConfig.for_model(tiny.model_type, **tiny.fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.eval()  # type: ignore[no-untyped-call]
    return model
