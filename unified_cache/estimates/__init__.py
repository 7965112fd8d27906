"""Estimates of how long reading and computing take, and the choice between the two.

reads    time of a call to storage and of a byte, and how much to read next before a deadline
prefill  time of a token that the engine computes, from its locks to its inserts
speeds   what a cache has of both, and what its group of ranks agrees on
"""

from unified_cache.estimates.speeds import TransferSpeeds

__all__ = ["TransferSpeeds"]
