"""Architectures by family, those that nobody knows, sizes by hand, and formats of K and V that engines quantise to."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from unified_cache.components.layouts import LayoutWarning, from_hf_config, size_by_hand, size_hf_config, size_preset
from unified_cache.components.layouts.families import FAMILIES, RULES, WRAPPERS, class_of
from unified_cache.core.errors import LayoutError

ATTENTION: Mapping[str, object] = {
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
ROW = 2 * 4 * 64 * 2
"""K and V of one token in one layer, bf16."""
MAMBA_2 = {"mamba_n_heads": 32, "mamba_d_head": "auto", "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_d_conv": 4}
MAMBA_2_STATE = 3 * (2048 + 2 * 64) * 2 + 32 * 64 * 64 * 4
"""Inputs of the convolution in bf16, and the state in fp32."""
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
LATENT_ROW = (512 + 64) * 2


def blocks(*groups: int | None) -> list[dict[str, object]]:
    """Blocks of Nemotron-NAS; None for one without attention."""
    return [{"attention": {"no_op": group is None, "n_heads_in_group": group}} for group in groups]


def sizes(config: Mapping[str, object], dtype: str | None = None) -> tuple[dict[str, int], dict[str, int]]:
    """Return layers and bytes by pool, at pages of one token where the architecture takes those."""
    page_size = 64 if "index_head_dim" in config else 1
    sized = size_hf_config(config, page_size=page_size, dtype=dtype)
    return dict(sized.layers), {pool.name: pool.page_bytes // page_size for pool in sized.layout.pools}


ONE_EACH = {"num_key_value_heads": None}
"""Each query head has K and V of its own, where no other field says how many have."""
SWA = {"sliding_window": 512}
DBRX = {**dict.fromkeys(ATTENTION), "d_model": 1024, "n_heads": 16, "n_layers": 8, "attn_config": {"kv_n_heads": 4}}
BORROWING = {"num_kv_shared_layers": 3, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2}
JAMBA = {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
KIMI = {"full_attn_layers": [4, 8], "num_heads": 8, "head_dim": 128, "short_conv_kernel_size": 4}
ZAMBA = {"head_dim": None, "kv_channels": 64, "layers_block_type": [*["mamba"] * 3, "hybrid"] * 2}
ZAMBA_MAMBA = {"n_mamba_heads": 32, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_ngroups": 2}
INDEXED = {**LATENT, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("model_type", "change", "layers", "layer_bytes"),
    [
        # ``layer_bytes``: of a token, or of a state, in a layer, on average; ROW in attention where nothing is said
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, {"kv": 8}, {}),
        ("qwen2", {**SWA, "use_sliding_window": True, "max_window_layers": 6}, {"kv": 6, "swa": 2}, {}),
        ("qwen3_moe", {}, {"kv": 8}, {}),
        ("phi3", {**ONE_EACH, "sliding_window": 2047}, {"swa": 8}, {"swa": 4 * ROW}),
        ("gpt_bigcode", {**ONE_EACH, "multi_query": True}, {"kv": 8}, {"kv": ROW // 4}),
        ("falcon", {**ONE_EACH, "multi_query": True, "num_kv_heads": 16}, {"kv": 8}, {"kv": ROW // 4}),
        (
            "falcon",
            {**ONE_EACH, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8},
            {"kv": 8},
            {"kv": 2 * ROW},
        ),
        ("dbrx", DBRX, {"kv": 8}, {}),
        ("olmo3", SWA, {"kv": 2, "swa": 6}, {}),
        ("afmoe", SWA, {"kv": 2, "swa": 6}, {}),
        ("exaone4", {**SWA, "sliding_window_pattern": "LLG"}, {"kv": 3, "swa": 5}, {}),
        ("exaone4", {"sliding_window": None}, {"kv": 8}, {}),
        ("gemma3n_text", {**SWA, **BORROWING}, {"kv": 1, "swa": 4}, {}),
        (
            "minimax",
            {"layer_types": ["linear_attention", "full_attention"] * 4},
            {"kv": 4, "mamba": 4},
            {"mamba": 16 * 64 * 64 * 2},
        ),
        ("lfm2", {"full_attn_idxs": [2, 5], "conv_L_cache": 3}, {"kv": 2, "mamba": 6}, {"mamba": 1024 * 2 * 2}),
        (
            "lfm2_moe",
            {"layer_types": [*["conv"] * 3, "full_attention"] * 2, "conv_L_cache": 3},
            {"kv": 2, "mamba": 6},
            {"mamba": 1024 * 2 * 2},
        ),
        ("falcon_h1", {**MAMBA_2, "mamba_d_ssm": 2048}, {"kv": 8, "mamba": 8}, {"mamba": MAMBA_2_STATE}),
        ("bamba", {**MAMBA_2, "attn_layer_indices": [3]}, {"kv": 1, "mamba": 7}, {"mamba": MAMBA_2_STATE}),
        (
            "granitemoehybrid",
            {**MAMBA_2, "layer_types": [*["mamba"] * 7, "attention"]},
            {"kv": 1, "mamba": 7},
            {"mamba": MAMBA_2_STATE},
        ),
        ("jamba", {**JAMBA, "num_hidden_layers": 6}, {"kv": 1, "mamba": 5}, {"mamba": 2048 * 3 * 2 + 2048 * 16 * 4}),
        (
            "falcon_mamba",
            {"intermediate_size": 2048, "state_size": 16, "conv_kernel": 4},
            {"mamba": 8},
            {"mamba": 2048 * 3 * 2 + 2048 * 16 * 4},
        ),
        (
            "kimi_linear",
            {**LATENT, "linear_attn_config": KIMI},
            {"kv": 2, "mamba": 6},
            {"kv": LATENT_ROW, "mamba": 3 * 8 * 128 * 3 * 2 + 8 * 128 * 128 * 4},
        ),
        ("longcat_flash", {**LATENT, "num_layers": 8, "num_hidden_layers": None}, {"kv": 16}, {"kv": LATENT_ROW}),
        ("longcat_flash_ngram", {**LATENT, "num_layers": 4}, {"kv": 8}, {"kv": LATENT_ROW}),
        ("glm_moe_dsa", INDEXED, {"kv": 8, "indexer": 8}, {"kv": LATENT_ROW, "indexer": 132}),
        (
            "glm_moe_dsa",
            {**INDEXED, "index_topk_freq": 4},
            {"kv": 8, "indexer": 3},
            {"kv": LATENT_ROW, "indexer": 132},
        ),
        ("hy_v4", {**INDEXED, "layer_types": ["indexed_attention"] * 8}, {"kv": 8, "indexer": 8}, {"kv": LATENT_ROW}),
        # The dense layers at the front are full, each; the count to four begins behind them.
        ("cohere2_moe", {**SWA, "first_k_dense_replace": 2}, {"kv": 3, "swa": 5}, {}),
        ("muse_glimmer_text", {**SWA, "num_hidden_layers": 6}, {"kv": 2, "swa": 4}, {}),
        ("step3_text", {**ONE_EACH, "head_dim": 256}, {"kv": 8}, {"kv": 2 * 256 * 2}),
        (
            "nemotron-nas",
            {**ONE_EACH, "num_hidden_layers": 3, "block_configs": blocks(4, None, 8)},
            {"kv": 2},
            {"kv": (ROW + ROW // 2) // 2},
        ),
        (
            "deci",
            {**ONE_EACH, "num_hidden_layers": 2, "num_key_value_heads_per_layer": [4, 1]},
            {"kv": 2},
            {"kv": (ROW + ROW // 4) // 2},
        ),
        ("mistral_large_3", LATENT, {"kv": 8}, {"kv": LATENT_ROW}),
        (
            "bailing_moe_v2_5",
            {**LATENT, "layer_group_size": 4},
            {"kv": 2, "mamba": 6},
            {"kv": LATENT_ROW, "mamba": 16 * 64 * 64 * 2},
        ),
        # Ten layers are two groups of four, and two behind them.
        (
            "bailing_moe_v3",
            {**LATENT, "num_hidden_layers": 10, "layer_group_size": 4, "short_conv_kernel_size": 4},
            {"kv": 4, "mamba": 6},
            {"kv": LATENT_ROW, "mamba": 3 * 16 * 64 * 3 * 2 + 16 * 64 * 64 * 4},
        ),
        (
            "zamba2",
            {**ZAMBA, **ZAMBA_MAMBA},
            {"kv": 2, "mamba": 8},
            {"kv": 2 * ROW, "mamba": 3 * (2048 + 2 * 2 * 64) * 2 + 2048 * 64 * 4},
        ),
    ],
)
def test_a_family_is_laid_out_by_its_rule(
    model_type: str, change: Mapping[str, object], layers: Mapping[str, int], layer_bytes: Mapping[str, int]
) -> None:
    sized = size_hf_config({**ATTENTION, **change, "model_type": model_type}, page_size=64)
    assert {name: count for name, count in sized.layers.items() if count} == layers
    expected = {"kv": 0} | {
        name: count * {"kv": ROW, "swa": ROW, "indexer": 132, **layer_bytes}[name] * (1 if name == "mamba" else 64)
        for name, count in layers.items()
    }
    assert {pool.name: pool.page_bytes for pool in sized.layout.pools} == expected
    # The attention of Gemma 3n counts the token itself.
    itself = {"sliding_window": 511} if model_type == "gemma3n_text" else {}
    assert sized.window_tokens == ({**change, **itself}["sliding_window"] if "swa" in layers else None)
    assert not sized.notes


def test_no_architecture_is_in_two_families() -> None:
    assert sum(len(models.split()) for _, models in FAMILIES) == len(RULES)
    assert {inner for inners in WRAPPERS.values() for inner in inners} <= set(RULES)
    assert not set(RULES) & set(WRAPPERS)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("LlamaForCausalLM", "llama"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("DeepseekV32ForCausalLM", "deepseek_v32"),
        ("Gemma3ForCausalLM", "gemma3_text"),
        ("Gemma3ForConditionalGeneration", "gemma3"),
        ("GPT2LMHeadModel", "gpt2"),
        ("MiMoV2FlashForCausalLM", "mimo_v2_flash"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
        # Named in their own way.
        ("BailingMoeV2_5ForCausalLM", "bailing_moe_v2_5"),
        ("ChatGLMModel", "chatglm"),
        ("DeciLMForCausalLM", "decilm"),
        ("HCXVisionV2ForCausalLM", "hyperclovax_vision_v2"),
        ("Step3TextForCausalLM", "step3_text"),
        # No decoders, and those whose state is not known.
        ("BertForMaskedLM", None),
        ("SomethingForCausalLM", None),
        ("Glm5NextForCausalLM", None),
        ("InklingForCausalLM", None),
        ("MiniMaxM3SparseForCausalLM", None),
        ("Qwen4ExpForCausalLM", None),
    ],
)
def test_a_class_is_named_as_its_type_is(name: str, model_type: str | None) -> None:
    assert class_of(name) == model_type


NEW = {**ATTENTION, "model_type": "qwen33", "architectures": ["Qwen33ForCausalLM"]}


def test_an_unknown_architecture_of_plain_attention_is_laid_out_as_that_and_says_so() -> None:
    sized = size_hf_config(NEW, page_size=1)
    assert {pool.name: pool.page_bytes for pool in sized.layout.pools} == {"kv": 8 * ROW}
    (note,) = sized.notes
    said = "model_type 'qwen33' is not known, and was laid out as plain attention, layers 8 in kv; did you mean qwen3"
    assert note.startswith(said)
    with pytest.warns(LayoutWarning, match="qwen33"):
        assert from_hf_config(NEW, page_size=1) == sized.layout


def test_fields_of_an_unknown_architecture_say_how_it_is_laid_out() -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    windows = size_hf_config({**NEW, "layer_types": kinds, "sliding_window": 512}, page_size=1)
    assert (windows.layers, windows.window_tokens) == ({"kv": 4, "swa": 4}, 512)
    latent = size_hf_config({**NEW, **LATENT}, page_size=1)
    assert {pool.name: pool.page_bytes for pool in latent.layout.pools} == {"kv": 8 * 1152}
    assert "latent rows" in latent.notes[0]
    # Which layers have the window is not said: all of what they could need is kept.
    unsaid = size_hf_config({**NEW, "sliding_window": 512})
    assert (unsaid.layers, unsaid.window_tokens) == ({"kv": 8}, None)
    assert "sliding_window is left out" in unsaid.notes[0]


@pytest.mark.parametrize(
    "field",
    [
        "mamba_d_state",
        "ssm_state_size",
        "linear_num_key_heads",
        "attn_layer_period",
        "index_head_dim",
        "block_configs",
        "short_conv_kernel_size",
        "sparse_attention_config",
    ],
)
def test_an_unknown_architecture_that_keeps_more_than_attention_is_refused_with_the_field(field: str) -> None:
    with pytest.raises(LayoutError, match=f"whose field {field} means more than plain attention"):
        size_hf_config({**NEW, field: 16})
    for more in ({}, LATENT):
        with pytest.raises(LayoutError, match="layer_types must hold nothing but"):
            size_hf_config({**NEW, **more, "layer_types": ["linear_attention"] * 8})


def test_an_unknown_multimodal_model_is_read_by_its_text_model() -> None:
    text = {**ATTENTION, "model_type": "qwen3"}
    for name in ("text_config", "llm_config", "language_config"):
        sized = size_hf_config({"model_type": "someones_vision", name: text}, page_size=1)
        assert (sized.architecture, sized.notes) == ("qwen3", ())
    omni = {"model_type": "someones_omni", "thinker_config": {"model_type": "thinker", "text_config": text}}
    assert size_hf_config(omni, page_size=1).layout.page_bytes == 8 * ROW


@pytest.mark.parametrize(
    ("dtype", "row"),
    [
        ("auto", ROW),
        ("int8", ROW // 2),
        ("fp8_inc", ROW // 2),
        ("fp8_per_token_head", 2 * 4 * (64 + 4)),
        ("int8_per_token_head", 2 * 4 * (64 + 4)),
        ("nvfp4", 2 * 4 * (32 + 4)),
        ("fp4_e2m1", 2 * 4 * (32 + 4)),
    ],
)
def test_a_quantised_format_is_counted_with_its_scales(dtype: str, row: int) -> None:
    config = {**ATTENTION, "model_type": "llama"}
    assert sizes(config, dtype) == ({"kv": 8}, {"kv": 8 * row})


@pytest.mark.parametrize(
    ("quantization", "row"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, ROW // 2),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, ROW // 2),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, 2 * 4 * 36),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8"}, ROW // 2),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, 2 * 4 * 36),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, ROW // 2),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "auto"}, ROW),
        ({"quant_method": "fp8"}, ROW),
    ],
)
def test_a_quantised_checkpoint_says_what_k_and_v_are_kept_in(quantization: Mapping[str, object], row: int) -> None:
    config = {**ATTENTION, "model_type": "llama", "quantization_config": quantization}
    assert sizes(config) == ({"kv": 8}, {"kv": 8 * row})
    assert sizes(config, "bfloat16") == ({"kv": 8}, {"kv": 8 * ROW})


def test_a_quantisation_beside_the_configuration_counts_where_the_configuration_has_none(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**ATTENTION, "model_type": "llama"}))
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    (full,) = from_hf_config(tmp_path, page_size=1).pools
    assert full.page_bytes == 8 * ROW // 2
    assert from_hf_config(config, page_size=1).pools == (full,)
    config.write_text(json.dumps({**ATTENTION, "model_type": "llama", "quantization_config": {"quant_method": "fp8"}}))
    (full,) = from_hf_config(config, page_size=1).pools
    assert full.page_bytes == 8 * ROW


def test_the_fields_of_a_text_model_may_stand_in_the_configuration_of_the_whole() -> None:
    text = {**ATTENTION, "sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"] * 4}
    flat = {**text, "model_type": "step3p7", "num_attention_groups": ATTENTION["num_key_value_heads"]}
    assert sizes(flat) == sizes({**flat, "model_type": "step3p5"})


def test_sizes_by_hand_are_those_of_a_configuration() -> None:
    assert size_by_hand(36, 8, 128).layout == size_preset("qwen3-8b").layout
    assert (
        size_by_hand(36, 8, 128, page_size=16, dtype="fp8").layout
        == size_preset("qwen3-8b", page_size=16, dtype="fp8").layout
    )
    for sizes_given in ((0, 8, 128), (36, -1, 128), (36, 8, 1 << 40)):
        with pytest.raises(LayoutError, match="must be a positive integer"):
            size_by_hand(*sizes_given)


# ---- configurations that say of each layer or pass what it keeps ---------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "change", "said"),
    [
        ("nemotron-nas", {"block_configs": blocks(*[3] * 8)}, "n_heads_in_group must be a divisor of"),
        ("nemotron-nas", {"block_configs": blocks(*[None] * 8)}, "must have a layer with attention, found none"),
        ("zamba2", {"n_mamba_heads": 8}, "layers_block_type must be a list with the kind of each layer"),
        ("cohere2_moe", {"first_k_dense_replace": 9}, "first_k_dense_replace must be at most num_hidden_layers 8"),
        ("hy_v4", {**LATENT, "layer_types": ["full_attention"] * 8}, "layer_types must hold nothing but"),
        ("jamba", {**JAMBA, "attn_layer_offset": 4}, "must be less than attn_layer_period 4"),
        (
            "exaone4",
            {"sliding_window": 64, "sliding_window_pattern": "LLXG"},
            "or a text of the letters L and G",
        ),
        ("zamba2", {"num_attention_heads": 7}, "hidden_size must be a multiple of half of num_attention_heads 7"),
        ("bamba", {**MAMBA_2, "mamba_n_heads": 7}, "mamba_n_heads must be a divisor of"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused_by_its_name(
    model_type: str, change: Mapping[str, object], said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        size_hf_config({**ATTENTION, **change, "model_type": model_type})


def test_a_model_of_mistral_is_read_by_the_type_that_engines_give_it() -> None:
    config = {**ATTENTION, **LATENT, "model_type": "deepseek_v3", "architectures": ["MistralLarge3ForCausalLM"]}
    assert RULES["mistral_large_3"] is RULES["deepseek_v3"]
    assert size_hf_config(config, page_size=1).layout.page_bytes == 8 * LATENT_ROW
