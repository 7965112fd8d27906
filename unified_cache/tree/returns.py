"""Counts of how often things of one kind are asked for again, by which rare ones go before others."""

__all__ = ["Returns"]

HALVED_AT = 4096
"""Things that are counted before the counts are halved: habits change."""
RARE = 1 / 16
"""Part of a kind that may be asked for again, if it is to go before others."""


class Returns:
    """Count of how often one kind of page or window is asked for again."""

    __slots__ = ("_left", "_returned")

    def __init__(self, left: float = 0.0, returned: float = 0.0) -> None:
        """Begin with what is expected before anything was seen."""
        self._left = left
        self._returned = returned

    def leave(self) -> None:
        """Record a thing of that kind."""
        if self._left >= HALVED_AT:
            self._left /= 2
            self._returned /= 2
        self._left += 1

    def come_back(self) -> None:
        """Record that one was asked for again."""
        self._returned += 1

    @property
    def part(self) -> float:
        """Part of them that is asked for again."""
        return self._returned / self._left

    @property
    def are_rare(self) -> bool:
        """Whether hardly any is asked for again."""
        return self._returned <= RARE * self._left
