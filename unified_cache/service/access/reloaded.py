"""A value that is read from files, and again when they change, without a restart."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from unified_cache.errors import ConfigError
from unified_cache.service.access.callers import Observer

__all__ = ["Reloaded"]

Value = TypeVar("Value")

_Stamp = tuple[tuple[int, int, int], ...]


class Reloaded(Generic[Value]):
    """Read a value at once, and again when one of its files was changed, looked at no more often than ``check_s``.

    A change that cannot be read, a file half written or a key of another certificate, is an anomaly and keeps the last
    value. Thread-safe: one thread looks, the others go on with what there is. ``clock`` gives seconds.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], Value],
        check_s: float,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        """Read the value.

        Raises:
            ConfigError: it cannot be read, or makes no sense.
        """
        self._paths = tuple(paths)
        self._read = read
        self._check_s = check_s
        self._clock = clock
        self._observer = observer
        self._stamp = self._look()
        self._value = read()
        self._looked_s = clock()
        self._guard = Lock()

    def current(self) -> Value:
        """Return the value, at most ``check_s`` old."""
        if self._clock() - self._looked_s < self._check_s or not self._guard.acquire(blocking=False):
            return self._value
        try:
            self._looked_s = self._clock()
            stamp = self._look()
            if stamp != self._stamp:
                # Of what is half written there is another change to come.
                self._stamp = stamp
                self._value = self._read()
        except ConfigError as error:
            self._observer.anomaly("reload_failed", str(error))
        finally:
            self._guard.release()
        return self._value

    def _look(self) -> _Stamp:
        try:
            found = [path.stat() for path in self._paths]
        except OSError as error:
            raise ConfigError(f"{error.filename} must be a file that can be read: {error.strerror}") from error
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)
