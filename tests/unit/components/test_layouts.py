"""Layouts of published models against their published sizes, and the command that shows them."""

import io
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.cli.layout import layout_as_json, print_layout, size_named
from unified_cache.components.deepseek_v4 import DeepSeekV4
from unified_cache.components.layouts import (
    PRESETS,
    SizedLayout,
    from_hf_config,
    layout,
    preset_config,
    size_hf_config,
    size_preset,
)
from unified_cache.components.layouts.hf_config import DRAFT_LAYERS
from unified_cache.components.layouts.presets import PRESET_ALIASES
from unified_cache.core.errors import LayoutError
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.window import SPAN_ALL

PUBLISHED: Mapping[str, tuple[Mapping[str, int], Mapping[str, int], int | None]] = {
    # layers, bytes of all of them per token, or of recurrent state per checkpoint, in bf16; tokens of windows
    "gpt-oss-20b": ({"kv": 12, "swa": 12}, {"kv": 24_576, "swa": 24_576}, 127),
    "gpt-oss-120b": ({"kv": 18, "swa": 18}, {"kv": 36_864, "swa": 36_864}, 127),
    "gemma-3-27b": ({"kv": 10, "swa": 52}, {"kv": 81_920, "swa": 425_984}, 1_023),
    "gemma-4-31b": ({"kv": 10, "swa": 50}, {"kv": 81_920, "swa": 819_200}, 1_023),
    "gemma-4-26b-a4b": ({"kv": 5, "swa": 25}, {"kv": 20_480, "swa": 204_800}, 1_023),
    "llama-4-scout": ({"kv": 12, "swa": 36}, {"kv": 49_152, "swa": 147_456}, 8_192),
    "llama-4-maverick": ({"kv": 12, "swa": 36}, {"kv": 49_152, "swa": 147_456}, 8_192),
    "mimo-v2-flash": ({"kv": 9, "swa": 39}, {"kv": 23_040, "swa": 199_680}, 128),
    "mimo-v2.5-pro": ({"kv": 10, "swa": 60}, {"kv": 51_200, "swa": 307_200}, 128),
    "step-3.5-flash": ({"kv": 12, "swa": 33}, {"kv": 49_152, "swa": 135_168}, 512),
    "mistral-7b-v0.1": ({"kv": 0, "swa": 32}, {"kv": 0, "swa": 131_072}, 4_096),
    "gemma-2-9b": ({"kv": 21, "swa": 21}, {"kv": 172_032, "swa": 172_032}, 4_095),
    "gemma-2-27b": ({"kv": 23, "swa": 23}, {"kv": 188_416, "swa": 188_416}, 4_095),
    "command-r7b": ({"kv": 8, "swa": 24}, {"kv": 32_768, "swa": 98_304}, 4_096),
    "command-a": ({"kv": 16, "swa": 48}, {"kv": 65_536, "swa": 196_608}, 4_096),
    "exaone-4.0-32b": ({"kv": 16, "swa": 48}, {"kv": 65_536, "swa": 196_608}, 4_096),
    "qwen3-next-80b-a3b": ({"kv": 12, "mamba": 36}, {"kv": 24_576, "mamba": 77_266_944}, None),
    "qwen3.5-397b-a17b": ({"kv": 15, "mamba": 45}, {"kv": 30_720, "mamba": 192_061_440}, None),
    "nemotron-h-8b": ({"kv": 4, "mamba": 24}, {"kv": 16_384, "mamba": 102_137_856}, None),
    "nemotron-3-nano-30b-a3b": ({"kv": 6, "mamba": 23}, {"kv": 6_144, "mamba": 49_082_368}, None),
    "minimax-text-01": ({"kv": 10, "mamba": 70}, {"kv": 40_960, "mamba": 146_800_640}, None),
    "llama-3.1-8b": ({"kv": 32}, {"kv": 131_072}, None),
    "llama-3.1-70b": ({"kv": 80}, {"kv": 327_680}, None),
    "mistral-7b-v0.3": ({"kv": 32}, {"kv": 131_072}, None),
    "mixtral-8x7b": ({"kv": 32}, {"kv": 131_072}, None),
    "mixtral-8x22b": ({"kv": 56}, {"kv": 229_376}, None),
    "qwen2.5-7b": ({"kv": 28}, {"kv": 57_344}, None),
    "qwen2.5-72b": ({"kv": 80}, {"kv": 327_680}, None),
    "qwen3-8b": ({"kv": 36}, {"kv": 147_456}, None),
    "qwen3-32b": ({"kv": 64}, {"kv": 262_144}, None),
    "qwen3-30b-a3b": ({"kv": 48}, {"kv": 98_304}, None),
    "qwen3-235b-a22b": ({"kv": 94}, {"kv": 192_512}, None),
    "phi-4": ({"kv": 40}, {"kv": 204_800}, None),
    "glm-4.5": ({"kv": 92}, {"kv": 376_832}, None),
    "glm-4.5-air": ({"kv": 46}, {"kv": 188_416}, None),
    "minimax-m2": ({"kv": 62}, {"kv": 253_952}, None),
    "olmo-2-7b": ({"kv": 32}, {"kv": 524_288}, None),
    "olmo-2-32b": ({"kv": 64}, {"kv": 262_144}, None),
    "granite-3.3-8b": ({"kv": 40}, {"kv": 163_840}, None),
    "llama-3.1-405b": ({"kv": 126}, {"kv": 516_096}, None),
}


