"""Updates of a live page: figures of one moment as JSON, and totals once a second, from which its rates follow."""

import json
import time
from collections import deque
from collections.abc import Callable

from unified_cache.observe.live.authenticator import View
from unified_cache.observe.live.figures import FIGURES_FORMAT, LiveFigures, LiveSource
from unified_cache.observe.live.readers import event_bytes

__all__ = ["POINTS_MAX", "HistoryPoint", "LiveUpdate", "LiveUpdates"]

POINTS_MAX = 600
"""Points kept: ten minutes."""

POINT_EVERY_S = 1.0
"""Between two points."""

HistoryPoint = list[float]
"""Totals at one moment: seconds of a clock that never goes back, the fields of ``FoundPages``, bytes of each link."""

_encoded = json.JSONEncoder(separators=(",", ":")).encode


class LiveUpdate:
    """Figures of one moment, and the text of them for each view, made when it is first asked for."""

    __slots__ = ("_events", "_texts", "figures", "point")

    def __init__(self, figures: LiveFigures, point: HistoryPoint | None) -> None:
        self.figures = figures
        self.point = point
        """Point of the history that they made; None where none was due."""
        self._texts: dict[View, bytes] = {}
        self._events: dict[View, bytes] = {}

    def text(self, view: View) -> bytes:
        """Return the figures as JSON, with the point of the history that they made."""
        if view not in self._texts:
            text = _encoded(
                {
                    "format": FIGURES_FORMAT,
                    **self.figures.as_json(with_tenants=view is View.EVERYTHING),
                    "age_s": round(time.time() - self.figures.counted_at_s, 3),
                    "point": self.point,
                }
            )
            self._texts[view] = text.encode()
        return self._texts[view]

    def event(self, view: View) -> bytes:
        """Return the same as a server-sent event."""
        if view not in self._events:
            self._events[view] = event_bytes("figures", self.text(view))
        return self._events[view]


class LiveUpdates:
    """Readings of one source, and the history that they make. For one thread."""

    __slots__ = ("_clock", "_due_s", "_source", "latest", "points")

    def __init__(self, source: LiveSource, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the source for the first time."""
        self._source = source
        self._clock = clock
        self.points: deque[HistoryPoint] = deque(maxlen=POINTS_MAX)
        """Points of the last minutes, the oldest first."""
        self._due_s = clock()
        """Time of the next point."""
        self.latest = self._read()
        """The update read last."""

    def read(self) -> bool:
        """Read the figures of this moment; return whether there is anything new in them."""
        before, self.latest = self.latest, self._read()
        return self.latest.point is not None or self.latest.figures is not before.figures

    def _read(self) -> LiveUpdate:
        figures, now_s = self._source.figures(), self._clock()
        if now_s < self._due_s:
            return LiveUpdate(figures, None)
        self._due_s = now_s + POINT_EVERY_S
        point = [round(now_s, 2), *figures.found, *(link.bytes for link in figures.links)]
        self.points.append(point)
        return LiveUpdate(figures, point)
