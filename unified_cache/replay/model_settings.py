"""Settings for the replay of a model: its true pools, tiers sized in true bytes, payloads scaled down.

The bytes of a tier are split between components so that all fill at the same prompt: the ratio is that of the bytes
that a typical prompt adds to each component under the given retention.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import numpy as np

from unified_cache.components.layouts import SizedLayout
from unified_cache.config import Retention
from unified_cache.errors import ConfigError
from unified_cache.pool import Component, ModelLayout, PoolSpec
from unified_cache.replay.machine import bytes_text
from unified_cache.replay.plan import ReplayPlan, component_bytes
from unified_cache.replay.policies import ReplayPolicies
from unified_cache.seal import HEADER_BYTES
from unified_cache.window import needed_pages

__all__ = ["DEVICE_BYTES", "HOST_BYTES", "SCALE", "STORAGE_BYTES", "ModelSettings"]

DEVICE_BYTES = 64 * 2**30
HOST_BYTES = 256 * 2**30
STORAGE_BYTES = 2048 * 2**30
"""Default true bytes of the tiers: the free memory of one large GPU and its share of a host."""

SCALE = 1 / 1024
"""Default share of a page's bytes that is moved."""

POOL_BYTES_MIN = 64
"""Smallest payload that a page is scaled down to: enough to tell any two pages apart."""

PROMPT_TOKENS = 8192
"""Tokens that a typical prompt adds; the conversation trace adds 7,780 a request that it has not seen before."""

PROMPTS_MIN = 4
"""Prompts that a tier has to hold: one that is served, one that it branches off from, and their windows."""


