"""Sliding-window attention: a resume needs the pages that hold the last window of tokens."""

from dataclasses import dataclass, replace

from unified_cache.errors import LayoutError
from unified_cache.pool import HitPolicy, PoolSpec
from unified_cache.window import SPAN_ALL

__all__ = ["SlidingWindow"]


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """State of layers that look back a bounded number of tokens.

    A prefix that is live since the root is legal at any length, shorter than the window included.
    """

    window_tokens: int
    """Tokens before the next one that the model looks back on: what it keeps, not what its config may say.

    Where a config's window counts the query itself, as in transformers, this is one less.
    """
    page_size: int
    """Tokens per page, as in the layout."""
    pools: tuple[PoolSpec, ...]
    """The anchor, then the sidecars that share its slots."""

    def __post_init__(self) -> None:
        for name, value in (("window_tokens", self.window_tokens), ("page_size", self.page_size)):
            # A bool is an int to Python, and no window.
            if type(value) is not int or value <= 0:
                raise LayoutError(f"{name} of a sliding window must be a positive integer, found {value!r}")
        if self.span >= SPAN_ALL:
            raise LayoutError(f"window_tokens must span fewer than {SPAN_ALL} pages, found {self.window_tokens}")

    @property
    def name(self) -> str:
        """Name for people."""
        return "swa"

    @property
    def span(self) -> int:
        """Pages that the window touches when it ends at a page boundary."""
        return -(-self.window_tokens // self.page_size)

    @property
    def mapped(self) -> bool:
        """True: kernels find its slots through Full's."""
        return True

    @property
    def hit_policy(self) -> HitPolicy:
        """The trailing pages."""
        return HitPolicy.TRAILING_PAGES

    def check_page_size(self, page_size: int) -> None:
        """Accept the page size that the span was counted in.

        Raises:
            LayoutError: another.
        """
        if page_size != self.page_size:
            raise LayoutError(f"{self.name}: a window counted in pages of {self.page_size} tokens, found {page_size}")

    def with_pools(self, pools: tuple[PoolSpec, ...]) -> "SlidingWindow":
        """Return the same component over other pools."""
        return replace(self, pools=pools)
