"""Layouts of published models against their published sizes, and the command that shows them."""

import io
import json
import math
import warnings
from dataclasses import dataclass, replace
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
from unified_cache.core.pool import HitPolicy, Identity, LayerPlace
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.window import SPAN_ALL


@dataclass(frozen=True)
class Hybrid:
    """Published sizes of a model with sliding-window layers, bf16."""

    layers: tuple[int, int]
    """Full, sliding."""
    token_bytes: tuple[int, int]
    """In all layers."""
    window: int


HYBRIDS = {
    "gpt-oss-20b": Hybrid((12, 12), (24_576, 24_576), 127),
    "gpt-oss-120b": Hybrid((18, 18), (36_864, 36_864), 127),
    "gemma-3-27b": Hybrid((10, 52), (81_920, 425_984), 1_023),
    "gemma-4-31b": Hybrid((10, 50), (81_920, 819_200), 1_023),
    "gemma-4-26b-a4b": Hybrid((5, 25), (20_480, 204_800), 1_023),
    "llama-4-scout": Hybrid((12, 36), (49_152, 147_456), 8_192),
    "llama-4-maverick": Hybrid((12, 36), (49_152, 147_456), 8_192),
    "mimo-v2-flash": Hybrid((9, 39), (23_040, 199_680), 128),
    "mimo-v2.5-pro": Hybrid((10, 60), (51_200, 307_200), 128),
    "step-3.5-flash": Hybrid((12, 33), (49_152, 135_168), 512),
    "mistral-7b-v0.1": Hybrid((0, 32), (0, 131_072), 4_096),
    "gemma-2-9b": Hybrid((21, 21), (172_032, 172_032), 4_095),
    "gemma-2-27b": Hybrid((23, 23), (188_416, 188_416), 4_095),
    "command-r7b": Hybrid((8, 24), (32_768, 98_304), 4_096),
    "command-a": Hybrid((16, 48), (65_536, 196_608), 4_096),
    "exaone-4.0-32b": Hybrid((16, 48), (65_536, 196_608), 4_096),
}


def pool_bytes(sized: SizedLayout) -> dict[str, int]:
    return {pool.name: pool.page_bytes for pool in sized.layout.pools}


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_a_model_with_windows_has_the_published_sizes(name: str, page_size: int) -> None:
    expected = HYBRIDS[name]
    sized = size_preset(name, page_size=page_size)
    assert sized.layers == {"kv": expected.layers[0], "swa": expected.layers[1]}
    full, swa = expected.token_bytes
    assert pool_bytes(sized) == {"kv": full * page_size, "swa": swa * page_size}
    assert sized.window_tokens == expected.window
    assert sized.layout.components[1].span == math.ceil(expected.window / page_size)


