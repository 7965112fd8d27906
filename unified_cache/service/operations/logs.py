"""Log lines in JSON, a bounded number of each kind."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import TextIO

from unified_cache.settings.observing import LogSettings

__all__ = ["JsonLines", "Log", "LogRateLimit", "log_to"]

KINDS_MAX = 256
"""Kinds paced by themselves; any further ones are paced together."""

LINE_CHARACTERS_MAX = 2_000


@dataclass(slots=True)
class _Kind:
    allowance: float
    at_s: float
    left_out_count: int = 0


class LogRateLimit:
    """Let ``burst`` lines of a kind through at once, then one in ``every_s``. Thread-safe. ``clock`` gives seconds."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._every_s = every_s
        self._clock = clock
        self._kinds: dict[str, _Kind] = {}
        self._guard = Lock()

    def passes(self, kind: str) -> int | None:
        """Return how many of the kind were left out since the last that passed; None if this one is left out too."""
        now_s = self._clock()
        with self._guard:
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                kind = ""
            found = self._kinds.setdefault(kind, _Kind(self._burst, now_s))
            found.allowance = min(self._burst, found.allowance + (now_s - found.at_s) / self._every_s)
            found.at_s = now_s
            if found.allowance < 1:
                found.left_out_count += 1
                return None
            found.allowance -= 1
            left_out_count, found.left_out_count = found.left_out_count, 0
            return left_out_count


class JsonLines:
    """Lines of JSON on a stream, each with its ``time`` and ``level``. Thread-safe, and never raises.

    A stream that is gone is no reason to stop serving. ``wall_clock`` gives seconds since the epoch.
    """

    def __init__(self, stream: TextIO, wall_clock: Callable[[], float]) -> None:
        self.wall_clock = wall_clock
        self._stream = stream
        self._guard = Lock()

    def write(self, level: str, fields: Mapping[str, object]) -> bool:
        """Write one line; False where it could not be."""
        now = datetime.fromtimestamp(self.wall_clock(), UTC)
        line = {"time": now.isoformat(timespec="milliseconds"), "level": level, **fields}
        try:
            with self._guard:
                stream = self._current_stream()
                stream.write(json.dumps(line) + "\n")
                stream.flush()
        except (OSError, ValueError):
            return False
        return True

    def _current_stream(self) -> TextIO:
        """Return the stream for the next line; the caller holds the guard."""
        return self._stream


class Log:
    """The log of a server: ``time``, ``level``, ``kind``, ``text``, and ``left_out`` where lines were. Thread-safe."""

    def __init__(self, stream: TextIO, pace: LogRateLimit, wall_clock: Callable[[], float]) -> None:
        self.lines = JsonLines(stream, wall_clock)
        """Lines as the log writes them, for others to write among its own."""
        self._pace = pace

    def event(self, kind: str, text: str) -> None:
        """Write what is meant to happen: started, draining, stopped."""
        self._write("info", kind, text, 0)

    def anomaly(self, kind: str, text: str) -> None:
        """Write what should not happen, unless there was too much of its kind lately."""
        left_out_count = self._pace.passes(kind)
        if left_out_count is not None:
            self._write("warning", kind, text, left_out_count)

    def _write(self, level: str, kind: str, text: str, left_out_count: int) -> None:
        fields: dict[str, object] = {"kind": kind, "text": text[:LINE_CHARACTERS_MAX]}
        if left_out_count:
            fields["left_out"] = left_out_count
        self.lines.write(level, fields)


class _Forwarding(logging.Handler):
    """Handler that writes the log records of libraries as anomalies, by the name of their logger."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._trace = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with its traceback if it has one."""
        self._log.anomaly(f"log.{record.name}", self._trace.format(record))


def log_to(stream: TextIO, settings: LogSettings) -> Log:
    """Make the log of a process and let what libraries log go there too; once for a process."""
    log = Log(stream, LogRateLimit(settings.burst, settings.every_s, time.monotonic), time.time)
    logging.basicConfig(handlers=[_Forwarding(log)], level=logging.WARNING, force=True)
    return log
