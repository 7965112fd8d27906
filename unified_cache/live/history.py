"""The last minutes: totals once a second, from which rates and ratios of any stretch follow."""

from collections import deque
from dataclasses import dataclass

from unified_cache.live.figures import FoundPages, LiveFigures

__all__ = ["HISTORY_POINTS_MAX", "HistoryPoint", "LastMinute", "LiveHistory"]

HISTORY_POINTS_MAX = 600
"""Points kept: ten minutes."""

POINT_EVERY_S = 1.0
"""Between two points."""

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Totals at one moment."""

    at_s: float
    """By a clock that never goes back."""
    found: FoundPages
    leg_bytes: tuple[int, ...]
    """In the order of the legs of the figures."""

    def as_json(self) -> list[object]:
        """Return the totals in their order, as short as they can be said."""
        return [round(self.at_s, 2), *self.found, *self.leg_bytes]


@dataclass(frozen=True, slots=True)
class LastMinute:
    """Rates and ratios over the last minute, or over what there is of it."""

    seconds: float
    lookups_per_s: float
    device_ratio: float
    """Share of the pages asked for that the device had."""
    host_ratio: float
    """Share that host memory had, without what storage gave it."""
    storage_ratio: float
    bytes_per_s: tuple[float, ...]

    @classmethod
    def between(cls, first: HistoryPoint, last: HistoryPoint) -> "LastMinute":
        """Return what has come from one moment to the other."""
        seconds = last.at_s - first.at_s
        now, then = last.found, first.found
        per_page = 1 / (now.asked - then.asked) if now.asked > then.asked else 0.0
        per_s = 1 / seconds if seconds > 0 else 0.0
        prefetched = now.prefetched - then.prefetched
        host = max(0, now.host - then.host - prefetched)
        return cls(
            seconds,
            (now.lookups - then.lookups) * per_s,
            device_ratio=(now.device - then.device) * per_page,
            host_ratio=host * per_page,
            storage_ratio=(now.host - then.host - host + now.storage - then.storage) * per_page,
            bytes_per_s=tuple(
                (late - early) * per_s for early, late in zip(first.leg_bytes, last.leg_bytes, strict=True)
            ),
        )

    def as_json(self) -> dict[str, object]:
        """Return the fields by name."""
        return {
            "seconds": round(self.seconds, 2),
            "lookups_per_s": round(self.lookups_per_s, 3),
            "device_ratio": round(self.device_ratio, 6),
            "host_ratio": round(self.host_ratio, 6),
            "storage_ratio": round(self.storage_ratio, 6),
            "bytes_per_s": [round(each, 1) for each in self.bytes_per_s],
        }


class LiveHistory:
    """Points of the last ten minutes, one a second. For one thread."""

    __slots__ = ("_minute", "_points")

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque(maxlen=HISTORY_POINTS_MAX)
        self._minute: deque[HistoryPoint] = deque(maxlen=HISTORY_POINTS_MAX)
        """Points of the last minute."""

    @property
    def points(self) -> tuple[HistoryPoint, ...]:
        """Points, the oldest first."""
        return tuple(self._points)

    def note(self, figures: LiveFigures, now_s: float) -> HistoryPoint | None:
        """Take the figures of this moment; return the point made of them, None if the last one is too young."""
        if self._points and now_s < self._points[-1].at_s + POINT_EVERY_S:
            return None
        point = _point_of(figures, now_s)
        self._points.append(point)
        self._minute.append(point)
        return point

    def last_minute(self, figures: LiveFigures, now_s: float) -> LastMinute:
        """Return rates and ratios from a minute ago up to ``figures``; ``now_s`` never goes back."""
        last = _point_of(figures, now_s)
        while self._minute and self._minute[0].at_s < now_s - MINUTE_S:
            self._minute.popleft()
        return LastMinute.between(self._minute[0] if self._minute else last, last)


def _point_of(figures: LiveFigures, now_s: float) -> HistoryPoint:
    return HistoryPoint(now_s, figures.found, tuple(leg.bytes for leg in figures.legs))
