"""Results of every call: whether it was answered, whether it did what it should, how long it took."""

from collections import Counter
from threading import Lock

import grpc

from tests.soak.faults import BadTimes
from unified_cache.proto.wire import Call

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


def is_typed(code: grpc.StatusCode, details: str) -> bool:
    """Return whether the server itself gave this answer, as the contract has it."""
    return code in CONTRACT or (code is grpc.StatusCode.UNAVAILABLE and UNAVAILABLE_SAYS in details)


class CallTally:
    """Counts answers of calls from many threads; times apart those of a flood, between the two times ``flood_s``.

    Clean calls are those of well-behaved tenants that no injected fault could have touched.
    """

    def __init__(self, times: BadTimes, flood_s: tuple[float, float]) -> None:
        self._times = times
        self._flood_s = flood_s
        self._guard = Lock()
        self.codes: Counter[str] = Counter()
        self.untyped: Counter[str] = Counter()
        """Answers that are none of the contract."""
        self.refused: Counter[str] = Counter()
        """Statuses with which clean calls were refused."""
        self.clean_s: dict[bool, list[float]] = {False: [], True: []}
        """Seconds that clean calls took, by whether that was during the slow flood."""
        self.pages = 0
        """Pages that came, all compared with what was put."""
        self.wrong_pages = 0

    def note(self, call: Call, error: grpc.Call | None, start_s: float, end_s: float, *, behaves: bool) -> None:
        """Count a call; ``error`` is None where it was answered with a result. ``behaves`` is of who called."""
        code = grpc.StatusCode.OK if error is None else error.code()
        details = "" if error is None else error.details() or ""
        name = f"{call.value} {code.name}: {details[:80]}"
        with self._guard:
            self.codes[code.name] += 1
            if not is_typed(code, details):
                self.untyped[name] += 1
            if behaves and not self._times.touches(start_s, end_s):
                self.clean_s[start_s < self._flood_s[1] and end_s > self._flood_s[0]].append(end_s - start_s)
                if error is not None:
                    self.refused[name] += 1

    def page(self, *, is_right: bool) -> None:
        """Count a page that came; right are the bytes that were put under its name."""
        with self._guard:
            self.pages += 1
            self.wrong_pages += not is_right

    @property
    def availability(self) -> float:
        """Share of calls that were answered."""
        return 1 - self.untyped.total() / max(1, self.codes.total())

    @property
    def clean(self) -> int:
        """Number of clean calls."""
        return sum(map(len, self.clean_s.values()))

    @property
    def success(self) -> float:
        """Share of clean calls that did what they should."""
        return 1 - self.refused.total() / max(1, self.clean)

    def p99_s(self, *, flooded: bool = False) -> float:
        """Return what all but a hundredth of the clean calls took less than, during the flood or without it."""
        seconds = sorted(self.clean_s[flooded])
        return seconds[int(len(seconds) * 0.99)] if seconds else 0.0

    def figures(self) -> dict[str, object]:
        """Return what it comes to."""
        return {
            "availability": self.availability,
            "success": self.success,
            "clean": self.clean,
            "pages": self.pages,
            "wrong_pages": self.wrong_pages,
            "codes": self.codes,
            "untyped": dict(self.untyped.most_common(10)),
            "refused": dict(self.refused.most_common(10)),
            "p99_s": self.p99_s(),
            "p99_flooded_s": self.p99_s(flooded=True),
        }
