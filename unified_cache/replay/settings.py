"""Settings for the replay of plain pages: one full-attention pool of any page size, tiers sized in pages."""

from dataclasses import asdict, dataclass, field
from functools import cached_property

from unified_cache.byte_sizes import bytes_text
from unified_cache.components import Full
from unified_cache.config import Retention
from unified_cache.errors import ConfigError
from unified_cache.pool import ModelLayout, PoolSpec
from unified_cache.replay.plan import ReplayPlan
from unified_cache.replay.policies import ReplayPolicies
from unified_cache.replay.trace import BLOCK_TOKENS

__all__ = ["ReplaySettings"]

POOL_NAME = "kv"


@dataclass(frozen=True)
class ReplaySettings:
    """Tier sizes and page sizes of one replay.

    Raises:
        ConfigError: a size is out of range, does not fit the trace's blocks, or exceeds the memory of the machine.

    """

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

    def rows(self) -> list[tuple[str, str]]:
        """Return the sizes in words."""
        rows = [
            ("page", f"{self.page_size} tokens, {bytes_text(self.page_bytes)}"),
            ("engines", f"{self.engines}"),
            ("device", f"{self.device_pages:,} pages"),
            ("host", f"{self.host_pages:,} pages" if self.host_pages else "none"),
            ("storage", self.storage or "none"),
        ]
        if self.storage_bytes is not None:
            rows.append(("storage cap", bytes_text(self.storage_bytes)))
        rows += self.policies.rows()
        rows.append(("payload", "moved and verified" if self.with_bytes else "not moved"))
        return rows
