"""Events of a long-running process, each as one line of JSON."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TextIO

__all__ = ["EventLog"]


class EventLog:
    """Writes events to a stream and flushes after each line. ``clock`` returns seconds since 1970."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock

    def write(self, event: str, fields: Mapping[str, str | int | float | None]) -> None:
        """Write time, event and fields."""
        time_text = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        self._stream.write(json.dumps({"time": time_text, "event": event, **fields}) + "\n")
        self._stream.flush()
