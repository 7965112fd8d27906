"""Architectures whose configuration says of each layer or pass what it keeps; latent rows between recurrent layers."""

from collections.abc import Mapping

import pytest

from unified_cache.components.layouts import size_hf_config
from unified_cache.components.layouts.families import RULES, class_of
from unified_cache.core.errors import LayoutError

HEADS: Mapping[str, object] = {
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
ROW = 2 * 4 * 64 * 2
"""K and V of one token in one layer, bf16."""
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
LATENT_ROW = (512 + 64) * 2


def blocks(*groups: int | None) -> list[dict[str, object]]:
    """Blocks of Nemotron-NAS; None for one without attention."""
    return [{"attention": {"no_op": group is None, "n_heads_in_group": group}} for group in groups]


@pytest.mark.parametrize(
    ("model_type", "change", "layers", "token_bytes", "window"),
    [
        # The dense layers at the front are full, each; the count to four begins behind them.
        (
            "cohere2_moe",
            {"first_k_dense_replace": 2, "sliding_window": 512},
            {"kv": 3, "swa": 5},
            {"kv": 3 * ROW, "swa": 5 * ROW},
            512,
        ),
        (
            "muse_glimmer_text",
            {"num_hidden_layers": 6, "sliding_window": 512},
            {"kv": 2, "swa": 4},
            {"kv": 2 * ROW},
            512,
        ),
        ("step3_text", {"num_key_value_heads": None, "head_dim": 256}, {"kv": 8}, {"kv": 8 * 2 * 256 * 2}, None),
        (
            "nemotron-nas",
            {"num_hidden_layers": 3, "num_key_value_heads": None, "block_configs": blocks(4, None, 8)},
            {"kv": 2},
            {"kv": ROW + ROW // 2},
            None,
        ),
        (
            "deci",
            {"num_hidden_layers": 2, "num_key_value_heads": None, "num_key_value_heads_per_layer": [4, 1]},
            {"kv": 2},
            {"kv": ROW + ROW // 4},
            None,
        ),
        ("mistral_large_3", LATENT, {"kv": 8}, {"kv": 8 * LATENT_ROW}, None),
        ("longcat_flash_ngram", {**LATENT, "num_layers": 4}, {"kv": 8}, {"kv": 8 * LATENT_ROW}, None),
        (
            "bailing_moe_v2_5",
            {**LATENT, "layer_group_size": 4},
            {"kv": 2, "mamba": 6},
            {"kv": 2 * LATENT_ROW, "mamba": 6 * 16 * 64 * 64 * 2},
            None,
        ),
        # Ten layers are two groups of four, and two behind them.
        (
            "bailing_moe_v3",
            {**LATENT, "num_hidden_layers": 10, "layer_group_size": 4, "short_conv_kernel_size": 4},
            {"kv": 4, "mamba": 6},
            {"kv": 4 * LATENT_ROW, "mamba": 6 * (3 * 16 * 64 * 3 * 2 + 16 * 64 * 64 * 4)},
            None,
        ),
        (
            "zamba2",
            {
                "head_dim": None,
                "kv_channels": 64,
                "layers_block_type": [*["mamba"] * 3, "hybrid"] * 2,
                "n_mamba_heads": 32,
                "mamba_d_state": 64,
                "mamba_d_conv": 4,
                "mamba_ngroups": 2,
            },
            {"kv": 2, "mamba": 8},
            {"kv": 2 * 2 * ROW, "mamba": 8 * (3 * (2048 + 2 * 2 * 64) * 2 + 2048 * 64 * 4)},
            None,
        ),
    ],
)
def test_a_configuration_that_lists_its_layers_is_laid_out_by_its_rule(
    model_type: str,
    change: Mapping[str, object],
    layers: Mapping[str, int],
    token_bytes: Mapping[str, int],
    window: int | None,
) -> None:
    sized = size_hf_config({**HEADS, **change, "model_type": model_type}, page_size=1)
    assert {name: count for name, count in sized.layers.items() if count} == layers
    found = {pool.name: pool.page_bytes for pool in sized.layout.pools}
    assert {name: found[name] for name in token_bytes} == token_bytes
    assert sized.window_tokens == window
    assert not sized.notes


@pytest.mark.parametrize(
    ("model_type", "change", "said"),
    [
        ("nemotron-nas", {"block_configs": blocks(*[3] * 8)}, "n_heads_in_group must be a divisor of"),
        ("nemotron-nas", {"block_configs": blocks(*[None] * 8)}, "must have a layer with attention, found none"),
        ("zamba2", {"n_mamba_heads": 8}, "layers_block_type must be a list with the kind of each layer"),
        ("cohere2_moe", {"first_k_dense_replace": 9}, "first_k_dense_replace must be at most num_hidden_layers 8"),
        ("hy_v4", {**LATENT, "layer_types": ["full_attention"] * 8}, "layer_types must hold nothing but"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused_by_its_name(
    model_type: str, change: Mapping[str, object], said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        size_hf_config({**HEADS, **change, "model_type": model_type})


def test_a_sparse_model_of_the_fourth_hunyuan_is_indexed() -> None:
    config = {**HEADS, **LATENT, "index_head_dim": 128, "layer_types": ["indexed_attention"] * 8, "model_type": "hy_v4"}
    as_glm = {**config, "model_type": "glm_moe_dsa"}
    assert size_hf_config(config).layout == size_hf_config(as_glm).layout


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("BailingMoeV2_5ForCausalLM", "bailing_moe_v2_5"),
        ("ChatGLMModel", "chatglm"),
        ("DeciLMForCausalLM", "decilm"),
        ("HCXVisionV2ForCausalLM", "hyperclovax_vision_v2"),
        ("Step3TextForCausalLM", "step3_text"),
    ],
)
def test_a_class_that_is_named_in_its_own_way_is_known(name: str, model_type: str) -> None:
    assert class_of(name) == model_type


@pytest.mark.parametrize(
    "name", ["Glm5NextForCausalLM", "InklingForCausalLM", "MiniMaxM3SparseForCausalLM", "Qwen4ExpForCausalLM"]
)
def test_a_class_whose_state_is_not_known_has_no_rule(name: str) -> None:
    assert class_of(name) is None


def test_a_model_of_mistral_is_read_by_the_type_that_engines_give_it() -> None:
    config = {**HEADS, **LATENT, "model_type": "deepseek_v3", "architectures": ["MistralLarge3ForCausalLM"]}
    assert RULES["mistral_large_3"] is RULES["deepseek_v3"]
    assert size_hf_config(config, page_size=1).layout.page_bytes == 8 * LATENT_ROW