def pool_bytes(sized: SizedLayout) -> dict[str, int]:
    return {pool.name: pool.page_bytes for pool in sized.layout.pools}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_the_published_sizes(name: str) -> None:
    layers, published_bytes, window_tokens = PUBLISHED[name]
    for page_size in (1, 16, 64, 128):
        sized = size_preset(name, page_size=page_size)
        assert (sized.layers, sized.window_tokens) == (layers, window_tokens)
        assert not any(pool.replicated for pool in sized.layout.pools)
        page_bytes = {pool: count * (1 if pool == "mamba" else page_size) for pool, count in published_bytes.items()}
        assert pool_bytes(sized) == page_bytes
        spans = {"kv": SPAN_ALL, "swa": math.ceil((window_tokens or 0) / page_size), "mamba": 1}
        assert [component.span for component in sized.layout.components] == [spans[pool] for pool in layers]
    if layers.keys() == {"kv"}:
        assert size_preset(name).layout.page_size == 64
        assert pool_bytes(size_preset(name, page_size=1, dtype="fp8")) == {"kv": published_bytes["kv"] // 2}


LATENT = {"deepseek-v2": 60, "deepseek-v2-lite": 27, "deepseek-v3": 61, "kimi-k2": 61}
"""Layers of models that keep one row of 576 values per token in each."""


@pytest.mark.parametrize("name", LATENT)
def test_a_model_of_latent_attention_keeps_one_row_per_token_alike_on_all_ranks(name: str) -> None:
    sized = size_preset(name)
    assert sized.layers == {"kv": LATENT[name]}
    assert pool_bytes(sized) == {"kv": LATENT[name] * 1_152 * 64}
    assert all(pool.replicated for pool in sized.layout.pools)
    assert pool_bytes(size_preset(name, dtype="fp8")) == {"kv": LATENT[name] * 576 * 64}


@pytest.mark.parametrize(
    ("dtype", "row", "token_bytes", "total"),
    [
        ("fp8", 656, 40_016, 48_068),
        ("bfloat16", 1_152, 70_272, 78_324),
        (None, 1_152, 70_272, 78_324),
        ("fp8_raw", 576, 35_136, 43_188),
    ],
)
def test_deepseek_v32_has_the_published_sizes(dtype: str | None, row: int, token_bytes: int, total: int) -> None:
    sized = size_preset("deepseek-v3.2", dtype=dtype)
    assert sized.layout.page_size == 64
    assert sized.layers == {"kv": 61, "indexer": 61}
    assert pool_bytes(sized) == {"kv": 61 * 64 * row, "indexer": 61 * 8_448}
    assert (row * 61, row * 61 + 132 * 61) == (token_bytes, total)
    assert sized.layout.page_bytes == total * 64
    assert [component.hit_policy for component in sized.layout.components] == ["all_pages"]


@pytest.mark.parametrize(
    ("name", "ratios", "layers", "full", "swa"),
    [
        ("deepseek-v4-flash", (0, 0, 4, *(128, 4) * 20), (21, 20, 43), 998_208, 8_160_000),
        ("deepseek-v4-pro", (128, 128, *(4, 128) * 29, 4), (30, 31, 61), 1_430_208, 11_592_960),
    ],
)
def test_deepseek_v4_is_read_as_its_ratios_say_and_has_the_published_sizes(
    name: str, ratios: tuple[int, ...], layers: tuple[int, int, int], full: int, swa: int
) -> None:
    sized = size_preset(name)
    csa, hca, every = layers
    assert sized.layout == DeepSeekV4(ratios).layout()
    assert sized.layout.page_size == 256
    assert sized.layers == {
        "kv": 0,
        "deepseek_v4_c4": csa,
        "deepseek_v4_c4_indexer": csa,
        "deepseek_v4_c128": hca,
        "swa": every,
        "deepseek_v4_c4_state": csa,
        "deepseek_v4_c4_indexer_state": csa,
    }
    assert [sum(pool.page_bytes for pool in each.pools) for each in sized.layout.components] == [full, swa]
    assert (sized.window_tokens, sized.layout.components[1].span) == (128, 1)


def test_layers_that_borrow_their_state_keep_none() -> None:
    config = preset_config("gemma-4-26b-a4b")
    text = config["text_config"]
    assert isinstance(text, dict)
    sharing = {**config, "text_config": {**text, "num_hidden_layers": 14, "num_kv_shared_layers": 7}}
    assert size_hf_config(sharing).layers == {"kv": 1, "swa": 6}
    none_left = {**config, "text_config": {**text, "num_hidden_layers": 12, "num_kv_shared_layers": 9}}
    with pytest.raises(LayoutError, match="num_kv_shared_layers must be so few"):
        from_hf_config(none_left)


def test_the_sources_of_deepseek_v4_1_keep_rows_and_keys_and_every_layer_a_window() -> None:
    sized = size_preset("deepseek-v4.1-flash")
    assert pool_bytes(sized) == {
        "kv": 0,
        "deepseek_v4_c1": 149_760,
        "deepseek_v4_c1_indexer": 256 * 68,
        "deepseek_v4_c2": 3 * 74_880,  # as SGLang's pages of 128 rows
        "deepseek_v4_c2_indexer": 3 * 128 * 68,
        "swa": 40 * 149_760,
    }
    assert [component.span for component in sized.layout.components] == [SPAN_ALL, 1]
    fp4 = pool_bytes(size_preset("deepseek-v4.1-flash", dtype="v41_fp4"))
    assert (fp4["deepseek_v4_c1"], fp4["swa"]) == (256 * 288, 40 * 256 * 528)


def test_the_text_model_of_deepseek_v4_1_is_read_alone_too() -> None:
    text = preset_config("deepseek-v4.1-flash")["text_config"]
    assert isinstance(text, dict)
    assert from_hf_config({**text, "model_type": "deepseek_v41"}) == layout("deepseek-v4.1-flash")


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("name", DRAFT_LAYERS)
def test_draft_layers_are_left_out_by_the_name_of_their_field_and_the_cost_of_one_is_said(name: str) -> None:
    sized = size_hf_config({**LLAMA, name: 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sized.layout == from_hf_config(LLAMA) == from_hf_config({**LLAMA, name: 1})
    (left_out,) = sized.left_out
    assert left_out.startswith(f"draft (MTP) layers are left out, {name} says 2; ")
    assert left_out.endswith(f"takes {2 * 2 * 64 * 2} bytes per token in kv")
    assert not size_hf_config({**LLAMA, name: 0}).left_out
    assert not size_hf_config({**LLAMA, name: 1, "use_mtp": False}).left_out
    assert layout_as_json(sized)["notes"] == [left_out]


def test_a_draft_layer_of_a_model_with_windows_is_said_in_each_kind_of_its_attention() -> None:
    (left_out,) = size_preset("step-3.5-flash").left_out
    assert "num_nextn_predict_layers says 3" in left_out
    assert left_out.endswith("takes 4,096 bytes per token in kv or 4,096 bytes per token in swa")


def test_without_head_dim_qwen3_moe_shares_the_hidden_size_out_among_its_heads() -> None:
    config = {**LLAMA, "model_type": "qwen3_moe"}
    for absent in (config, {**config, "head_dim": None}):
        assert from_hf_config(absent) == from_hf_config({**config, "head_dim": 64})
    with pytest.raises(LayoutError, match="head_dim must be a positive integer"):
        from_hf_config({**config, "model_type": "qwen3", "head_dim": None})


def test_the_entry_of_a_draft_layer_makes_no_layer() -> None:
    config = preset_config("deepseek-v4-flash")
    ratios = config["compress_ratios"]
    assert isinstance(ratios, list)
    assert len(ratios) == 44
    assert from_hf_config({**config, "compress_ratios": ratios[:43]}) == layout("deepseek-v4-flash")
    assert from_hf_config({**config, "num_nextn_predict_layers": None}) == layout("deepseek-v4-flash")
    with pytest.raises(LayoutError, match="compress_ratios must have 43 entries"):
        from_hf_config({**config, "num_nextn_predict_layers": 0})


def test_layer_types_say_the_same_as_ratios() -> None:
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    types = [names[ratio] for ratio in (0, 0, 4, *(128, 4) * 20)]
    config = {**preset_config("deepseek-v4-flash"), "layer_types": types}
    assert from_hf_config({**config, "compress_ratios": None}) == layout("deepseek-v4-flash")
    assert from_hf_config(config) == layout("deepseek-v4-flash")
    with pytest.raises(LayoutError, match="what layer_types says"):
        from_hf_config({**config, "layer_types": [*types[1:], types[0]]})


@pytest.mark.parametrize("dtype", ["v41", "v41_fp4", "uniform_fp8"])
def test_the_dtype_of_deepseek_v4_is_a_row_format(dtype: str) -> None:
    assert pool_bytes(size_preset("deepseek-v4-flash", dtype=dtype)) != pool_bytes(size_preset("deepseek-v4-flash"))
    assert layout("deepseek-v4-flash", dtype="fp8_e4m3") == layout("deepseek-v4-flash", dtype="v4")


def test_a_million_tokens_of_deepseek_v4_cost_what_is_published() -> None:
    full, swa = size_preset("deepseek-v4-flash").costs(sealed=False)
    assert full.dense_bytes == full.trailing_bytes == 3_907 * 998_208
    assert round(full.dense_bytes / 1e9, 3) == 3.900
    assert round(full.dense_bytes / (1 << 30), 3) == 3.632
    assert round(swa.dense_bytes / 1e9, 1) == 31.9
    assert swa.trailing_bytes == 8_160_000


def test_a_sealed_page_costs_a_header_in_every_pool_with_bytes() -> None:
    sized = size_preset("deepseek-v4-flash")
    bare, sealed = sized.costs(sealed=False, tokens=512), sized.costs(sealed=True, tokens=512)
    extra = [a.dense_bytes - b.dense_bytes for a, b in zip(sealed, bare, strict=True)]
    assert extra == [2 * 3 * HEADER_BYTES, 2 * 3 * HEADER_BYTES]
    assert sealed[1].trailing_bytes == 8_160_000 + 3 * HEADER_BYTES


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 10**7))
def test_trailing_pages_never_cost_more_than_all(name: str, tokens: int) -> None:
    first, *others = size_preset(name).costs(sealed=True, tokens=tokens)
    assert first.trailing_bytes == first.dense_bytes
    assert all(cost.trailing_bytes <= cost.dense_bytes for cost in others)


def test_a_preset_survives_a_file_and_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset_config("gemma-4-31b")))
    assert from_hf_config(path) == from_hf_config(str(tmp_path)) == layout("gemma-4-31b")


def test_an_alias_and_capitals_name_a_preset() -> None:
    assert set(PRESET_ALIASES.values()) <= set(PRESETS)
    assert layout("Qwen3-Next") == layout("qwen3-next-80b-a3b")
    with pytest.raises(LayoutError, match="preset must be one of"):
        layout("llama-5")
    with pytest.raises(LayoutError, match="did you mean qwen3-next"):
        layout("qwen3-nxt")


@pytest.mark.parametrize("name", PRESETS)
def test_the_command_shows_every_pool_of_a_preset(name: str) -> None:
    stream = io.StringIO()
    print_layout(stream, size_named(name))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 100 for line in lines)
    for pool in layout(name).pools:
        assert any(pool.name in line and f"{pool.page_bytes:,}" in line for line in lines)
