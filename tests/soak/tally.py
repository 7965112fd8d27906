"""Results of every call: whether it was answered, whether it did what it should, how long it took."""

from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import grpc

from tests.soak.faults import BadTimes
from unified_cache.proto.wire.calls import Call

CONTRACT = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
UNAVAILABLE_SAYS = "the store does not answer"
"""Text that tells the server's own UNAVAILABLE from that of a connection that broke."""


class CallFigures(NamedTuple):
    """Totals of a tally."""

    calls: int
    answered: int
    """Calls with an answer of the contract."""
    clean: int
    """Calls of well-behaved tenants that no injected fault could have touched."""
    clean_ok: int
    pages: int
    """Pages that came, all compared with what was put."""
    wrong_pages: int
    codes: dict[str, int]
    untyped: dict[str, int]
    refused: dict[str, int]
    """Statuses with which clean calls were refused."""
    p50_s: float
    p99_s: float
    p99_flooded_s: float
    """Of the clean calls during the slow flood; the others are all without it."""

    @property
    def availability(self) -> float:
        """Share of calls that were answered."""
        return self.answered / max(1, self.calls)

    @property
    def success(self) -> float:
        """Share of clean calls that did what they should."""
        return self.clean_ok / max(1, self.clean)


def is_typed(code: grpc.StatusCode, details: str) -> bool:
    """Tell whether the server itself gave this answer, as the contract has it."""
    return code in CONTRACT or (code is grpc.StatusCode.UNAVAILABLE and UNAVAILABLE_SAYS in details)


class CallTally:
    """Counts answers of calls from many threads; times apart those of a flood, between the two times ``flood_s``."""

    def __init__(self, times: BadTimes, flood_s: tuple[float, float]) -> None:
        self._times = times
        self._flood_s = flood_s
        self._codes: Counter[str] = Counter()
        self._untyped: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._clean_s: list[float] = []
        self._flooded_s: list[float] = []
        self._pages = 0
        self._wrong_pages = 0
        self._guard = Lock()

    def note(self, call: Call, error: grpc.Call | None, start_s: float, end_s: float, *, behaves: bool) -> None:
        """Count a call; ``error`` is None where it was answered with a result. ``behaves`` is of who called."""
        code = grpc.StatusCode.OK if error is None else error.code()
        details = "" if error is None else error.details() or ""
        name = f"{call.value} {code.name}: {details[:80]}"
        with self._guard:
            self._codes[code.name] += 1
            if not is_typed(code, details):
                self._untyped[name] += 1
            if behaves and not self._times.touches(start_s, end_s):
                is_flooded = start_s < self._flood_s[1] and end_s > self._flood_s[0]
                (self._flooded_s if is_flooded else self._clean_s).append(end_s - start_s)
                if error is not None:
                    self._refused[name] += 1

    def page(self, *, is_right: bool) -> None:
        """Count a page that came; right are the bytes that were put under its name."""
        with self._guard:
            self._pages += 1
            self._wrong_pages += not is_right

    def figures(self) -> CallFigures:
        """Return what it comes to now."""
        with self._guard:
            calls, clean = self._codes.total(), len(self._clean_s) + len(self._flooded_s)
            return CallFigures(
                calls=calls,
                answered=calls - self._untyped.total(),
                clean=clean,
                clean_ok=clean - self._refused.total(),
                pages=self._pages,
                wrong_pages=self._wrong_pages,
                codes=dict(self._codes.most_common()),
                untyped=dict(self._untyped.most_common(10)),
                refused=dict(self._refused.most_common(10)),
                p50_s=_quantile(self._clean_s, 0.5),
                p99_s=_quantile(self._clean_s, 0.99),
                p99_flooded_s=_quantile(self._flooded_s, 0.99),
            )


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else 0.0
