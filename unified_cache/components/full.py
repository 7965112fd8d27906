"""Full attention: a resume needs every page since the root."""

from dataclasses import dataclass, replace

from unified_cache.pool import HitPolicy, PoolSpec
from unified_cache.window import SPAN_ALL

__all__ = ["Full"]


@dataclass(frozen=True, slots=True)
class Full:
    """State of full-attention layers, and the backbone that every other component stands on."""

    pools: tuple[PoolSpec, ...]
    """The anchor, then the sidecars that share its slots."""

    @property
    def name(self) -> str:
        """Name for people."""
        return "full"

    @property
    def span(self) -> int:
        """Every page: ``window(end)`` is 0."""
        return SPAN_ALL

    @property
    def mapped(self) -> bool:
        """False: its slots are what the others are reached through."""
        return False

    @property
    def hit_policy(self) -> HitPolicy:
        """All pages."""
        return HitPolicy.ALL_PAGES

    def check_page_size(self, page_size: int) -> None:
        """Accept any: every page is needed, whatever its size."""

    def with_pools(self, pools: tuple[PoolSpec, ...]) -> "Full":
        """Return the same component over other pools."""
        return replace(self, pools=pools)
