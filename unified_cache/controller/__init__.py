"""Transfers between tiers, and the slots and bytes that they move.

    ledger             who has each slot: free list, tree, or out
    memory             bytes of device and host; ``copies``: how they are moved
    operation, jobs    transfers under way and the work of their threads
    controller         runs operations; never sees the tree
    prefetch, backup   the transfers, each one file from top to bottom; ``backup_scheduler``: when backups begin
    page_changes       log of changes for observers
    ranks              agreement of a group

As HybridCacheController in SGLang 0.5.23. Imports storage_backends, tree and core.
"""

from unified_cache.controller.controller import Controller, InlineWorkers, OperationCounts, ThreadWorkers, Workers
from unified_cache.controller.jobs import LayerwiseLoad
from unified_cache.controller.operation import (
    LeftOut,
    NotStarted,
    Operation,
    OperationState,
    PageTally,
    TransferKind,
)
from unified_cache.controller.storage_tier import HintCounts, StorageTier

__all__ = [
    "Controller",
    "HintCounts",
    "InlineWorkers",
    "LayerwiseLoad",
    "LeftOut",
    "NotStarted",
    "Operation",
    "OperationCounts",
    "OperationState",
    "PageTally",
    "StorageTier",
    "ThreadWorkers",
    "TransferKind",
    "Workers",
]