RECURRENT = {
    # name: (attention layers, bytes per token, recurrent layers, convolution and state per layer, per checkpoint,
    #        the same in tokens of K and V)
    "qwen3-next-80b-a3b": (12, 24_576, 36, 49_152 + 2_097_152, 77_266_944, 3_144),
    "qwen3.5-397b-a17b": (15, 30_720, 45, 73_728 + 4_194_304, 192_061_440, 6_252),
    "nemotron-h-8b": (4, 16_384, 24, 61_440 + 4_194_304, 102_137_856, 6_234),
    "nemotron-3-nano-30b-a3b": (6, 6_144, 23, 36_864 + 2_097_152, 49_082_368, 7_989),
    # Lightning attention: a square of 128 for each of 64 heads, and no convolution.
    "minimax-text-01": (10, 40_960, 70, 2_097_152, 146_800_640, 3_584),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("page_size", [1, 64, 256])
def test_a_model_with_recurrent_layers_has_the_published_sizes(name: str, page_size: int) -> None:
    full_layers, token_bytes, layers, layer_bytes, state_bytes, tokens = RECURRENT[name]
    sized = size_preset(name, page_size=page_size)
    assert sized.layers == {"kv": full_layers, "mamba": layers}
    assert layers * layer_bytes == state_bytes
    assert round(state_bytes / token_bytes) == tokens
    # One state per checkpoint, whatever the page.
    assert pool_bytes(sized) == {"kv": token_bytes * page_size, "mamba": state_bytes}
    assert sized.layout.components[1].span == 1
    assert sized.window_tokens is None


FULL_ONLY = {
    # name: (layers, bytes per token, bytes per page of 64)
    "llama-3.1-8b": (32, 131_072, 8 << 20),
    "llama-3.1-70b": (80, 327_680, 20 << 20),
    "mistral-7b-v0.3": (32, 131_072, 8 << 20),
    "mixtral-8x7b": (32, 131_072, 8 << 20),
    "mixtral-8x22b": (56, 229_376, 14 << 20),
    "qwen2.5-7b": (28, 57_344, 3_670_016),
    "qwen2.5-72b": (80, 327_680, 20 << 20),
    "qwen3-8b": (36, 147_456, 9 << 20),
    "qwen3-32b": (64, 262_144, 16 << 20),
    "qwen3-30b-a3b": (48, 98_304, 6 << 20),
    "qwen3-235b-a22b": (94, 192_512, 12_320_768),
    "phi-4": (40, 204_800, 13_107_200),
    "glm-4.5": (92, 376_832, 23 << 20),
    "glm-4.5-air": (46, 188_416, 12_058_624),
    "minimax-m2": (62, 253_952, 16_252_928),
    "olmo-2-7b": (32, 524_288, 32 << 20),
    "olmo-2-32b": (64, 262_144, 16 << 20),
    "granite-3.3-8b": (40, 163_840, 10 << 20),
    "llama-3.1-405b": (126, 516_096, 33_030_144),
}

LATENT = {"deepseek-v2": 60, "deepseek-v2-lite": 27, "deepseek-v3": 61, "kimi-k2": 61}
"""Layers of models that keep one row of 576 values per token in each."""


@pytest.mark.parametrize("name", LATENT)
def test_a_model_of_latent_attention_keeps_one_row_per_token_alike_on_all_ranks(name: str) -> None:
    sized = size_preset(name)
    assert sized.layers == {"kv": LATENT[name]}
    assert pool_bytes(sized) == {"kv": LATENT[name] * 1_152 * 64}
    assert all(pool.replicated for pool in sized.layout.pools)
    assert pool_bytes(size_preset(name, dtype="fp8")) == {"kv": LATENT[name] * 576 * 64}


@pytest.mark.parametrize("name", FULL_ONLY)
def test_a_model_of_full_attention_has_the_published_sizes(name: str) -> None:
    layers, token_bytes, page_bytes = FULL_ONLY[name]
    sized = size_preset(name)
    assert (sized.layers, sized.layout.page_size) == ({"kv": layers}, 64)
    assert pool_bytes(sized) == {"kv": page_bytes}
    assert pool_bytes(size_preset(name, page_size=1)) == {"kv": token_bytes}
    assert pool_bytes(size_preset(name, page_size=1, dtype="fp8")) == {"kv": token_bytes // 2}


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
    assert [component.hit_policy for component in sized.layout.components] == [HitPolicy.ALL_PAGES]


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
    assert list(sized.layers) == [pool.name for pool in sized.layout.pools]
    assert (sized.window_tokens, sized.layout.components[1].span) == (128, 1)


def pools_by_layer(name: str) -> list[str]:
    return ["+".join(place.pool for place in layer) for layer in layout(name).layers_mapping]


@pytest.mark.parametrize("name", PRESETS)
def test_every_layer_of_a_preset_has_a_number_of_its_own_in_each_pool_that_it_keeps_state_in(name: str) -> None:
    sized = size_preset(name)
    config = preset_config(name)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    assert len(sized.layout.layers_mapping) == text["num_hidden_layers"]
    numbers: dict[str, list[int]] = {pool.name: [] for pool in sized.layout.pools}
    places = [place for layer in sized.layout.layers_mapping for place in layer]
    if "kv_source_layer_ids" in text:
        places = list(dict.fromkeys(places))  # its layers have the places of their sources, too
    for pool, number in places:
        numbers[pool].append(number)
    # Numbered in the order of the model, none left out: where an engine finds the tensor of a layer.
    assert numbers == {pool: list(range(layers)) for pool, layers in sized.layers.items()}


def test_layers_are_mapped_to_the_pools_of_their_kind() -> None:
    gpt_oss = layout("gpt-oss-20b").layers_mapping
    assert gpt_oss[:3] == ((LayerPlace("swa", 0),), (LayerPlace("kv", 0),), (LayerPlace("swa", 1),))
    assert pools_by_layer("gemma-3-27b")[:7] == ["swa"] * 5 + ["kv", "swa"]
    assert pools_by_layer("gemma-4-31b")[-2:] == ["swa", "kv"]
    assert pools_by_layer("qwen3-next-80b-a3b")[:4] == ["mamba"] * 3 + ["kv"]
    assert pools_by_layer("nemotron-3-nano-30b-a3b")[:6] == ["mamba", "", "mamba", "", "mamba", "kv"]
    assert pools_by_layer("mistral-7b-v0.1") == ["swa"] * 32
    assert pools_by_layer("deepseek-v3.2") == ["kv+indexer"] * 61
    csa = "deepseek_v4_c4+deepseek_v4_c4_indexer+swa+deepseek_v4_c4_state+deepseek_v4_c4_indexer_state"
    assert pools_by_layer("deepseek-v4-flash")[:4] == ["swa", "swa", csa, "deepseek_v4_c128+swa"]
    assert layout("deepseek-v4-flash").layers_mapping[4][:1] == (LayerPlace("deepseek_v4_c4", 1),)
    assert layout("deepseek-v4-flash").layers_mapping[4][2] == LayerPlace("swa", 4)


def test_a_layer_that_borrows_its_state_has_the_place_of_the_last_of_its_kind_that_keeps_any() -> None:
    config = preset_config("gemma-4-26b-a4b")
    text = config["text_config"]
    assert isinstance(text, dict)
    sharing = {**config, "text_config": {**text, "num_hidden_layers": 14, "num_kv_shared_layers": 7}}
    mapping = from_hf_config(sharing).layers_mapping
    assert [layer[0].pool for layer in mapping] == ["swa"] * 5 + ["kv"] + ["swa"] * 5 + ["kv", "swa", "kv"]
    assert mapping[7:] == (*[(LayerPlace("swa", 5),)] * 4, (LayerPlace("kv", 0),), *[mapping[6], mapping[5]])
    assert size_hf_config(sharing).layers == {"kv": 1, "swa": 6}
    none_left = {**config, "text_config": {**text, "num_hidden_layers": 12, "num_kv_shared_layers": 9}}
    with pytest.raises(LayoutError, match="num_kv_shared_layers must be so few"):
        from_hf_config(none_left)


def test_a_layout_refuses_layers_in_pools_that_it_has_not() -> None:
    with pytest.raises(LayoutError, match=r"\['elsewhere'\]"):
        replace(layout("llama-3.1-8b"), layers_mapping=((LayerPlace("elsewhere", 0),),))


def test_layouts_that_differ_in_their_layers_alone_are_one_to_every_cache_and_store() -> None:
    known = layout("gpt-oss-20b")
    unknown = replace(known, layers_mapping=())
    assert known == unknown
    assert Identity("gpt-oss").digest(known) == Identity("gpt-oss").digest(unknown)


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


def test_a_layer_of_deepseek_v4_1_has_the_rows_of_its_source_and_its_keys_where_it_has_an_indexer() -> None:
    found = pools_by_layer("deepseek-v4.1-flash")
    c1, c2 = (f"deepseek_v4_c{ratio}+deepseek_v4_c{ratio}_indexer+swa" for ratio in (1, 2))
    assert [found[layer] for layer in (0, 2, 3, 8, 20, 24)] == ["swa", c2, "deepseek_v4_c2+swa", c2, c1, c1]
    mapping = layout("deepseek-v4.1-flash").layers_mapping
    assert [mapping[layer][0].number for layer in (2, 7, 8, 13, 14, 19, 20, 39)] == [0, 0, 1, 1, 2, 2, 0, 0]
    assert mapping[24][:2] == mapping[20][:2]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kv_source_layer_ids": [8, 14, 20]}, "layer 2 of ratio 2 must have a source layer of it, found None"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "layer 20 of ratio 1 must have a source layer of it, found 14"),
        ({"kv_source_layer_ids": [2, 14, 8, 20]}, "source_layers must be ascending"),
        ({"kv_source_layer_ids": None}, "text_config.kv_source_layer_ids must be a list"),
        ({"index_source_layer_ids": [2, 8, 20]}, "index_layers must contain the source_layers"),
        ({"index_source_layer_ids": [0, 2, 8, 14, 20]}, "found layer 0 of ratio 0"),
        ({"compress_ratios": [4] * 40}, "compress_ratios must hold nothing but"),
        ({"num_nextn_predict_layers": 2}, "compress_ratios must have 40 or 42 entries"),
    ],
)
def test_a_configuration_of_deepseek_v4_1_that_makes_no_sense_is_refused(
    changed: dict[str, object], named: str
) -> None:
    config = preset_config("deepseek-v4.1-flash")
    text = config["text_config"]
    assert isinstance(text, dict)
    with pytest.raises(LayoutError, match=named):
        from_hf_config({**config, "text_config": {**text, **changed}})


def test_the_text_model_of_deepseek_v4_1_is_read_alone_too() -> None:
    text = preset_config("deepseek-v4.1-flash")["text_config"]
    assert isinstance(text, dict)
    assert from_hf_config({**text, "model_type": "deepseek_v41"}) == layout("deepseek-v4.1-flash")


@pytest.mark.parametrize("page_size", [64, 129, 255])
def test_a_page_of_deepseek_v4_1_holds_whole_pairs_and_windows(page_size: int) -> None:
    with pytest.raises(LayoutError, match=r"page_size must be a multiple of the (ratio 2|window 128)"):
        layout("deepseek-v4.1-flash", page_size=page_size)
    assert layout("deepseek-v4.1-flash", page_size=128).page_size == 128


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


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_a_file_and_a_directory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset_config(name)))
    assert from_hf_config(path) == from_hf_config(str(tmp_path)) == layout(name)


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
