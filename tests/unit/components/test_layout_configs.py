"""Configurations of models: read as the model's own classes read them, or refused with the field's name."""

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified_cache.components.layouts import (
    PRESETS,
    from_hf_config,
    layout,
    preset_config,
    size_hf_config,
    size_preset,
)
from unified_cache.core.errors import LayoutError


def pool_bytes(
    config: Mapping[str, object], *, page_size: int | None = None, dtype: str | None = None
) -> dict[str, int]:
    return {pool.name: pool.page_bytes for pool in from_hf_config(config, page_size=page_size, dtype=dtype).pools}


GEMMA_3 = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
MIMO_5 = {
    "model_type": "mimo_v2_flash",
    "head_dim": 192,
    "v_head_dim": 128,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "layer_types": ["full_attention", "sliding_attention"],
}
GEMMA_4 = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "head_dim": 256,
    "num_hidden_layers": 12,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "sliding_window": 1024,
}


@pytest.mark.parametrize(
    ("config", "layers", "token_bytes", "window"),
    [
        # Gemma 3 4B as published leaves heads to the class.
        (GEMMA_3, {"kv": 5, "swa": 29}, {"kv": 5 * 4_096, "swa": 29 * 4_096}, 1_023),
        ({**GEMMA_3, "sliding_window_pattern": 2}, {"kv": 17, "swa": 17}, {"kv": 69_632, "swa": 69_632}, 1_023),
        # transformers 5 counts the query and doubles the heads; sliding_window_size does not count it.
        ({**MIMO_5, "sliding_window": 129}, {"kv": 1, "swa": 1}, {"kv": 2_560, "swa": 5_120}, 128),
        ({**MIMO_5, "sliding_window_size": 128, "sliding_window": 129}, {"kv": 1, "swa": 1}, {"swa": 5_120}, 128),
        # Without attention_k_eq_v, full layers have the heads of the others; the default of their dimension is 512.
        ({**GEMMA_4, "attention_k_eq_v": False}, {"kv": 2, "swa": 10}, {"kv": 2 * 32_768, "swa": 163_840}, 1_023),
        (GEMMA_4, {"kv": 2, "swa": 10}, {"kv": 2 * 8_192, "swa": 10 * 16_384}, 1_023),
        # The last layers borrow; the last of all is full, whatever its type says.
        ({**GEMMA_4, "num_kv_shared_layers": 6}, {"kv": 1, "swa": 5}, {"kv": 8_192, "swa": 5 * 16_384}, 1_023),
        ({**GEMMA_4, "layer_types": ["sliding_attention"] * 12}, {"kv": 1, "swa": 11}, {"kv": 8_192}, 1_023),
        (
            {**GEMMA_4, "per_layer_config": {"05": {"head_dim": 512, "num_key_value_heads": 2}, "11": {}}},
            {"kv": 2, "swa": 10},
            {"kv": 4_096 + 16_384, "swa": 163_840},
            1_023,
        ),
    ],
)
def test_a_configuration_is_read_as_its_class_reads_it(
    config: Mapping[str, object], layers: Mapping[str, int], token_bytes: Mapping[str, int], window: int
) -> None:
    sized = size_hf_config(config, page_size=1)
    assert sized.layers == layers
    assert sized.window_tokens == window
    assert {name: pool_bytes(config, page_size=1)[name] for name in token_bytes} == token_bytes


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"] * 24}, {"kv": 24, "swa": 24}),
        ({"no_rope_layers": [0, 1, 1] * 16}, {"kv": 16, "swa": 32}),
        ({"no_rope_layer_interval": 2}, {"kv": 24, "swa": 24}),
    ],
)
def test_layers_without_rotary_position_are_the_full_ones(
    change: Mapping[str, object], kinds: Mapping[str, int]
) -> None:
    text = preset_config("llama-4-scout")["text_config"]
    assert isinstance(text, dict)
    assert size_hf_config({"model_type": "llama4", "text_config": {**text, **change}}).layers == kinds
    assert size_hf_config({**text, **change}).layers == kinds


def test_ministral_alternates() -> None:
    config = {**preset_config("mistral-7b-v0.1"), "model_type": "ministral", "architectures": ["MinistralForCausalLM"]}
    types = ["full_attention", *["sliding_attention"] * 3] * 8
    sized = size_hf_config({**config, "layer_types": types, "sliding_window": 32_768})
    assert sized.layers == {"kv": 8, "swa": 24}
    assert sized.window_tokens == 32_768


