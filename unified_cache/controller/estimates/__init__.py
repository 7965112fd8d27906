"""Estimates of how long reading and computing take, and the choice between the two."""

from unified_cache.controller.estimates.speeds import TransferSpeeds

__all__ = ["TransferSpeeds"]
