"""Reasons why a page is missing on a tier, as far as the tiers say now."""

from enum import IntEnum

__all__ = ["MissReason"]


class MissReason(IntEnum):
    """Reason why a page is missing on a tier. Arrays hold its number, JSON its ``key``, tables its ``text``."""

    text: str
    """Words for people."""

    def __new__(cls, number: int, text: str = "") -> "MissReason":
        """Make the member of a number, and its words."""
        reason = int.__new__(cls, number)
        reason._value_ = number
        reason.text = text
        return reason

    IN_NO_TIER = 0, "in no tier: never computed here, or gone since"
    NOT_KEPT = 1, "not kept: windows and states are kept where prompts end and branch"
    NOT_FETCHED = 2, "held by a slower tier, and not brought here"
    NOT_COPIED = 3, "held by a faster tier, and not here"
    ARRIVING = 4, "on its way"
    STORE_UNAVAILABLE = 5, "the store is not available now"
    NOT_IN_STORE = 6, "not in the store"
    """Asked of a store alone."""
    TOO_LONG = 7, "longer than the device can hold"
    PART_OF_PAGE = 8, "part of a page, behind the last whole one"

    @property
    def key(self) -> str:
        """Name in JSON."""
        return self.name.lower()
