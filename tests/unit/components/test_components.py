"""Components as values: windows, hit policies, and the pools of DeepSeek-V4."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.components.deepseek_v4 import (
    ROW_FORMATS,
    DeepSeekV4,
)
from unified_cache.core.errors import LayoutError
from unified_cache.core.pool import Component, ModelLayout, PoolSpec
from unified_cache.core.window import SPAN_ALL, window

POOL = PoolSpec("state", 64)
FLASH = DeepSeekV4((0, 0, 4, *(128, 4) * 20))
PRO = DeepSeekV4((128, 128, *(4, 128) * 29, 4))


@pytest.mark.parametrize(
    ("component", "name", "span", "policy"),
    [
        (Full((POOL,)), "full", SPAN_ALL, "all_pages"),
        (SlidingWindow(128, 64, (POOL,)), "swa", 2, "trailing_pages"),
        (RecurrentState((POOL,)), "mamba", 1, "trailing_pages"),
    ],
)
def test_a_component_says_its_name_its_span_and_its_policy(
    component: Component, name: str, span: int, policy: str
) -> None:
    assert (component.name, component.span, component.hit_policy) == (name, span, policy)
    assert component.pools == (POOL,)


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(0, 200))
def test_every_token_of_a_window_lies_in_a_page_that_is_needed(window_tokens: int, page_size: int, end: int) -> None:
    first = window(end, SlidingWindow(window_tokens, page_size, (POOL,)).span)
    oldest = max(0, end * page_size - window_tokens)
    assert first * page_size <= oldest
    assert oldest < (first + 1) * page_size or end == 0


@pytest.mark.parametrize("window_tokens", [0, -1, True, SPAN_ALL])
def test_a_window_that_is_none_is_refused(window_tokens: int) -> None:
    with pytest.raises(LayoutError, match="window_tokens"):
        SlidingWindow(window_tokens, 1, (POOL,))


@pytest.mark.parametrize("page_size", [0, -64, True])
def test_a_page_size_that_is_none_is_refused(page_size: int) -> None:
    with pytest.raises(LayoutError, match="page_size"):
        SlidingWindow(128, page_size, (POOL,))


@pytest.mark.parametrize(
    "make",
    [lambda: SlidingWindow(128, 64, (POOL,)), lambda: RecurrentState((POOL,))],
    ids=["swa", "mamba"],
)
def test_a_component_with_a_window_cannot_carry_the_layout_of_a_cache(make: Callable[[], Component]) -> None:
    with pytest.raises(LayoutError, match=r"must need all pages|not the first, may be mapped"):
        ModelLayout(64, (make(),)).check_resumable()


@pytest.mark.parametrize(
    ("name", "window_pages", "compressed_pages"),
    [
        # bytes of a page of 256, 64 and 2 rows
        ("v4", (149_760, 37_440, 1_728), (149_760, 37_440, 1_728)),
        ("v41", (135_168, 33_792, 1_536), (135_168, 33_792, 1_536)),
        ("v41_fp4", (135_168, 33_792, 1_536), (73_728, 18_432, 768)),
        ("uniform_fp8", (131_072, 32_768, 1_024), (131_072, 32_768, 1_024)),
    ],
)
def test_a_page_holds_values_then_scales_then_padding(
    name: str, window_pages: tuple[int, ...], compressed_pages: tuple[int, ...]
) -> None:
    of_window, of_compressed = ROW_FORMATS[name]
    assert tuple(of_window.page_bytes(rows) for rows in (256, 64, 2)) == window_pages
    assert tuple(of_compressed.page_bytes(rows) for rows in (256, 64, 2)) == compressed_pages


PAGE_BYTES = {
    # pool: (per layer, Flash, Pro)
    "kv": (0, 0, 0),
    "deepseek_v4_c4": (37_440, 786_240, 1_123_200),
    "deepseek_v4_c4_indexer": (8_448, 177_408, 253_440),
    "deepseek_v4_c128": (1_728, 34_560, 53_568),
    "swa": (149_760, 6_439_680, 9_135_360),
    "deepseek_v4_c4_state": (65_536, 1_376_256, 1_966_080),
    "deepseek_v4_c4_indexer_state": (16_384, 344_064, 491_520),
}


@pytest.mark.parametrize("pool", PAGE_BYTES)
@pytest.mark.parametrize(("model", "column"), [(FLASH, 1), (PRO, 2)], ids=["flash", "pro"])
def test_a_pool_of_deepseek_v4_has_the_published_bytes(model: DeepSeekV4, column: int, pool: str) -> None:
    found = {each.name: each.page_bytes for each in model.layout().pools}
    assert model.layer_page_bytes(256)[pool] == PAGE_BYTES[pool][0]
    assert found[pool] == PAGE_BYTES[pool][column]


def test_a_pool_that_no_layer_has_does_not_exist() -> None:
    names = [pool.name for pool in DeepSeekV4((128, 0)).layout().pools]
    assert names == ["kv", "deepseek_v4_c128", "swa"]


@pytest.mark.parametrize("page_size", [128, 256, 512, 1024])
def test_deepseek_v4_takes_pages_at_whose_ends_nothing_is_pending(page_size: int) -> None:
    pools = {pool.name: pool.page_bytes for pool in FLASH.layout(page_size).pools}
    assert pools["deepseek_v4_c4_indexer"] == page_size // 4 * 132 * 21
    assert FLASH.layout(page_size).components[1].span == 1


@pytest.mark.parametrize(
    ("model", "page_size", "named"),
    [
        (FLASH, 64, "ratio 128"),
        (FLASH, 192, "ratio 128"),
        (FLASH, 0, "ratio 128"),
        (FLASH, -256, "ratio 128"),
        (DeepSeekV4((4,), window_tokens=200), 256, "window 200"),
        (DeepSeekV4((4,), window_tokens=512), 256, "window 512"),
        (DeepSeekV4((4,), window_tokens=0), 256, "window 0"),
    ],
)
def test_deepseek_v4_refuses_pages_that_break_a_rule(model: DeepSeekV4, page_size: int, named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        model.layout(page_size)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DeepSeekV4((4, 8)), "compress_ratios"),
        (lambda: DeepSeekV4((0, 0)), "compress_ratios"),
        (lambda: DeepSeekV4(()), "compress_ratios"),
        (lambda: DeepSeekV4((4,), rows="v5"), "rows"),
        (lambda: DeepSeekV4((4,), index_head_dim=0), "index_head_dim"),
        (lambda: DeepSeekV4((2,), index_head_dim=127, source_layers=(0,)), "index_head_dim"),
    ],
)
def test_deepseek_v4_refuses_what_it_is_not(make: Callable[[], DeepSeekV4], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        make()
