"""One way between two tiers: bytes in flight, what it took to move them, and what it will take to move some more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from unified_cache.estimates.recent import FittedSeconds, RecentTimes

__all__ = ["LegStats", "MovedBytes", "TransferLeg"]


@dataclass(frozen=True, slots=True)
class LegStats:
    """Transfers on one way between tiers whose time was expected before they began, and what they took.

    Nothing is expected before some have been timed, nor where no ``TransferPolicy`` asks for it.
    """

    transfers_count: int = 0
    expected_s: float = 0.0
    """Sum of what was expected of the bytes that they moved."""
    taken_s: float = 0.0
    """Sum of what they took."""
    off_s: float = 0.0
    """Sum of the differences between the two, each without its sign."""
    latency_s: float | None = None
    """Time before the first byte, as fitted now; None while that is unknown."""
    bytes_per_s: float | None = None
    """As ``latency_s``; infinite where bytes cost no time that could be seen."""

    @property
    def error_ratio(self) -> float | None:
        """How far off expectations were, as a share of the time taken; None where nothing was expected."""
        return self.off_s / self.taken_s if self.taken_s else None


@dataclass(slots=True)
class MovedBytes:
    """A transfer under way, as its leg sees it."""

    ahead_bytes: int
    """In flight before it."""
    began_s: float
    fitted: FittedSeconds | None
    """What was known when it began."""


class TransferLeg:
    """One way between two tiers. Belongs to the owner's thread; ``clock`` is read on workers' threads, too."""

    __slots__ = (
        "_expected_s",
        "_expects",
        "_in_flight_bytes",
        "_off_s",
        "_taken_s",
        "_times",
        "_transfers_count",
        "clock",
    )

    def __init__(self, clock: Callable[[], float], *, expects: bool = True) -> None:
        """Time transfers by ``clock``, and, unless nobody asks, expect them to take what they took lately."""
        self.clock = clock
        self._expects = expects
        self._times = RecentTimes(2)
        self._in_flight_bytes = 0
        self._transfers_count = 0
        self._expected_s = self._taken_s = self._off_s = 0.0

    @contextmanager
    def moving(self, payload_bytes: int) -> Iterator[MovedBytes]:
        """Count bytes as in flight for the length of a ``with`` block; ``note`` what came of them inside."""
        moved = MovedBytes(self._in_flight_bytes, self.clock(), self.fitted)
        self._in_flight_bytes += payload_bytes
        try:
            yield moved
        finally:
            self._in_flight_bytes -= payload_bytes

    def note(self, moved: MovedBytes, payload_bytes: int, ended_s: float) -> None:
        """Note that of a transfer so many bytes came, and when it ended by the leg's clock."""
        seconds = ended_s - moved.began_s
        if not self._expects or not payload_bytes or not seconds > 0:
            return
        bytes_count = moved.ahead_bytes + payload_bytes
        if moved.fitted is not None:
            latency_s, byte_s = moved.fitted.weights
            expected_s = latency_s + byte_s * bytes_count
            self._transfers_count += 1
            self._expected_s += expected_s
            self._taken_s += seconds
            self._off_s += abs(expected_s - seconds)
        self._times.note((1.0, bytes_count), seconds)

    @property
    def fitted(self) -> FittedSeconds | None:
        """Seconds of a transfer, and of each of its bytes and those before it; None while too little is known."""
        return self._times.fitted if self._expects else None

    @property
    def in_flight_bytes(self) -> int:
        """Bytes before a transfer that begins now."""
        return self._in_flight_bytes

    def stats(self) -> LegStats:
        """Return the figures of this moment."""
        counts = (self._transfers_count, self._expected_s, self._taken_s, self._off_s)
        fitted = self.fitted
        if fitted is None:
            return LegStats(*counts)
        latency_s, byte_s = fitted.weights
        return LegStats(*counts, latency_s, 1 / byte_s if byte_s else float("inf"))
