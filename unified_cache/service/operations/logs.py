"""The log and the audit log: lines of JSON, a bounded number of each kind."""

import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TextIO

from unified_cache.core.errors import ConfigError
from unified_cache.proto.wire import Call
from unified_cache.service.access.callers import AuditEntry

KINDS_MAX = 256
"""Kinds paced by themselves, the latest that had lines; of more at the same time, the rest are paced together."""

LINE_CHARACTERS_MAX = 2_000

LINES_AT_ONCE = 10
LINE_EVERY_S = 10.0
"""Of anomalies of one kind: lines written at once, and then one in so long."""

AUDITS_AT_ONCE = 20
AUDIT_EVERY_S = 1.0
"""Of Hellos and refusals of one tenant."""

_OK = "OK"


@dataclass(slots=True)
class _Kind:
    allowance: float
    at_s: float
    left_out_count: int = 0


class LogRateLimit:
    """Allow ``burst`` lines of a kind at once, then one in ``every_s``. Thread-safe. ``clock`` gives seconds."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._every_s = every_s
        self._clock = clock
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()
        """The one that had no line for longest first."""
        self._guard = Lock()

    def passes(self, kind: str) -> int | None:
        """Return how many of the kind were left out since the last that passed; None if this one is left out too."""
        now_s = self._clock()
        with self._guard:
            if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
                longest_ago = next(iter(self._kinds))
                if self._allowance(self._kinds[longest_ago], now_s) == self._burst:
                    del self._kinds[longest_ago]  # its allowance is a new one's
                else:
                    kind = ""
            found = self._kinds.setdefault(kind, _Kind(self._burst, now_s))
            self._kinds.move_to_end(kind)
            found.allowance = self._allowance(found, now_s)
            found.at_s = now_s
            if found.allowance < 1:
                found.left_out_count += 1
                return None
            found.allowance -= 1
            left_out_count, found.left_out_count = found.left_out_count, 0
            return left_out_count

    def _allowance(self, kind: _Kind, now_s: float) -> float:
        return min(self._burst, kind.allowance + (now_s - kind.at_s) / self._every_s)


class JsonLines:
    """Lines of JSON on a stream, each with its ``time`` and ``level``. Thread-safe, and never raises.

    A stream that is gone is no reason to stop serving. ``wall_clock`` gives seconds since the epoch.
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[TextIO]], wall_clock: Callable[[], float]) -> None:
        """``opened`` gives the stream for each line; ``on`` has one for all."""
        self.wall_clock = wall_clock
        self._opened = opened
        self._guard = Lock()

    @classmethod
    def on(cls, stream: TextIO, wall_clock: Callable[[], float]) -> "JsonLines":
        """Return lines on a stream that stays open."""
        return cls(lambda: nullcontext(stream), wall_clock)

    def write(self, level: str, fields: Mapping[str, object]) -> bool:
        """Write one line; False where it could not be."""
        now = datetime.fromtimestamp(self.wall_clock(), UTC)
        line = {"time": now.isoformat(timespec="milliseconds"), "level": level, **fields}
        try:
            with self._guard, self._opened() as stream:
                stream.write(json.dumps(line) + "\n")
                stream.flush()
        except (OSError, ValueError):
            return False
        return True


class Log:
    """Events, anomalies and audit entries of a server, a line each. Thread-safe.

    Lines that callers can cause in bulk are paced: ``left_out`` then counts those that were not written since the last.
    """

    def __init__(self, lines: JsonLines, pace: LogRateLimit) -> None:
        self.lines = lines
        """Lines as the log writes them, for others to write among its own."""
        self._pace = pace

    def event(self, kind: str, text: str) -> None:
        """Write what is meant to happen: started, draining, stopped."""
        self.lines.write("info", {"kind": kind, "text": text})

    def anomaly(self, kind: str, text: str) -> None:
        """Write what should not happen, unless there was too much of its kind lately."""
        self._write_paced(kind, "warning", {"kind": kind, "text": text[:LINE_CHARACTERS_MAX]})

    def audited(self, entry: AuditEntry) -> bool:
        """Write who asked for what, when, and the outcome; False where the line could not be.

        Hellos and refusals are left out where there were too many of their kind and tenant. What clears, ends the
        server, or changes who may call is always written.
        """
        fields: dict[str, object] = {"kind": entry.kind}
        tenant = ""
        if entry.caller is not None:
            tenant = entry.caller.tenant
            fields |= {"tenant": tenant, "role": entry.caller.role.value, "credential": entry.caller.credential}
        if entry.peer:
            fields["peer"] = entry.peer
        fields |= {"outcome": entry.outcome, "about": entry.about}
        if entry.outcome != _OK or entry.kind == Call.HELLO.value:
            return self._write_paced(f"{entry.kind} {tenant}", "audit", fields)
        return self.lines.write("audit", fields)

    def _write_paced(self, paced_kind: str, level: str, fields: dict[str, object]) -> bool:
        left_out_count = self._pace.passes(paced_kind)
        if left_out_count is None:
            return True
        return self.lines.write(level, {**fields, "left_out": left_out_count} if left_out_count else fields)


class _Forwarding(logging.Handler):
    """Handler that writes the log records of libraries as anomalies, by the name of their logger."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._trace = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with its traceback if it has one."""
        self._log.anomaly(f"log.{record.name}", self._trace.format(record))


def log_to(stream: TextIO) -> Log:
    """Make the log of a process and let what libraries log go there too; once for a process."""
    log = Log(JsonLines.on(stream, time.time), LogRateLimit(LINES_AT_ONCE, LINE_EVERY_S, time.monotonic))
    logging.basicConfig(handlers=[_Forwarding(log)], level=logging.WARNING, force=True)
    return log


def open_audit(path: Path | None, log: Log) -> Log:
    """Return the audit log: a file of its own, or, without a path, lines of the log.

    The file is made with mode 0600 if absent, and opened for each line: logrotate may move it at any time.

    Raises:
        ConfigError: the file cannot be written, or is a link.
    """
    pace = LogRateLimit(AUDITS_AT_ONCE, AUDIT_EVERY_S, time.monotonic)
    if path is None:
        return Log(log.lines, pace)
    try:
        _opened(path).close()
    except OSError as error:
        raise ConfigError(f"audit.file {path} must be a file that can be written: {error.strerror}") from error
    return Log(JsonLines(partial(_opened, path), log.lines.wall_clock), pace)


def _opened(path: Path) -> TextIO:
    # A pipe in its place would wait for a reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "a", encoding="utf-8")
