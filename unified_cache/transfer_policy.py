"""Choice between bringing pages up from a lower tier and computing them again, as a setting of a cache."""

from enum import Enum

__all__ = ["TransferPolicy"]


class TransferPolicy(Enum):
    """Rule of what is brought up to a request from host memory and storage."""

    ALWAYS = "always"
    """All that lower tiers add to its prefix and that there is room for."""
    FASTEST = "fastest"
    """As ``ALWAYS``, but for what storage has that takes longer to read than to compute, by what both took lately."""
    NEVER = "never"
    """Nothing: ``prefetch`` and ``load`` start nothing. Pages are still backed up, for others."""
