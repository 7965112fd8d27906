"""A value that is read from files, and again when they change, without a restart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.service import AccessSettings
from unified_cache.service.access.callers import AuditEntry, Observer
from unified_cache.storage_backends.remote.credentials import stamp_of

Value = TypeVar("Value")


class Reloaded(Generic[Value]):
    """Read a value at once, and again when one of its files was changed.

    Files that cannot be read, one that is half written or gone, are an anomaly at every look. The last value then holds
    for a while, and after that ``current`` has none: what was revoked meanwhile must not hold for ever. Thread-safe:
    one thread looks, the others go on with what there is. ``clock`` gives seconds.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], Value],
        pace: AccessSettings,
        clock: Callable[[], float],
        observer: Observer,
        changes: Callable[[Value, Value], Sequence[tuple[str, str]]],
    ) -> None:
        """Read the value; ``changes`` says for the audit log, by kind and in words, in what a later one differs."""
        self._paths = tuple(paths)
        self._read = read
        self._pace = pace
        self._clock = clock
        self._observer = observer
        self._changes = changes
        self._stamp = stamp_of(self._paths)
        self._value = read()
        self._looked_s = self._good_s = clock()
        self._is_failing = False
        self._guard = Lock()

    def current(self) -> Value | None:
        """Return the value, at most ``check_s`` old; None where it could not be read for ``stale_s_max``."""
        value = self.latest()
        return None if self.stale_s() > self._pace.stale_s_max else value

    def latest(self) -> Value:
        """Return the last value that could be read, however old."""
        now_s = self._clock()
        if now_s - self._looked_s >= self._pace.check_s:
            self._look_alone(now_s)
        return self._value

    def refreshed(self) -> Value | None:
        """Look at the files at once, whenever that was done last; return the value as ``current`` does."""
        if not self._is_failing:
            self._look_alone(self._clock())
        return self.current()

    def stale_s(self) -> float:
        """Return the time since the value could last be read; 0 if that is so now."""
        self.latest()
        return self._clock() - self._good_s if self._is_failing else 0.0

    def _look_alone(self, now_s: float) -> None:
        if self._guard.acquire(blocking=False):
            try:
                self._look(now_s)
            finally:
                self._guard.release()

    def _look(self, now_s: float) -> None:
        self._looked_s = now_s
        try:
            stamp = stamp_of(self._paths)
            if self._is_failing or stamp != self._stamp:
                before, self._value = self._value, self._read()
                self._stamp = stamp
                if before != self._value:
                    for kind, about in self._changes(before, self._value):
                        self._observer.audited(AuditEntry(kind, None, "", "OK", about))
            self._good_s, self._is_failing = now_s, False
        except ConfigError as error:
            self._is_failing = True
            left_s = self._pace.stale_s_max - (now_s - self._good_s)
            rest = f"for another {left_s:.0f} s" if left_s >= 0 else "no more"
            self._observer.anomaly("reload_failed", f"{error}; what was read before holds {rest}")
