"""Groups of ranks that hold shards of the same pages and decide together, so that all hold the same pages."""

from typing import Protocol

from unified_cache.pool import Pages

__all__ = ["LocalRanks", "RankGroup"]


class RankGroup(Protocol):
    """Ranks that make the same calls in the same order, as tensor-parallel schedulers do.

    # Behavior

    * what is agreed on is the same on every rank
    * arrays of different lengths are an error on every rank, and no rank waits for ever
    * a rank that does not answer in time is an error on every other rank
    * after such an error the group is lost: every later call is an error at once
    """

    @property
    def rank(self) -> int:
        """Number of this rank, in [0, size)."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def is_lost(self) -> bool:
        """True after a rank was lost: nothing can be agreed on any more."""
        ...

    def agree(self, bits: Pages) -> Pages:
        """Return what is True on every rank, shape as ``bits``; a new array or the same. Waits for the others.

        Raises:
            RankLostError: a rank does not answer, or asks something else.
        """
        ...


class LocalRanks:
    """A group of one."""

    __slots__ = ()

    rank = 0
    size = 1
    is_lost = False

    def agree(self, bits: Pages) -> Pages:
        """Return what this rank says."""
        return bits
