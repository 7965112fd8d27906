"""Settings of a replay: of plain pages, with tiers sized in pages; or of a model, with tiers sized in true bytes."""

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from unified_cache.components import Full
from unified_cache.components.layouts import SizedLayout
from unified_cache.core.config import Retention
from unified_cache.core.errors import ConfigError, without_secrets
from unified_cache.core.pool import Component, ModelLayout, PoolSpec
from unified_cache.core.tier_sizes import SizedTiers, prompt_bytes
from unified_cache.sizing.replay.plan import ReplayPlan, ReplayPolicies
from unified_cache.sizing.replay.trace import BLOCK_TOKENS

POOL_NAME = "kv"

DEVICE_BYTES = 64 * 2**30
HOST_BYTES = 256 * 2**30
STORAGE_BYTES = 2048 * 2**30
"""Default true bytes of the tiers: the free memory of one large GPU and its share of a host."""

SCALE = 1 / 1024
"""Default share of a page's bytes that is moved."""

POOL_BYTES_MIN = 64
"""Smallest payload that a page is scaled down to: enough to distinguish any two pages."""


@dataclass(frozen=True)
class ReplaySettings:
    """Tier sizes and page sizes of one replay."""

    page_size: int = BLOCK_TOKENS
    """Tokens per page; prompts share whole pages, whatever the trace's blocks are."""
    device_pages: int = 2000
    """Pages that the device can cache."""
    host_pages: int = 20000
    """Pages that host memory can cache; 0 for no host tier."""
    storage: str | None = None
    """URL of the store; None for no storage tier."""
    storage_bytes: int | None = None
    """Cap on the store; None for what its place has."""
    page_bytes: int = 4096
    """Payload of one page."""
    with_bytes: bool = True
    """Whether payloads move and are verified; if not, the same code runs on names and slots alone."""
    policies: ReplayPolicies = field(default_factory=ReplayPolicies)
    """Eviction, writes and prefetches."""
    engines: int = 1
    """Engines that take the requests in turn, each with device and host memory of these sizes, over one store."""
    explains: bool = False
    """Whether every missed token is counted by reason."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("page size", self.page_size, 1),
            ("device pages", self.device_pages, 1),
            ("host pages", self.host_pages, 0),
            ("page bytes", self.page_bytes, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, found {value}")
        _ = self.plan

    @cached_property
    def plan(self) -> ReplayPlan:
        """Plan of the run: prompts padded to whole blocks, as the trace's published figures count."""
        layout = ModelLayout(self.page_size, (Full((PoolSpec(POOL_NAME, self.page_bytes),)),))
        return ReplayPlan(
            subject="unified-cache replay",
            layout=layout,
            true_layout=layout,
            device_pages=(self.device_pages,),
            host_pages=(self.host_pages,),
            storage=self.storage,
            storage_bytes=self.storage_bytes,
            retention=Retention(),
            padded=True,
            with_bytes=self.with_bytes,
            policies=self.policies,
            engines=self.engines,
            explains=self.explains,
        )

    def as_json(self) -> dict[str, object]:
        """Return the fields."""
        return {**asdict(self), "policies": self.policies.as_json()}


@dataclass(frozen=True)
class ModelSettings:
    """A model and the bytes that each tier gives it."""

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
    explains: bool = False
    """Whether every missed token is counted by reason."""

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
        sizes = SizedTiers.of(true, self.retention, self.sized.window_tokens, self.name)
        storage_bytes = None
        if self.storage is not None and self.storage_bytes is not None:
            prompts = sizes.prompts("storage", self.storage_bytes, sealed=True)
            storage_bytes = int(prompts * prompt_bytes(run, sizes.typical_pages, sealed=True))
        return ReplayPlan(
            subject=f"unified-cache replay of {self.name}",
            layout=run,
            true_layout=true,
            device_pages=sizes.device_pages(self.device_bytes),
            host_pages=sizes.host_pages(self.host_bytes) if self.host_bytes else (0,) * len(true.components),
            storage=self.storage,
            storage_bytes=storage_bytes,
            retention=self.retention,
            padded=False,
            with_bytes=self.with_bytes,
            policies=self.policies,
            engines=self.engines,
            explains=self.explains,
        )

    def as_json(self) -> dict[str, object]:
        """Return what was asked for, and the pages that follow from it."""
        names = [component.name for component in self.sized.layout.components]
        return {
            "model": self.name,
            "page_size": self.sized.layout.page_size,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "storage": None if self.storage is None else without_secrets(self.storage),
            "storage_bytes": self.storage_bytes,
            "scale_bytes": self.scale,
            "retention": asdict(self.retention),
            "policies": self.policies.as_json(),
            "with_bytes": self.with_bytes,
            "engines": self.engines,
            "explains": self.explains,
            "device_pages": dict(zip(names, self.plan.device_pages, strict=True)),
            "host_pages": dict(zip(names, self.plan.host_pages, strict=True)),
        }


PlannedSettings = ReplaySettings | ModelSettings


def _scaled(component: Component, scale: float) -> Component:
    """Return the component with smaller pages; a logical pool stays one."""
    pools = tuple(
        PoolSpec(pool.name, max(POOL_BYTES_MIN, round(pool.page_bytes * scale)) if pool.page_bytes else 0)
        for pool in component.pools
    )
    return replace(component, pools=pools)