@dataclass(frozen=True)
class ModelSettings:
    """A model and the bytes that each tier gives it.

    Raises:
        ConfigError: a size is out of range or too small for a prompt, the page size does not fit the trace's blocks,
            or the scaled tiers exceed the memory of the machine.

    """

    name: str
    """Name of the model."""
    sized: SizedLayout
    retention: Retention
    device_bytes: int = DEVICE_BYTES
    """True bytes of the device's pools, before scaling."""
    host_bytes: int = HOST_BYTES
    """True bytes of host memory, headers included; 0 for no host tier."""
    storage: str | None = "memory:"
    """URL of the store; None for no storage tier."""
    storage_bytes: int | None = STORAGE_BYTES
    """True bytes of the store, headers included; None for what its place has."""
    scale: float = SCALE
    """Share of a page's true bytes that is moved in the run, in (0, 1]."""
    with_bytes: bool = True
    """Whether payloads move and are verified; if not, the same code runs on names and slots alone."""
    policies: ReplayPolicies = field(default_factory=ReplayPolicies)
    """Eviction, writes and prefetches."""
    engines: int = 1
    """Engines that take the requests in turn, each with device and host memory of these sizes, over one store."""

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ConfigError(f"scale must be in (0, 1], found {self.scale}")
        for name, value in (("host bytes", self.host_bytes), ("storage bytes", self.storage_bytes)):
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, found {value}")
        _ = self.plan

    @cached_property
    def plan(self) -> ReplayPlan:
        """Plan of the run: prompts at their true length, pages scaled, tiers split between components."""
        true = self.sized.layout
        run = ModelLayout(true.page_size, tuple(_scaled(component, self.scale) for component in true.components))
        typical = self._typical_pages()
        has_host = self.host_bytes > 0
        no_pages = tuple(0 for _ in typical)
        storage_bytes = None
        if self.storage is not None and self.storage_bytes is not None:
            prompts = self._prompts("storage", self.storage_bytes, sealed=True)
            storage_bytes = int(prompts * _prompt_bytes(run, typical, sealed=True))
        return ReplayPlan(
            subject=f"unified-cache replay of {self.name}",
            layout=run,
            true_layout=true,
            device_pages=self._pages("device", self.device_bytes, sealed=False),
            host_pages=self._pages("host", self.host_bytes, sealed=True) if has_host else no_pages,
            storage=self.storage,
            storage_bytes=storage_bytes,
            retention=self.retention,
            padded=False,
            with_bytes=self.with_bytes,
            policies=self.policies,
            engines=self.engines,
        )

    def as_json(self) -> dict[str, object]:
        """Return what was asked for, and the pages that follow from it."""
        names = [component.name for component in self.sized.layout.components]
        return {
            "model": self.name,
            "page_size": self.sized.layout.page_size,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "storage": self.storage,
            "storage_bytes": self.storage_bytes,
            "scale_bytes": self.scale,
            "retention": asdict(self.retention),
            "policies": self.policies.as_json(),
            "with_bytes": self.with_bytes,
            "engines": self.engines,
            "device_pages": dict(zip(names, self.plan.device_pages, strict=True)),
            "host_pages": dict(zip(names, self.plan.host_pages, strict=True)),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the sizes in words."""
        kept = f"{self.retention.tail_tokens} tokens before the end"
        if self.retention.branches:
            kept += ", branches"
        return [
            ("model", self.name),
            ("page", f"{self.sized.layout.page_size} tokens, {bytes_text(self.sized.layout.page_bytes)}"),
            ("resumable at", kept),
            ("engines", f"{self.engines}"),
            ("device", bytes_text(self.device_bytes)),
            ("host", bytes_text(self.host_bytes) if self.host_bytes else "none"),
            ("storage", self._storage_text()),
            *self.policies.rows(),
            ("payload", f"scaled by {self.scale:.3g}" + (", verified" if self.with_bytes else ", not moved")),
        ]

    def _storage_text(self) -> str:
        if self.storage is None or self.storage_bytes is None:
            return self.storage or "none"
        return f"{self.storage} of {bytes_text(self.storage_bytes)}"

    def _typical_pages(self) -> list[int]:
        """Return by component the pages that a typical prompt adds."""
        layout = self.sized.layout
        pages = -(-max(PROMPT_TOKENS, self.sized.window_tokens or 0) // layout.page_size)
        ends = self.retention.ends(pages, 0, layout.page_size)
        windows = [needed_pages(ends, component.span, 0, pages) for component in layout.components]
        return [int(np.count_nonzero(window)) for window in windows]

    def _prompts(self, tier: str, tier_bytes: int, *, sealed: bool) -> float:
        """Return how many typical prompts a tier holds.

        Raises:
            ConfigError: too few to serve any.
        """
        prompt_bytes = _prompt_bytes(self.sized.layout, self._typical_pages(), sealed=sealed)
        least = PROMPTS_MIN * prompt_bytes
        if tier_bytes < least:
            raise ConfigError(
                f"{tier} bytes must be at least {least} ({bytes_text(least)}), {PROMPTS_MIN} prompts of "
                f"{PROMPT_TOKENS} tokens of {self.name}, found {tier_bytes}"
            )
        return tier_bytes / prompt_bytes

    def _pages(self, tier: str, tier_bytes: int, *, sealed: bool) -> tuple[int, ...]:
        prompts = self._prompts(tier, tier_bytes, sealed=sealed)
        return tuple(int(prompts * pages) for pages in self._typical_pages())


def _prompt_bytes(layout: ModelLayout, pages: Sequence[int], *, sealed: bool) -> int:
    """Return the bytes of ``pages[component]`` pages of each component, with their headers where ``sealed``."""
    total = 0
    for component, count in zip(layout.components, pages, strict=True):
        headers = HEADER_BYTES * sum(pool.page_bytes > 0 for pool in component.pools) if sealed else 0
        total += count * (component_bytes(component) + headers)
    return total


def _scaled(component: Component, scale: float) -> Component:
    """Return the component with smaller pages; a logical pool stays one."""
    pools = tuple(
        PoolSpec(pool.name, max(POOL_BYTES_MIN, round(pool.page_bytes * scale)) if pool.page_bytes else 0)
        for pool in component.pools
    )
    return replace(component, pools=pools)
