"""Several ranks, one decision: what each may do differs, so what all do is agreed."""

from unified_cache.controller.ranks.group import (
    LocalRanks,
    RankGroup,
    check_alike,
    check_configuration,
    held_by_all,
    pools_to_store,
    together,
    true_for_all,
)

__all__ = [
    "LocalRanks",
    "RankGroup",
    "check_alike",
    "check_configuration",
    "held_by_all",
    "pools_to_store",
    "together",
    "true_for_all",
]
