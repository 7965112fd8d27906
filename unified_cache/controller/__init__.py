"""Moves bytes between tiers and never sees the tree: operations, their jobs, and the workers that run them."""

from unified_cache.controller.arrival import Arrival
from unified_cache.controller.controller import Controller
from unified_cache.controller.operation import Leg, Operation, OperationState
from unified_cache.controller.storage_tier import StorageTier
from unified_cache.controller.workers import InlineWorkers, ThreadWorkers, Workers

__all__ = [
    "Arrival",
    "Controller",
    "InlineWorkers",
    "Leg",
    "Operation",
    "OperationState",
    "StorageTier",
    "ThreadWorkers",
    "Workers",
]
