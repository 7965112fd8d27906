"""Published models, as the fields of their ``config.json`` that a layout depends on.

They are read like any other configuration. Counts and dimensions are those of the published configurations.
"""

from collections.abc import Mapping

__all__ = ["PRESETS", "PRESET_ALIASES"]

_DEEPSEEK_V4: Mapping[str, object] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "head_dim": 512,
    "index_head_dim": 128,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
}

_GPT_OSS: Mapping[str, object] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}

_LLAMA_4: Mapping[str, object] = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
}

_MIMO_V2: Mapping[str, object] = {
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 128,
    "swa_head_dim": 192,
    "swa_num_key_value_heads": 8,
    "swa_v_head_dim": 128,
    "torch_dtype": "bfloat16",
}

_MISTRAL_7B: Mapping[str, object] = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}

_LINEAR_HEADS: Mapping[str, object] = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "num_key_value_heads": 2,
}

_MAMBA_HEADS: Mapping[str, object] = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "conv_kernel": 4,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "ssm_state_size": 128,
    "torch_dtype": "bfloat16",
}

_GEMMA_4: Mapping[str, object] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "dtype": "bfloat16",
    "global_head_dim": 512,
    "head_dim": 256,
    "sliding_window": 1024,
}


def _attention(
    model_type: str, layers: int, heads: tuple[int, int], head_dim: int, **more: object
) -> Mapping[str, object]:
    """Return the fields of a model of attention; ``heads`` are those of queries, and those of K and V."""
    query_heads, kv_heads = heads
    return {
        "model_type": model_type,
        "head_dim": head_dim,
        "num_attention_heads": query_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        **more,
    }


def _latent(model_type: str, layers: int) -> Mapping[str, object]:
    """Return the fields of a model of DeepSeek's latent attention, one row of 512 + 64 values per token."""
    return {
        "model_type": model_type,
        "kv_lora_rank": 512,
        "num_hidden_layers": layers,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }


