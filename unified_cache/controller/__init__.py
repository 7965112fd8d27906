"""Moves bytes between tiers and never sees the tree: operations, their jobs, and the workers that run them."""

from unified_cache.controller.controller import Controller, OperationCounts
from unified_cache.controller.layerwise import LayerwiseLoad
from unified_cache.controller.left_alone import LeftAlone
from unified_cache.controller.operation import NotStarted, Operation, OperationState, SlowOperation
from unified_cache.controller.page_tally import LeftOut, PageTally
from unified_cache.controller.storage_tier import StorageTier
from unified_cache.controller.touches import TouchCounts
from unified_cache.controller.transfer_kind import TransferKind
from unified_cache.controller.workers import InlineWorkers, ThreadWorkers, Workers

__all__ = [
    "Controller",
    "InlineWorkers",
    "LayerwiseLoad",
    "LeftAlone",
    "LeftOut",
    "NotStarted",
    "Operation",
    "OperationCounts",
    "OperationState",
    "PageTally",
    "SlowOperation",
    "StorageTier",
    "ThreadWorkers",
    "TouchCounts",
    "TransferKind",
    "Workers",
]
