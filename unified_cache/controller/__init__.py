"""Moves bytes between tiers and never sees the tree: operations, their jobs, and the workers that run them."""

from unified_cache.controller.controller import Controller, InlineWorkers, OperationCounts, ThreadWorkers, Workers
from unified_cache.controller.jobs import LayerwiseLoad
from unified_cache.controller.operation import (
    LeftAlone,
    LeftOut,
    NotStarted,
    Operation,
    OperationState,
    PageTally,
    SlowOperation,
    TransferKind,
)
from unified_cache.controller.storage_tier import StorageTier, TouchCounts

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