PRESETS: Mapping[str, Mapping[str, object]] = {
    "command-a": _attention("cohere2", 64, (96, 8), 128, sliding_window=4096, sliding_window_pattern=4),
    "command-r7b": _attention("cohere2", 32, (32, 8), 128, sliding_window=4096, sliding_window_pattern=4),
    "deepseek-v2": _latent("deepseek_v2", 60),
    "deepseek-v2-lite": _latent("deepseek_v2", 27),
    "deepseek-v3": _latent("deepseek_v3", 61),
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_head_dim": 128,
        "kv_lora_rank": 512,
        "num_hidden_layers": 61,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    },
    "deepseek-v4-flash": {
        **_DEEPSEEK_V4,
        "num_hidden_layers": 43,
        # The last entry is the draft layer's.
        "compress_ratios": [0, 0, 4, *[128, 4] * 20, 0],
    },
    "deepseek-v4-pro": {
        **_DEEPSEEK_V4,
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    },
    "deepseek-v4.1-flash": {
        "model_type": "deepseek_v41",
        "architectures": ["DeepseekV41ForCausalLM"],
        "text_config": {
            "model_type": "deepseek_v41_text",
            # The last three entries are the draft layers'.
            "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
            "head_dim": 512,
            "index_head_dim": 128,
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "kv_source_layer_ids": [2, 8, 14, 20],
            "num_hidden_layers": 40,
            "num_nextn_predict_layers": 3,
            "qk_rope_head_dim": 64,
            "sliding_window": 128,
        },
        "torch_dtype": "bfloat16",
    },
    "exaone-4.0-32b": _attention("exaone4", 64, (40, 8), 128, sliding_window=4096, sliding_window_pattern="LLLG"),
    "gemma-2-27b": _attention("gemma2", 46, (32, 16), 128, sliding_window=4096),
    "gemma-2-9b": _attention("gemma2", 42, (16, 8), 256, sliding_window=4096),
    "gemma-3-27b": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text",
            "head_dim": 128,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            **_GEMMA_4,
            "num_attention_heads": 16,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
        },
    },
    "gemma-4-31b": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            **_GEMMA_4,
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_key_value_heads": 16,
        },
    },
    "glm-4.5": _attention("glm4_moe", 92, (96, 8), 128),
    "glm-4.5-air": _attention("glm4_moe", 46, (96, 8), 128),
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36},
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24},
    "granite-3.3-8b": _attention("granite", 40, (32, 8), 128),
    "kimi-k2": _latent("kimi_k2", 61),
    "llama-3.1-405b": _attention("llama", 126, (128, 8), 128),
    "llama-3.1-70b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    "llama-4-maverick": _LLAMA_4,
    "llama-4-scout": _LLAMA_4,
    "mimo-v2-flash": {
        **_MIMO_V2,
        "model_type": "mimo_v2_flash",
        "architectures": ["MiMoV2FlashForCausalLM"],
        "hybrid_layer_pattern": [0, *[1, 1, 1, 1, 0], *[1, 1, 1, 1, 1, 0] * 7],
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "sliding_window_size": 128,
    },
    "mimo-v2.5-pro": {
        **_MIMO_V2,
        "model_type": "mimo_v2",
        # Ten full layers of seventy. Which ones makes no difference to what is kept, and the ids in layers_mapping
        # are true of a configuration that says it.
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 1, 1] * 10,
        "num_hidden_layers": 70,
        "num_key_value_heads": 8,
    },
    "minimax-m2": _attention("minimax_m2", 62, (48, 8), 128),
    "minimax-text-01": _attention("minimax_text_01", 80, (64, 8), 128, attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 10),
    "mistral-7b-v0.1": {**_MISTRAL_7B, "sliding_window": 4096},
    "mistral-7b-v0.3": {**_MISTRAL_7B, "sliding_window": None},
    "mixtral-8x22b": _attention("mixtral", 56, (48, 8), 128),
    "mixtral-8x7b": _attention("mixtral", 32, (32, 8), 128),
    "nemotron-3-nano-30b-a3b": {
        **_MAMBA_HEADS,
        "head_dim": 128,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "mamba_num_heads": 64,
        "num_key_value_heads": 2,
    },
    "nemotron-h-8b": {
        **_MAMBA_HEADS,
        "attention_head_dim": 128,
        "hidden_size": 4096,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "mamba_num_heads": 128,
        "num_key_value_heads": 8,
    },
    "olmo-2-32b": _attention("olmo2", 64, (40, 8), 128),
    "olmo-2-7b": _attention("olmo2", 32, (32, 32), 128),
    "phi-4": _attention("phi3", 40, (40, 10), 128),
    "qwen2.5-72b": _attention("qwen2", 80, (64, 8), 128, sliding_window=131072, use_sliding_window=False),
    "qwen2.5-7b": _attention("qwen2", 28, (28, 4), 128, sliding_window=131072, use_sliding_window=False),
    "qwen3-235b-a22b": _attention("qwen3_moe", 94, (64, 4), 128),
    "qwen3-30b-a3b": _attention("qwen3_moe", 48, (32, 4), 128),
    "qwen3-32b": _attention("qwen3", 64, (64, 8), 128),
    "qwen3-8b": _attention("qwen3", 36, (32, 8), 128),
    "qwen3-next-80b-a3b": {
        **_LINEAR_HEADS,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "linear_num_value_heads": 32,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "torch_dtype": "bfloat16",
    },
    "qwen3.5-397b-a17b": {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {
            **_LINEAR_HEADS,
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "linear_num_value_heads": 64,
            "mamba_ssm_dtype": "float32",
            "num_attention_heads": 32,
            "num_hidden_layers": 60,
        },
    },
    "step-3.5-flash": {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "head_dim": 128,
            "num_attention_groups": 8,
            "num_attention_heads": 96,
        },
        "head_dim": 128,
        # The last three entries are the draft layers'.
        "layer_types": [*["full_attention", *["sliding_attention"] * 3] * 12],
        "num_attention_groups": 8,
        "num_attention_heads": 64,
        "num_hidden_layers": 45,
        "num_nextn_predict_layers": 3,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
    },
}
"""By name. Multi-token prediction layers are no part of a layout."""

PRESET_ALIASES: Mapping[str, str] = {
    "deepseek-r1": "deepseek-v3",
    "gemma-4-26b": "gemma-4-26b-a4b",
    "llama-3.3-70b": "llama-3.1-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "nemotron-3-nano": "nemotron-3-nano-30b-a3b",
    "nemotron-h": "nemotron-h-8b",
    "qwen3-next": "qwen3-next-80b-a3b",
    "qwen3.5": "qwen3.5-397b-a17b",
    "qwen3.5-397b": "qwen3.5-397b-a17b",
}
