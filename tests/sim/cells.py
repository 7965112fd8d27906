"""The component sets that are simulated, and how much each tier of them holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.components.deepseek_v4 import DeepSeekV4
from unified_cache.core.pool import Component, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES

PAYLOAD_BYTES = 8
"""Of every page that has bytes: room for one number, which says what the page is."""

PAGE_SIZE = 2
DEEPSEEK_PAGE_SIZE = 128

DEVICE_PAGES, DEVICE_WINDOW_PAGES = 195, 60
HOST_PAGES, HOST_WINDOW_PAGES = 195, 60
STORED_PAGES, STORED_WINDOW_PAGES = 205, 50


@dataclass(frozen=True)
class Cell:
    """One component set with its sizes."""

    name: str
    layout: ModelLayout

    @property
    def device_pages(self) -> tuple[int, ...]:
        return (DEVICE_PAGES, *(DEVICE_WINDOW_PAGES for _ in self.layout.components[1:]))

    @property
    def host_pages(self) -> tuple[int, ...]:
        return (HOST_PAGES, *(HOST_WINDOW_PAGES for _ in self.layout.components[1:]))

    @property
    def stored_bytes(self) -> int:
        """What the store has room for."""
        full, *others = self.layout.components
        objects = STORED_PAGES * len(full.pools) + STORED_WINDOW_PAGES * sum(len(other.pools) for other in others)
        return objects * (HEADER_BYTES + PAYLOAD_BYTES)


def pools(*names: str) -> tuple[PoolSpec, ...]:
    return tuple(PoolSpec(name, PAYLOAD_BYTES) for name in names)


def shrunk(specs: Sequence[PoolSpec]) -> tuple[PoolSpec, ...]:
    """Keep which pools there are, and which of them are logical."""
    return tuple(PoolSpec(spec.name, PAYLOAD_BYTES if spec.page_bytes else 0) for spec in specs)


def deepseek_v4() -> ModelLayout:
    full, window = DeepSeekV4((4, 128)).layout(DEEPSEEK_PAGE_SIZE).components
    return ModelLayout(
        DEEPSEEK_PAGE_SIZE,
        (Full(shrunk(full.pools)), SlidingWindow(DEEPSEEK_PAGE_SIZE, DEEPSEEK_PAGE_SIZE, shrunk(window.pools))),
    )


def cell(name: str, *others: Component) -> Cell:
    return Cell(name, ModelLayout(PAGE_SIZE, (Full(pools("kv", "kv_index")), *others)))


def window(window_tokens: int) -> Component:
    return SlidingWindow(window_tokens, PAGE_SIZE, pools("swa", "swa_scale"))


CELLS = (
    cell("full"),
    cell("full, swa", window(PAGE_SIZE)),
    cell("full, swa of several pages", window(3 * PAGE_SIZE - 1)),
    cell("full, mamba", RecurrentState(pools("ssm", "conv"))),
    cell("full, swa, mamba", window(PAGE_SIZE), RecurrentState(pools("ssm", "conv"))),
    Cell("deepseek-v4", deepseek_v4()),
)
