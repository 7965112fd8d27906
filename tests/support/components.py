"""Component sets for tests: the first needs every page, the others a window."""

from collections.abc import Mapping

import pytest

from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.components.deepseek_v4 import DeepSeekV4
from unified_cache.core.pool import Component, ModelLayout, PoolSpec


def toy_components(spans: tuple[int, ...], page_bytes: int = 64) -> tuple[Component, ...]:
    """Make one component per span; every one but the first has a sidecar pool, the second is mapped."""
    components: list[Component] = []
    for number, span in enumerate(spans):
        pools = [PoolSpec(f"toy{number}", page_bytes * (number + 1))]
        if number:
            pools.append(PoolSpec(f"toy{number}_sidecar", 24 + number))
        components.append(Component(f"toy{number}", span, tuple(pools), mapped=number == 1))
    return tuple(components)


def full_attention() -> Component:
    """Make full attention with a sidecar."""
    return Full((PoolSpec("kv", 40), PoolSpec("kv_index", 24)))


def sliding_window(window_tokens: int, page_size: int) -> Component:
    """Make a sliding window with a sidecar."""
    return SlidingWindow(window_tokens, page_size, (PoolSpec("swa", 32), PoolSpec("swa_scale", 17)))


def recurrent_state() -> Component:
    """Make recurrent state with a sidecar."""
    return RecurrentState((PoolSpec("ssm", 48), PoolSpec("conv", 20)))


def deepseek_v4() -> ModelLayout:
    """Make DeepSeek-V4's components and pools, the logical anchor among them, with pages a 4096th as large."""
    real = DeepSeekV4((0, 4, 128, 4)).layout()
    full, window = real.components

    def shrunk(pools: tuple[PoolSpec, ...]) -> tuple[PoolSpec, ...]:
        return tuple(PoolSpec(pool.name, pool.page_bytes and 20 + pool.page_bytes // 4096) for pool in pools)

    return ModelLayout(
        real.page_size, (Full(shrunk(full.pools)), SlidingWindow(128, real.page_size, shrunk(window.pools)))
    )


def window_lengths(page_size: int) -> tuple[int, ...]:
    """Return windows shorter than a page, equal to it, and of several pages; in tokens."""
    return (max(1, page_size // 2), page_size, 2 * page_size + 1)


PAGE_SIZES = (1, 4, 16)

COMPONENT_SETS: Mapping[str, tuple[ModelLayout, ...]] = {
    "full": tuple(ModelLayout(size, (full_attention(),)) for size in PAGE_SIZES),
    "full-swa": tuple(
        ModelLayout(size, (full_attention(), sliding_window(tokens, size)))
        for size in PAGE_SIZES
        for tokens in window_lengths(size)
    ),
    "full-mamba": tuple(ModelLayout(size, (full_attention(), recurrent_state())) for size in PAGE_SIZES),
    "full-swa-mamba": tuple(
        ModelLayout(size, (full_attention(), sliding_window(tokens, size), recurrent_state()))
        for size in PAGE_SIZES
        for tokens in window_lengths(size)
    ),
    "deepseek-v4": (deepseek_v4(),),
}
"""Layouts of real components, sidecars included, whose pages are small."""

LAYOUTS = {name: layouts[-1] for name, layouts in COMPONENT_SETS.items()}
"""One of each set, with its largest pages and longest window."""
HYBRIDS = {name: layout for name, layout in LAYOUTS.items() if name != "full"}

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
every_hybrid = pytest.mark.parametrize("layout", HYBRIDS.values(), ids=HYBRIDS)
