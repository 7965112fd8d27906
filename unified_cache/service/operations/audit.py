"""The audit log: who asked for what, when, and the outcome, a line of JSON each.

It tells admissions that were refused, who connects (Hello), who clears and who ends the server, and what changed in the
files that say who may. With a file of its own, rotation is left to tools such as logrotate: a file that was moved away
is opened anew with the next line.
"""

import os
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


class AuditFile:
    """A file that is written at its end, and opened anew once there is another, or none, at its path."""

    def __init__(self, path: Path) -> None:
        """Open the file, made with mode 0600 if absent.

        Raises:
            OSError: it cannot be opened, or is a link.
        """
        self._path = path
        self._file = self._opened()

    def write(self, text: str) -> int:
        """Write a text at the end.

        Raises:
            OSError: it cannot be written.
        """
        if not self._is_current():
            self._file.close()
            self._file = self._opened()
        return self._file.write(text)

    def flush(self) -> None:
        """Hand what was written over to the system.

        Raises:
            OSError: it cannot be written.
        """
        self._file.flush()

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    def _opened(self) -> TextIO:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self._path, flags, 0o600), "a", encoding="utf-8")

    def _is_current(self) -> bool:
        try:
            return not self._file.closed and os.path.samestat(os.fstat(self._file.fileno()), self._path.lstat())
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
        file = AuditFile(settings.file)
    except OSError as error:
        raise ConfigError(f"audit.file {settings.file} must be a file that can be written: {error.strerror}") from error
    opened.callback(file.close)
    return AuditLog(log.lines.to(file), pace)
