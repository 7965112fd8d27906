"""Updates of a live page: figures of one moment as JSON, of which what is rare is made anew only when it changes."""

import json
import time

from unified_cache.explain.short_hits import ShortHit
from unified_cache.live.door import View
from unified_cache.live.figures import FIGURES_FORMAT, LiveFigures, LiveSource, SlowFigures
from unified_cache.live.history import HistoryPoint, LiveHistory
from unified_cache.live.readers import event_bytes

__all__ = ["LiveUpdate", "LiveUpdates"]

_encoded = json.JSONEncoder(separators=(",", ":")).encode


class RareText:
    """JSON of the slowest operations and of the latest short hits, made anew when there are others."""

    __slots__ = ("_shown", "_text")

    def __init__(self) -> None:
        self._shown: tuple[tuple[SlowFigures, ...], tuple[ShortHit, ...]] | None = None
        self._text = b""

    def of(self, figures: LiveFigures) -> bytes:
        """Return the members of an object, without its braces."""
        shown = (figures.slowest, figures.explanations)
        if shown != self._shown:
            self._shown = shown
            self._text = _encoded(figures.rare_json())[1:-1].encode()
        return self._text


class LiveUpdate:
    """Figures of one moment, and the text of them for each view, made when it is first asked for."""

    __slots__ = ("_events", "_minute", "_rare", "_texts", "figures", "point")

    def __init__(
        self, figures: LiveFigures, point: HistoryPoint | None, minute: dict[str, object], rare: RareText
    ) -> None:
        self.figures = figures
        self.point = point
        """Point of the history that they made; None where none was due."""
        self._minute = minute
        self._rare = rare
        self._texts: dict[View, bytes] = {}
        self._events: dict[View, bytes] = {}

    def text(self, view: View) -> bytes:
        """Return the figures as JSON, with the last minute and the point of the history that they made."""
        if view not in self._texts:
            counts = _encoded(
                {
                    "format": FIGURES_FORMAT,
                    **self.figures.counts_json(with_tenants=view is View.EVERYTHING),
                    "age_s": round(time.time() - self.figures.counted_at_s, 3),
                    "last_minute": self._minute,
                    "point": None if self.point is None else self.point.as_json(),
                }
            )
            self._texts[view] = b"%b,%b}" % (counts[:-1].encode(), self._rare.of(self.figures))
        return self._texts[view]

    def event(self, view: View) -> bytes:
        """Return the same as a server-sent event."""
        if view not in self._events:
            self._events[view] = event_bytes("figures", self.text(view))
        return self._events[view]


class LiveUpdates:
    """Readings of one source, and the history that they make. For one thread."""

    __slots__ = ("_minute", "_rare", "_source", "history", "latest")

    def __init__(self, source: LiveSource) -> None:
        """Read the source for the first time."""
        self._source = source
        self._rare = RareText()
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
        return LiveUpdate(figures, point, self._minute, self._rare)
