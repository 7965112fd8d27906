"""The radix tree over page-aligned token sequences. No torch, no I/O, no threads; imports core alone."""

from unified_cache.tree.match import Match
from unified_cache.tree.node import UNNAMED
from unified_cache.tree.radix import Freed, Inserted, Lock, RadixTree

__all__ = ["UNNAMED", "Freed", "Inserted", "Lock", "Match", "RadixTree"]
