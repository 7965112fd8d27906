"""Time that an engine takes to compute a token, a moving average over its requests, each from its lock to its insert.

An engine that computes many requests at a time is measured as it is: what a request waits for others while it holds its
lock counts as computing.
"""

import math
from collections.abc import Callable

__all__ = ["PrefillTime"]

KEPT_SHARE = 0.8
"""Part of what is known that stays when a request is counted: the last five weigh two thirds."""

KNOWN_MIN = 4
"""Requests counted before anything is said of the next one."""


class PrefillTime:
    """Moving average of what a token takes; requests are named by anything hashable, such as their lock."""

    __slots__ = ("_began_s", "_clock", "_count", "_seconds", "_tokens")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._seconds = self._tokens = 0.0
        self._began_s: dict[object, float] = {}

    def begin(self, request: object) -> None:
        """Record that a request computes from now on, until ``end`` or ``leave``."""
        self._began_s[request] = self._clock()

    def end(self, request: object, tokens: int) -> None:
        """Count the tokens that a request has computed since it began."""
        seconds = self._clock() - self._began_s.pop(request, math.inf)
        if tokens > 0 and 0 < seconds < math.inf:
            self._count += 1
            self._seconds = KEPT_SHARE * self._seconds + seconds
            self._tokens = KEPT_SHARE * self._tokens + tokens

    def leave(self, request: object) -> None:
        """Forget a request that has computed nothing."""
        self._began_s.pop(request, None)

    def leave_all(self) -> None:
        """Forget all requests under way."""
        self._began_s.clear()

    def requests(self) -> set[object]:
        """Return the requests under way."""
        return set(self._began_s)

    @property
    def token_s(self) -> float:
        """Seconds of a token; NaN while too little is known."""
        return self._seconds / self._tokens if self._count >= KNOWN_MIN else math.nan
