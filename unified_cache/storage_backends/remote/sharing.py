"""Memory shared with a server on the same machine: offered once, lent to calls, given up where anything goes wrong."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from threading import Lock
from typing import NamedTuple

import grpc

from unified_cache.errors import InputError
from unified_cache.storage_backends.common.backoff import Backoff
from unified_cache.storage_backends.common.breaker import CircuitBreaker
from unified_cache.wire.sharing import WINDOW_OFFSET, RegionOffer, RegionTie, SharedRegion, SharedSlice

__all__ = ["CALL_BYTES", "LentSlice", "RegionGrant", "RegionSharing"]

REGION_BYTES = 128 << 20
"""Offered to a server, where it takes as much and the machine has it; else a half of it, and so on."""

REGION_BYTES_MIN = 8 << 20

CALL_BYTES = (16 << 20) + (128 << 10)
"""Asked for in one call, about, where memory is shared: some calls are under way at a time, each with a window.

16 MiB of payloads and their headers: a call for the last page of a round number would cost as much as 4 MiB of copies.
"""

RETRY_S = 30.0
"""Until memory is offered again to a server that did not take it."""

ALIGNMENT = 4096
"""Windows begin at pages of the machine's memory, ``WINDOW_OFFSET`` further on."""

SAFE_SHARE = 0.5
"""Of the time after which the server lets an unused region go, how long one is taken to be there."""


class RegionGrant(NamedTuple):
    """Answer of the server to an offer that it has taken up."""

    region: str
    idle_s: float
    tie: RegionTie


class _OpenRegion:
    """One region, and who uses which part of it."""

    __slots__ = ("granted", "lent", "region", "used_s")

    def __init__(self, region: SharedRegion, granted: RegionGrant, used_s: float) -> None:
        self.region = region
        self.granted = granted
        self.used_s = used_s
        self.lent: list[SharedSlice] = []
        """By start."""

    def take(self, length: int) -> SharedSlice | None:
        """Lend the first gap that is large enough."""
        start = WINDOW_OFFSET
        for number, window in enumerate([*self.lent, None]):
            gap_end = self.region.region_bytes if window is None else window.start
            if gap_end - start >= length:
                taken = SharedSlice(self.region, self.granted.region, start, length)
                self.lent.insert(number, taken)
                return taken
            if window is not None:
                start = -(-(window.start + window.length) // ALIGNMENT) * ALIGNMENT + WINDOW_OFFSET
        return None


class LentSlice(NamedTuple):
    """A window for one call."""

    window: SharedSlice
    of: _OpenRegion


class RegionSharing:
    """Regions of one server, one at a time. Thread-safe."""

    def __init__(
        self,
        offer: Callable[[RegionOffer, float], RegionGrant | None],
        clock: Callable[[], float],
    ) -> None:
        self._offer = offer
        self._clock = clock
        self._open: _OpenRegion | None = None
        self._is_offering = False
        self._breaker = CircuitBreaker(1, Backoff(RETRY_S, RETRY_S), clock)
        self._guard = Lock()

    def lend(self, length: int, region_bytes_max: int, timeout_s: float) -> LentSlice | None:
        """Return a window for one call; None where there is no room, or nobody to share with.

        A region that is to be offered first is offered by one thread, which waits at most ``timeout_s`` for the server;
        the others share nothing meanwhile.
        """
        now_s = self._clock()
        with self._guard:
            opened = self._open
            if opened is not None and now_s - opened.used_s > opened.granted.idle_s * SAFE_SHARE:
                self._drop()
            must_offer = self._open is None and not self._is_offering and not self._breaker.is_resting
            if must_offer:
                self._is_offering = True
        if must_offer:
            self._offer_region(min(REGION_BYTES, region_bytes_max), timeout_s)
        with self._guard:
            if self._open is None:
                return None
            self._open.used_s = now_s
            window = self._open.take(length)
            return None if window is None else LentSlice(window, self._open)

    def _offer_region(self, region_bytes: int, timeout_s: float) -> None:
        opened: _OpenRegion | None = None
        try:
            opened = self._opened(region_bytes, timeout_s)
        finally:
            with self._guard:
                self._is_offering = False
                self._open = opened
                if opened is None:
                    self._breaker.record_failure()
                else:
                    self._breaker.record_success()

    @contextmanager
    def over(self, lent: LentSlice | None) -> Iterator[None]:
        """Take a window back at the end of the with block.

        Where that raises, its region is given up: the call may still be running at the server, and write.
        """
        is_well = False
        try:
            yield
            is_well = True
        finally:
            if lent is not None:
                with self._guard:
                    if not is_well and lent.of is self._open:
                        self._breaker.record_failure()
                        self._drop()
                    lent.of.lent.remove(lent.window)

    def give_up(self) -> str:
        """Let the region go with its last window; return the server's name for it, empty where there is none."""
        with self._guard:
            return self._drop()

    def _opened(self, region_bytes: int, timeout_s: float) -> _OpenRegion | None:
        while region_bytes >= REGION_BYTES_MIN:
            try:
                made = RegionOffer.make(region_bytes)
            except OSError:
                region_bytes //= 2
                continue
            with closing(made), suppress(grpc.RpcError, InputError):
                granted = self._offer(made, timeout_s)
                return None if granted is None else _OpenRegion(made.region, granted, self._clock())
            return None
        return None

    def _drop(self) -> str:
        over, self._open = self._open, None
        if over is None:
            return ""
        over.granted.tie.close()
        return over.granted.region
