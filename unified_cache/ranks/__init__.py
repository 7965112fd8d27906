"""Several ranks, one decision: what each may do differs, so what all do is agreed."""

from unified_cache.ranks.agreement import (
    check_alike,
    check_configuration,
    held_by_all,
    largest_of_all,
    pools_to_store,
    together,
    true_for_all,
)
from unified_cache.ranks.group import LocalRanks, RankGroup

__all__ = [
    "LocalRanks",
    "RankGroup",
    "check_alike",
    "check_configuration",
    "held_by_all",
    "largest_of_all",
    "pools_to_store",
    "together",
    "true_for_all",
]
