"""Pages of a tier that is sized in bytes: split between components so that all of them fill at the same prompt.

The ratio is that of the bytes which a typical prompt adds to each component under the given retention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unified_cache.core.byte_sizes import bytes_text
from unified_cache.core.config import Retention
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Component, ModelLayout
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.window import needed_pages

PROMPT_TOKENS = 8192
"""Tokens that a typical prompt adds; the conversation trace adds 7,780 a request that it has not seen before."""

PROMPTS_MIN = 4
"""Prompts that a tier has to hold: one that is served, one that it branches off from, and their windows."""


def component_bytes(component: Component) -> int:
    """Return the payload of one page in all pools of a component."""
    return sum(pool.page_bytes for pool in component.pools)


def prompt_bytes(layout: ModelLayout, pages: Sequence[int], *, sealed: bool) -> int:
    """Return the bytes of ``pages[component]`` pages of each component, with their headers where ``sealed``."""
    total = 0
    for component, count in zip(layout.components, pages, strict=True):
        headers = HEADER_BYTES * sum(pool.page_bytes > 0 for pool in component.pools) if sealed else 0
        total += count * (component_bytes(component) + headers)
    return total


@dataclass(frozen=True, slots=True)
class SizedTiers:
    """A layout, and the pages of each component that a typical prompt adds to it."""

    layout: ModelLayout
    typical_pages: tuple[int, ...]
    name: str
    """Name of the model, for messages."""

    @classmethod
    def of(
        cls, layout: ModelLayout, retention: Retention, window_tokens: int | None = None, name: str = "the model"
    ) -> "SizedTiers":
        """Return the sizes under a retention; ``window_tokens`` is the model's longest window, where it has one."""
        pages = -(-max(PROMPT_TOKENS, window_tokens or 0) // layout.page_size)
        ends = retention.ends(pages, 0, layout.page_size)
        windows = [needed_pages(ends, component.span, 0, pages) for component in layout.components]
        return cls(layout, tuple(int(np.count_nonzero(window)) for window in windows), name)

    def device_pages(self, tier_bytes: int) -> tuple[int, ...]:
        """Return the pages of each component that a device of so many bytes holds; errors as ``prompts``."""
        return self._pages("device", tier_bytes, sealed=False)

    def host_pages(self, tier_bytes: int) -> tuple[int, ...]:
        """Return the pages of each component that host memory of so many bytes holds, each with its header."""
        return self._pages("host", tier_bytes, sealed=True)

    def prompts(self, tier: str, tier_bytes: int, *, sealed: bool) -> float:
        """Return how many typical prompts a tier holds; a ConfigError if too few to serve any."""
        typical = prompt_bytes(self.layout, self.typical_pages, sealed=sealed)
        least = PROMPTS_MIN * typical
        if tier_bytes < least:
            raise ConfigError(
                f"{tier}_bytes must be at least {least} ({bytes_text(least)}), {PROMPTS_MIN} prompts of "
                f"{PROMPT_TOKENS} tokens of {self.name}, found {tier_bytes}"
            )
        return tier_bytes / typical

    def _pages(self, tier: str, tier_bytes: int, *, sealed: bool) -> tuple[int, ...]:
        prompts = self.prompts(tier, tier_bytes, sealed=sealed)
        return tuple(int(prompts * pages) for pages in self.typical_pages)
