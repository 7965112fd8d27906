"""The radix tree over page-aligned token sequences. No torch, no I/O, no threads; imports core alone."""

from unified_cache.tree.evict import Victim
from unified_cache.tree.lock import Lock, Published, Transfer
from unified_cache.tree.match import Inserted, Match, binding_components
from unified_cache.tree.node import UNNAMED
from unified_cache.tree.radix import RadixTree
from unified_cache.tree.state import Freed, HeldRun

__all__ = [
    "UNNAMED",
    "Freed",
    "HeldRun",
    "Inserted",
    "Lock",
    "Match",
    "Published",
    "RadixTree",
    "Transfer",
    "Victim",
    "binding_components",
]
