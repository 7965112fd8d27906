"""Updates of a live page: figures of one moment as JSON."""

import json
import time

from unified_cache.live.door import View
from unified_cache.live.figures import FIGURES_FORMAT, LiveFigures, LiveSource
from unified_cache.live.history import HistoryPoint, LiveHistory
from unified_cache.live.readers import event_bytes

__all__ = ["LiveUpdate", "LiveUpdates"]

_encoded = json.JSONEncoder(separators=(",", ":")).encode


class LiveUpdate:
    """Figures of one moment, and the text of them for each view, made when it is first asked for."""

    __slots__ = ("_events", "_minute", "_texts", "figures", "point")

    def __init__(self, figures: LiveFigures, point: HistoryPoint | None, minute: dict[str, object]) -> None:
        self.figures = figures
        self.point = point
        """Point of the history that they made; None where none was due."""
        self._minute = minute
        self._texts: dict[View, bytes] = {}
        self._events: dict[View, bytes] = {}

    def text(self, view: View) -> bytes:
        """Return the figures as JSON, with the last minute and the point of the history that they made."""
        if view not in self._texts:
            told = _encoded(
                {
                    "format": FIGURES_FORMAT,
                    **self.figures.as_json(with_tenants=view is View.EVERYTHING),
                    "age_s": round(time.time() - self.figures.counted_at_s, 3),
                    "last_minute": self._minute,
                    "point": None if self.point is None else self.point.as_json(),
                }
            )
            self._texts[view] = told.encode()
        return self._texts[view]

    def event(self, view: View) -> bytes:
        """Return the same as a server-sent event."""
        if view not in self._events:
            self._events[view] = event_bytes("figures", self.text(view))
        return self._events[view]


class LiveUpdates:
    """Readings of one source, and the history that they make. For one thread."""

    __slots__ = ("_minute", "_source", "history", "latest")

    def __init__(self, source: LiveSource) -> None:
        """Read the source for the first time."""
        self._source = source
        self._minute: dict[str, object] = {}
        self.history = LiveHistory()
        """Points of the last minutes."""
        self.latest = self._read()
        """The update read last."""

    def read(self) -> bool:
        """Read the figures of this moment; tell whether there is anything new in them."""
        before, self.latest = self.latest, self._read()
        return self.latest.point is not None or self.latest.figures is not before.figures

    def _read(self) -> LiveUpdate:
        figures, now_s = self._source.figures(), time.monotonic()
        point = self.history.note(figures, now_s)
        if point is not None:
            self._minute = self.history.last_minute(figures, now_s).as_json()
        return LiveUpdate(figures, point, self._minute)
