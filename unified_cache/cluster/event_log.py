"""One line of JSON for each thing that happens to a process that runs for long."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TextIO

__all__ = ["EventLog"]


class EventLog:
    """Writes to a stream, each line at once. ``clock`` tells seconds since 1970."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock

    def write(self, event: str, fields: Mapping[str, str | int | float | None]) -> None:
        """Write time, event and fields."""
        time_text = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        self._stream.write(json.dumps({"time": time_text, "event": event, **fields}) + "\n")
        self._stream.flush()
