"""Choice between bringing pages up from a lower tier and computing them again, as a setting of a cache."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from unified_cache.arguments import check_each
from unified_cache.errors import ConfigError

__all__ = ["PrefillCurve", "TransferPolicy"]


class TransferPolicy(Enum):
    """Rule of what is brought up to a request from host memory and storage."""

    ALWAYS = "always"
    """All that lower tiers add to its prefix and that there is room for."""
    FASTEST = "fastest"
    """What makes the first token come soonest, by what transfers and prefills took lately; until enough of them have
    been seen, and wherever the difference is less than the figures are sure of, as ``ALWAYS``."""
    NEVER = "never"
    """Nothing: ``prefetch`` and ``load`` return None. Pages are still backed up, for others."""


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Seconds that an engine takes to compute a prompt from nothing, by its length in tokens.

    Computing tokens [start, end) on top of a prefix takes the difference between the curve at both. Between two points
    it is straight, and after the last one it goes on as between the last two.
    """

    points: tuple[tuple[int, float], ...]
    """(tokens, seconds), ascending; (0, 0.0) is understood."""

    def __post_init__(self) -> None:
        expected = "points of a curve as a tuple of (tokens, seconds), such as ((4096, 0.8), (32768, 9.0))"
        check_each(self.points, tuple, expected, ConfigError)
        if not self.points:
            raise ConfigError(f"expected {expected}, found none")
        for point in self.points:
            is_pair = len(point) == 2 and all(isinstance(value, int | float) for value in point)
            if not is_pair or not point[0] > 0 or not 0 <= point[1] < math.inf:
                raise ConfigError(
                    f"expected {expected}, tokens positive, seconds finite and not negative, found {point}"
                )
        for (tokens, seconds), (more_tokens, more_seconds) in pairwise(self.points):
            if more_tokens <= tokens or more_seconds < seconds:
                raise ConfigError(
                    f"a longer prompt takes no less time: expected points that rise, found {seconds} s for {tokens} "
                    f"tokens before {more_seconds} s for {more_tokens}"
                )

    def seconds(self, tokens: Sequence[int]) -> list[float]:
        """Return the seconds for prompts of these lengths, ``tokens`` not negative."""
        corners = ((0, 0.0), *self.points)
        (before, before_s), (last, last_s) = corners[-2:]
        rise_s = (last_s - before_s) / (last - before)
        return [_between(corners, count) if count < last else last_s + (count - last) * rise_s for count in tokens]


def _between(corners: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the seconds at a length before the last corner."""
    for (low, low_s), (high, high_s) in pairwise(corners):
        if tokens <= high:
            return low_s + (high_s - low_s) * (tokens - low) / (high - low)
    raise AssertionError("a length after the last corner")
