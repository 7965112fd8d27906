"""Recurrent state (Mamba, linear attention): one state, valid at exactly one length."""

from dataclasses import dataclass, replace

from unified_cache.pool import HitPolicy, PoolSpec

__all__ = ["RecurrentState"]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State that sums up everything before it in a fixed number of bytes.

    A page of this component holds the state after the page's last token, so a resume at ``end`` needs page
    ``end - 1`` alone. Most pages are holes: a state exists where a checkpoint was taken.
    """

    pools: tuple[PoolSpec, ...]
    """The anchor, then the sidecars that share its slots. One page is one checkpoint, whatever the page size."""

    @property
    def name(self) -> str:
        """Name for people."""
        return "mamba"

    @property
    def span(self) -> int:
        """The last page: ``window(end)`` is ``end - 1``."""
        return 1

    @property
    def mapped(self) -> bool:
        """False: engines hold a request's state by itself."""
        return False

    @property
    def hit_policy(self) -> HitPolicy:
        """The trailing page."""
        return HitPolicy.TRAILING_PAGES

    def check_page_size(self, page_size: int) -> None:
        """Accept any: a page here is one state, whatever it sums up."""

    def with_pools(self, pools: tuple[PoolSpec, ...]) -> "RecurrentState":
        """Return the same component over other pools."""
        return replace(self, pools=pools)
