"""Names for the part of a page that a rank holds: the same heads and layers have the same name in any group."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd

from unified_cache.errors import LayoutError
from unified_cache.pool import PoolSpec

__all__ = ["Shard", "heads_per_unit"]


@dataclass(frozen=True, slots=True)
class Shard:
    """KV heads and layers that one rank holds; neither its number nor the group's size.

    Two ranks that hold the same heads of the same layers hold the same bytes, and name them alike.
    """

    heads_start: int
    heads_end: int
    """KV heads [heads_start, heads_end) of ``heads_total``."""
    heads_total: int
    layers_start: int
    layers_end: int
    """Layers [layers_start, layers_end) of ``layers_total``."""
    layers_total: int

    def __post_init__(self) -> None:
        for name, start, end, total in (
            ("heads", self.heads_start, self.heads_end, self.heads_total),
            ("layers", self.layers_start, self.layers_end, self.layers_total),
        ):
            if not 0 <= start < end <= total:
                raise LayoutError(f"a shard's {name} must be a range of [0, {total}), found [{start}, {end})")

    @classmethod
    def of_rank(cls, rank: int, size: int, heads_total: int, layers_total: int) -> "Shard":
        """Return what a tensor-parallel rank holds of all layers; where ranks outnumber heads, some hold the same.

        Raises:
            LayoutError: no such rank, or heads and ranks do not divide each other.
        """
        if not 0 <= rank < size:
            raise LayoutError(f"a rank must be in [0, {size}), found {rank}")
        heads = _heads_per_rank(heads_total, size)
        start = rank * heads_total // size
        return cls(start, start + heads, heads_total, 0, layers_total, layers_total)

    @property
    def text(self) -> str:
        """Canonical name, for ``Identity.shard``."""
        return f"heads {self.heads_start}-{self.heads_end}/{self.heads_total}, {self.stage}"

    @property
    def stage(self) -> str:
        """Canonical name without the heads, for ``Identity.stage``: what ranks hold alike has this one."""
        return f"layers {self.layers_start}-{self.layers_end}/{self.layers_total}"

    def units(self, heads: int) -> tuple["Shard", ...]:
        """Cut the heads into runs of ``heads``, in order: one object each, where a page's bytes lie head by head.

        Raises:
            LayoutError: they do not begin and end at multiples of ``heads``.
        """
        if heads < 1 or self.heads_start % heads or self.heads_end % heads:
            raise LayoutError(f"{self.text} cannot be cut into runs of {heads} heads")
        starts = range(self.heads_start, self.heads_end, heads)
        return tuple(replace(self, heads_start=start, heads_end=start + heads) for start in starts)

    def unit_pools(self, name: str, heads: int, page_bytes: int) -> tuple[PoolSpec, ...]:
        """Return a pool for each of ``units``, with ``page_bytes`` each, in order: the KV of ``name``, head by head.

        The engine keeps a tensor per layer for each of them. Groups of all sizes that cut alike share the objects.

        Raises:
            LayoutError: as ``units``, or a name that is none.
        """
        return tuple(PoolSpec(f"{name}_h{unit.heads_start}", page_bytes, shard=unit.text) for unit in self.units(heads))


def heads_per_unit(heads_total: int, sizes: Iterable[int]) -> int:
    """Return how many heads an object may hold at most so that groups of all these sizes share objects.

    Raises:
        LayoutError: heads and some size do not divide each other.
    """
    return gcd(heads_total, *(_heads_per_rank(heads_total, size) for size in sizes))


def _heads_per_rank(heads_total: int, size: int) -> int:
    if size < 1 or heads_total < 1 or (heads_total % size and size % heads_total):
        raise LayoutError(f"{heads_total} heads and {size} ranks must divide each other")
    return max(1, heads_total // size)
