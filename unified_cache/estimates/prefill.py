"""Time that an engine takes to compute a part of a prompt, measured from its locks to its inserts.

Computing tokens [start, end) on top of a prefix takes some time at all, some for each token, and, in attention, some
for each pair of tokens, which grows as end² - start². The three are fitted over the last requests. An engine that
computes many requests at a time is measured as it is: what a request waits for others while it holds its lock counts
as computing.
"""

from collections.abc import Callable

from unified_cache.estimates.recent import FittedSeconds, RecentTimes

__all__ = ["PREFILL_PARTS", "MeasuredPrefill", "prefill_parts"]

PREFILL_PARTS = 3
"""Of a prefill: some time at all, for each token, for each pair."""


def prefill_parts(start: int, end: int) -> tuple[float, float, float]:
    """Return the sizes of the parts of computing tokens [start, end)."""
    return (1.0 if end > start else 0.0, float(end - start), float(end**2 - start**2))


class MeasuredPrefill:
    """Times from lock to insert, of requests by anything hashable that is theirs, such as their lock."""

    __slots__ = ("_began_s", "_clock", "_times")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times = RecentTimes(PREFILL_PARTS)
        self._began_s: dict[object, float] = {}

    def begin(self, request: object) -> None:
        """Note that a request computes from now on, until ``end`` or ``leave``."""
        self._began_s[request] = self._clock()

    def end(self, request: object, start: int, end: int) -> None:
        """Note that a request that has begun has computed tokens [start, end); nothing if it has not."""
        began_s = self._began_s.pop(request, None)
        if began_s is not None and end > start:
            self._times.note(prefill_parts(start, end), self._clock() - began_s)

    def leave(self, request: object) -> None:
        """Forget a request that has computed nothing."""
        self._began_s.pop(request, None)

    def requests(self) -> set[object]:
        """Return the requests under way."""
        return set(self._began_s)

    def leave_all(self) -> None:
        """Forget all requests under way."""
        self._began_s.clear()

    @property
    def fitted(self) -> FittedSeconds | None:
        """Seconds of the parts; None while too little is known."""
        return self._times.fitted
