"""The audit log: who asked for what, when, and the outcome, a line of JSON each.

It tells admissions that were refused, who connects (Hello), who clears and who ends the server, and what changed in the
files that say who may. With a file of its own, rotation is left to tools such as logrotate: a file that was moved away
is opened anew with the next line.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from unified_cache.errors import ConfigError
from unified_cache.service.access.callers import AuditEntry
from unified_cache.service.operations.logs import JsonLines, Log, LogRateLimit
from unified_cache.settings.observing import AuditSettings
from unified_cache.wire.calls import Call

__all__ = ["AuditFile", "AuditLog", "open_audit"]

_LEVEL = "audit"
_OK = "OK"


class AuditFile(JsonLines):
    """Lines at the end of a file, which is opened anew once there is another, or none, at its path."""

    def __init__(self, path: Path, wall_clock: Callable[[], float]) -> None:
        """Open the file, made with mode 0600 if absent.

        Raises:
            OSError: it cannot be opened, or is a link.
        """
        super().__init__(_opened(path), wall_clock)
        self._path = path

    def close(self) -> None:
        """Let the file go."""
        self._stream.close()

    def _current_stream(self) -> TextIO:
        if not self._is_current():
            self._stream.close()
            self._stream = _opened(self._path)
        return self._stream

    def _is_current(self) -> bool:
        try:
            return not self._stream.closed and os.path.samestat(os.fstat(self._stream.fileno()), self._path.lstat())
        except FileNotFoundError:
            return False


class AuditLog:
    """Writes entries. Whoever can cause many, by Hello or by being refused, has them paced: ``left_out`` counts those.

    What clears, ends the server, or changes who may call is always written. Thread-safe.
    """

    def __init__(self, lines: JsonLines, pace: LogRateLimit) -> None:
        self._lines = lines
        self._pace = pace

    def write(self, entry: AuditEntry) -> bool:
        """Write one entry, unless there were too many of its kind and tenant; False where the line could not be."""
        fields: dict[str, object] = {"kind": entry.kind}
        tenant = ""
        if entry.caller is not None:
            tenant = entry.caller.tenant
            fields |= {"tenant": tenant, "role": entry.caller.role.value, "credential": entry.caller.credential}
        if entry.peer:
            fields["peer"] = entry.peer
        fields |= {"outcome": entry.outcome, "about": entry.about}
        if entry.outcome != _OK or entry.kind == Call.HELLO.value:
            left_out_count = self._pace.passes(f"{entry.kind} {tenant}")
            if left_out_count is None:
                return True
            if left_out_count:
                fields["left_out"] = left_out_count
        return self._lines.write(_LEVEL, fields)


def open_audit(settings: AuditSettings, log: Log, pace: LogRateLimit, opened: ExitStack) -> AuditLog:
    """Open the audit log, which ``opened`` closes: a file of its own, or lines of the log.

    Raises:
        ConfigError: the file cannot be written.
    """
    if settings.file is None:
        return AuditLog(log.lines, pace)
    try:
        file = AuditFile(settings.file, log.lines.wall_clock)
    except OSError as error:
        raise ConfigError(f"audit.file {settings.file} must be a file that can be written: {error.strerror}") from error
    opened.callback(file.close)
    return AuditLog(file, pace)


def _opened(path: Path) -> TextIO:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "a", encoding="utf-8")
