"""Tries of one thing that fails: how long to wait after each, and a line in the log for each new failure."""

import logging

from unified_cache.errors import InputError, StorageError
from unified_cache.storage_backends.common.backoff import Backoff

__all__ = ["Retries", "passes_by_itself"]

logger = logging.getLogger(__name__)

MENDED_PAUSE_S = 60.0
"""Pause after a failure that lasts until somebody mends its cause, such as another format or a missing right."""


class Retries:
    """Tries of one thing, one after the other; whoever tries takes care that no two do at a time."""

    __slots__ = ("_failures_count", "_pauses", "_said", "_what")

    def __init__(self, what: str, pauses: Backoff) -> None:
        """``what`` says in the log what is tried, as in "opening the store"."""
        self._what = what
        self._pauses = pauses
        self._failures_count = 0
        self._said = ""
        """Failure that the log has."""

    def failed(self, error: BaseException) -> float:
        """Return for how many seconds not to try again; log the failure unless it is the one before once more."""
        self._failures_count += 1
        passes = passes_by_itself(error)
        pause_s = self._pauses.pause_s(self._failures_count) if passes else MENDED_PAUSE_S
        if str(error) != self._said:
            self._said = str(error)
            if passes:
                logger.warning(
                    "%s failed, pages are misses meanwhile: %s; it is tried again, at least every %g s",
                    self._what,
                    error,
                    self._pauses.max_s,
                )
            else:
                logger.error(
                    "%s failed, and pages are misses until its cause is mended: %s; it is tried again every %g s",
                    self._what,
                    error,
                    MENDED_PAUSE_S,
                )
        return pause_s

    def succeeded(self) -> None:
        """Log that failures are over, if there were any."""
        if self._failures_count:
            logger.info("%s succeeded after %d failures", self._what, self._failures_count)
        self._failures_count, self._said = 0, ""


def passes_by_itself(error: BaseException) -> bool:
    """Tell whether a try that failed so may succeed later without anyone's help."""
    if isinstance(error, StorageError):
        return error.retryable
    return not isinstance(error, InputError | ValueError)