def test_nemotron_lists_its_layers_in_two_ways() -> None:
    config = {**preset_config("nemotron-h-8b"), "hybrid_override_pattern": None, "num_hidden_layers": None}
    old = {**config, "layers_block_type": ["mamba", "mlp", "attention", "moe"]}
    new = {**config, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
    assert size_hf_config(old).layers == size_hf_config(new).layers == {"kv": 1, "mamba": 1}


def test_dtypes_of_state_and_cache_are_distinguished() -> None:
    config = preset_config("nemotron-h-8b")
    bf16 = pool_bytes({**config, "mamba_ssm_cache_dtype": "bfloat16"})
    assert bf16["mamba"] == 24 * (61_440 + 4_194_304 // 2)
    fp8 = pool_bytes(config, dtype="fp8")
    assert fp8 == {"kv": 16_384 * 64 // 2, "mamba": 102_137_856}
    fp32 = pool_bytes({**config, "torch_dtype": "float32"})
    assert fp32 == {"kv": 16_384 * 64 * 2, "mamba": 24 * (2 * 61_440 + 4_194_304)}


def test_a_class_that_is_known_speaks_for_a_type_that_is_not() -> None:
    own = {**preset_config("llama-3.1-8b"), "model_type": "someones_llama"}
    assert size_hf_config(own) == size_preset("llama-3.1-8b")
    # Types that are read alike do not contradict each other.
    assert size_hf_config({**own, "model_type": "olmo"}).layout == layout("llama-3.1-8b")


def test_a_class_name_stands_in_for_a_model_type() -> None:
    config = {name: value for name, value in preset_config("llama-3.1-8b").items() if name != "model_type"}
    assert from_hf_config(config) == layout("llama-3.1-8b")
    # A class that is not known does not contradict one that is.
    assert from_hf_config({**config, "model_type": "llama", "architectures": ["LlamaForTokens"]}) == from_hf_config(
        config
    )


BAD: tuple[tuple[str, Mapping[str, object], str], ...] = (
    # preset, change of its fields (of text_config where it has one), what the error names
    ("llama-3.1-8b", {"model_type": "bert", "architectures": ["BertModel"]}, "architectures must be a decoder's"),
    ("llama-3.1-8b", {"model_type": "t9", "architectures": None, "is_encoder_decoder": True}, "is_encoder_decoder"),
    ("llama-3.1-8b", {"model_type": 7}, "model_type must be a string"),
    ("llama-3.1-8b", {"model_type": None, "architectures": None}, "model_type must be given"),
    ("llama-3.1-8b", {"model_type": None, "architectures": ["BertModel"]}, "architectures must be known"),
    ("llama-3.1-8b", {"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    ("llama-3.1-8b", {"model_type": "mistral"}, "model_type must be llama, as architectures says"),
    ("llama-3.1-8b", {"num_hidden_layers": None}, "num_hidden_layers must be a positive integer"),
    ("llama-3.1-8b", {"num_hidden_layers": True}, "num_hidden_layers .* found True"),
    ("llama-3.1-8b", {"num_hidden_layers": 0}, "num_hidden_layers .* found 0"),
    ("llama-3.1-8b", {"num_hidden_layers": -32}, "num_hidden_layers .* found -32"),
    ("llama-3.1-8b", {"num_hidden_layers": 32.0}, "num_hidden_layers .* found 32.0"),
    ("llama-3.1-8b", {"num_hidden_layers": "32"}, "num_hidden_layers .* found '32'"),
    ("llama-3.1-8b", {"num_hidden_layers": 10**9}, "num_hidden_layers .* at most 4096"),
    ("llama-3.1-8b", {"num_key_value_heads": 7}, "num_key_value_heads must be a divisor"),
    ("llama-3.1-8b", {"hidden_size": 4097}, "hidden_size must be a multiple"),
    ("llama-3.1-8b", {"hidden_size": None}, "hidden_size"),
    ("llama-3.1-8b", {"head_dim": -128}, "head_dim"),
    ("llama-3.1-8b", {"torch_dtype": "int4"}, "dtype must be one of"),
    ("llama-3.1-8b", {"torch_dtype": 16}, "torch_dtype must be a string"),
    ("gpt-oss-20b", {"sliding_window": None}, "sliding_window"),
    ("gpt-oss-20b", {"sliding_window": 0}, "sliding_window"),
    ("gpt-oss-20b", {"sliding_window": 1}, "sliding_window must be at least 2"),
    ("gpt-oss-20b", {"sliding_window": 1 << 40}, "sliding_window"),
    ("gpt-oss-20b", {"head_dim": None}, "head_dim"),
    ("gpt-oss-20b", {"layer_types": ["full_attention"] * 23}, "layer_types must have 24 entries"),
    ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "layer_types must hold nothing but"),
    ("gpt-oss-20b", {"layer_types": [None] * 24}, "layer_types must hold nothing but"),
    ("gpt-oss-20b", {"layer_types": "full_attention"}, "layer_types must be a list"),
    ("gpt-oss-20b", {"per_layer_config": {"24": {}}}, "per_layer_config must be"),
    ("gpt-oss-20b", {"per_layer_config": {"-1": {}}}, "per_layer_config must be"),
    ("gpt-oss-20b", {"per_layer_config": []}, "per_layer_config must be an object"),
    ("gpt-oss-20b", {"per_layer_config": {"0": 3}}, "per_layer_config.0 must be an object"),
    ("gpt-oss-20b", {"per_layer_config": {"0": {"sliding_window": 64}}}, "per_layer_config must leave sliding_window"),
    ("gemma-3-27b", {"sliding_window": None}, r"text_config\.sliding_window"),
    ("gemma-3-27b", {"model_type": "gemma4_text"}, r"text_config\.model_type must be one of gemma3_text"),
    ("gemma-3-27b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma-3-27b", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma-4-31b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("gemma-4-31b", {"num_kv_shared_layers": 60}, "num_kv_shared_layers"),
    ("gemma-4-31b", {"num_kv_shared_layers": False}, "num_kv_shared_layers"),
    ("gemma-4-31b", {"global_head_dim": "512"}, "global_head_dim"),
    ("gemma-4-31b", {"attention_k_eq_v": 1}, "attention_k_eq_v must be true or false"),
    ("llama-4-scout", {"attention_chunk_size": None}, "attention_chunk_size"),
    ("llama-4-scout", {"no_rope_layers": [1] * 47}, "no_rope_layers must have 48 entries"),
    ("llama-4-scout", {"no_rope_layers": [2] * 48}, "no_rope_layers must hold nothing but"),
    ("mimo-v2-flash", {"hybrid_layer_pattern": [True] * 48}, "hybrid_layer_pattern must hold nothing but"),
    ("mimo-v2-flash", {"hybrid_layer_pattern": [0]}, "hybrid_layer_pattern must have 48 entries"),
    ("mimo-v2-flash", {"hybrid_layer_pattern": None}, "layer_types must be a list"),
    ("mimo-v2-flash", {"swa_num_key_value_heads": None}, "swa_num_key_value_heads"),
    ("mimo-v2-flash", {"sliding_window_size": -1}, "sliding_window_size"),
    ("mistral-7b-v0.1", {"sliding_window": -4096}, "sliding_window"),
    ("step-3.5-flash", {"layer_types": ["full_attention"] * 46}, "layer_types must have 45 or 48 entries"),
    ("step-3.5-flash", {"num_attention_groups": None}, "num_attention_groups"),
    (
        "step-3.5-flash",
        {"attention_other_setting": {"num_attention_groups": 7}},
        "num_key_value_heads must be a divisor",
    ),
    ("step-3.5-flash", {"attention_other_setting": 3}, "attention_other_setting must be an object"),
    ("qwen3-next-80b-a3b", {"linear_num_value_heads": 31}, "linear_num_value_heads must be a multiple"),
    ("qwen3-next-80b-a3b", {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim"),
    ("qwen3-next-80b-a3b", {"layer_types": ["linear_attention"] * 48}, "full-attention layer"),
    ("qwen3-next-80b-a3b", {"mamba_ssm_dtype": "int4"}, "mamba_ssm_dtype must be one of"),
    ("nemotron-h-8b", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern must be of the letters"),
    ("nemotron-h-8b", {"hybrid_override_pattern": None}, "layers_block_type must be a list"),
    ("nemotron-h-8b", {"num_hidden_layers": 51}, "num_hidden_layers must be 52"),
    ("nemotron-h-8b", {"n_groups": 7}, "mamba_num_heads must be a multiple"),
    ("nemotron-h-8b", {"ssm_state_size": None}, "ssm_state_size"),
    ("nemotron-h-8b", {"layers_block_type": []}, "layers_block_type must be 1 to"),
    ("deepseek-v3.2", {"kv_lora_rank": None}, "kv_lora_rank"),
    ("deepseek-v3.2", {"index_head_dim": 100}, "index_head_dim"),
    ("deepseek-v3.2", {"layer_types": ["indexed_attention"]}, "layer_types must have 61 entries"),
    ("deepseek-v4-flash", {"compress_ratios": None}, "compress_ratios must be a list"),
    ("deepseek-v4-flash", {"compress_ratios": [4] * 42}, "compress_ratios must have 43 or 44 entries"),
    ("deepseek-v4-flash", {"compress_ratios": [4] * 45}, "compress_ratios must have 43 or 44 entries"),
    ("deepseek-v4-flash", {"compress_ratios": [8] * 43}, "compress_ratios must hold nothing but"),
    ("deepseek-v4-flash", {"compress_ratios": [False] * 43}, "compress_ratios must hold nothing but"),
    ("deepseek-v4-flash", {"compress_ratios": [0] * 43}, "compress_ratios must name a compressed layer"),
    ("deepseek-v4-flash", {"head_dim": 256}, "head_dim must be 512"),
    ("deepseek-v4-flash", {"num_key_value_heads": 8}, "num_key_value_heads must be 1"),
    ("deepseek-v4-flash", {"compress_rates": {"compressed_sparse_attention": 8}}, "compressed_sparse_attention"),
    ("deepseek-v4-flash", {"sliding_window": 100}, "window 100"),
    ("deepseek-v4-flash", {"index_head_dim": None}, "index_head_dim"),
    ("deepseek-v4.1-flash", {"kv_source_layer_ids": [8, 14, 20]}, "layer 2 of ratio 2 must .* a source .* found None"),
    ("deepseek-v4.1-flash", {"kv_source_layer_ids": [2, 8, 14]}, "layer 20 of ratio 1 must .* a source .* found 14"),
    ("deepseek-v4.1-flash", {"kv_source_layer_ids": [2, 14, 8, 20]}, "source_layers must be ascending"),
    ("deepseek-v4.1-flash", {"kv_source_layer_ids": None}, r"text_config\.kv_source_layer_ids must be a list"),
    ("deepseek-v4.1-flash", {"compress_ratios": [4] * 40}, "compress_ratios must hold nothing but"),
    ("deepseek-v4.1-flash", {"num_nextn_predict_layers": 2}, "compress_ratios must have 40 or 42 entries"),
)


def changed(name: str, change: Mapping[str, object]) -> dict[str, object]:
    config = dict(preset_config(name))
    text = config.get("text_config")
    if isinstance(text, dict):
        return {**config, "text_config": {**text, **change}}
    return {**config, **change}


@pytest.mark.parametrize(("name", "change", "named"), BAD, ids=[f"{name}-{change}" for name, change, _ in BAD])
def test_a_bad_field_is_an_error_that_names_it(name: str, change: Mapping[str, object], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        from_hf_config(changed(name, change))


@pytest.mark.parametrize("text_config", [None, 3, []])
def test_a_wrapper_without_a_text_model_is_an_error(text_config: object) -> None:
    with pytest.raises(LayoutError, match="text_config must be an object"):
        from_hf_config({"model_type": "gemma3", "text_config": text_config})


@pytest.mark.parametrize(
    ("name", "page_size", "dtype"),
    [
        *(("llama-3.1-8b", size, None) for size in (0, -1, True, 1 << 40)),
        # Pages that kernels cannot have.
        *(("deepseek-v3.2", size, None) for size in (1, 96)),
        ("deepseek-v4-flash", 64, None),
        *(("deepseek-v4.1-flash", size, None) for size in (64, 129, 255)),
        *((name, None, "int3") for name in ("llama-3.1-8b", "deepseek-v4-pro", "deepseek-v3.2")),
    ],
)
def test_a_choice_that_is_none_is_an_error_that_names_it(name: str, page_size: int | None, dtype: str | None) -> None:
    with pytest.raises(LayoutError, match="page_size" if dtype is None else "dtype"):
        layout(name, page_size=page_size, dtype=dtype)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"llama"', "\x00", "[" * 100_000, f"{{{' ' * (1 << 24)}}}"], ids=len
)
def test_a_file_that_is_no_configuration_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(LayoutError, match=r"config\.json must"):
        from_hf_config(path)
    with pytest.raises(FileNotFoundError):
        from_hf_config(tmp_path / "none.json")


GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-1, 200), st.text(max_size=4), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(PRESETS)), GARBAGE, st.integers(0, 1000), st.integers(0, 1000))
def test_garbage_in_one_field_is_an_error_or_a_layout(name: str, garbage: object, which: int, where: int) -> None:
    config = copy.deepcopy(dict(preset_config(name)))
    text = config.get("text_config")
    target = text if isinstance(text, dict) and where % 4 else config
    target[sorted(target)[which % len(target)]] = garbage
    try:
        found = size_hf_config(config).layout
    except LayoutError as error:
        assert "found" in str(error)  # noqa: PT017 -- either outcome is right; both are checked
    else:
        assert found.components[0].hit_policy == "all_pages"
        assert found.page_bytes > 0
