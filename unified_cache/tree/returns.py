"""Counts of how often pages of one kind are asked for again: what hardly ever is goes before all other pages."""

__all__ = ["Returns"]

RETURNS_MAX = 16
"""One in so many pages of a kind may be asked for again, if they are to go before others."""
RETURNS_HALVED_AT = 4096
"""Pages of a kind that are counted before the counts are halved: habits change."""


class Returns:
    """Count of how often one kind of page is asked for again."""

    __slots__ = ("_left", "_returned")

    def __init__(self) -> None:
        self._left = 0
        self._returned = 0

    def leave(self) -> None:
        """Note a page of that kind."""
        self._left += 1
        if self._left == RETURNS_HALVED_AT:
            self._left >>= 1
            self._returned >>= 1

    def come_back(self) -> None:
        """Note that one was asked for again."""
        self._returned += 1

    @property
    def are_rare(self) -> bool:
        """Whether hardly any is asked for again."""
        return RETURNS_MAX * self._returned <= self._left
