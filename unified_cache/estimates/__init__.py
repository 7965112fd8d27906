"""Estimates of what loading and computing will take, from what they took lately, and the choice between the two.

recent   seconds as a sum of parts that grow with what is done, fitted over the last of it
leg      one way between tiers: bytes in flight, and what it took to move them
prefill  time that an engine takes to compute a prefix, from its locks to its inserts
reads    time of a call to storage and of a byte, and how much to read next before a deadline
choice   the length that makes the first token come soonest
speeds   what a cache has of all these, and what its group of ranks agrees on
"""

from unified_cache.estimates.leg import LegStats, MovedBytes
from unified_cache.estimates.speeds import Candidates, LoadingStats, TransferSpeeds

__all__ = ["Candidates", "LegStats", "LoadingStats", "MovedBytes", "TransferSpeeds"]
