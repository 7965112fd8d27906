"""Shared memory of callers on the same machine: offered, proved, lent to calls, and closed when idle."""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock

import grpc

from unified_cache.errors import InputError
from unified_cache.proto import service_pb2 as pb
from unified_cache.service.access.errors import Refused
from unified_cache.service.access.sweep import PeriodicSweep
from unified_cache.settings.limits import LimitSettings
from unified_cache.wire.calls import REASON, REASON_SHARE
from unified_cache.wire.sharing import ReceivedRegion, SharedSlice, is_local_peer, received_region

__all__ = ["LentRegions"]

REGION_ID_BYTES = 16
"""Length of a region's random name, so that nobody guesses another's."""


class _Held:
    """A region of a tenant, and how many calls use it."""

    __slots__ = ("region", "tenant", "tie", "used_s", "users_count")

    def __init__(self, tenant: str, received: ReceivedRegion, used_s: float) -> None:
        self.tenant = tenant
        self.region = received.region
        self.tie = received.tie
        self.used_s = used_s
        self.users_count = 0


class LentRegions:
    """Open regions of each tenant, bounded in number and size. Thread-safe.

    A region that was let go is unmapped when the last call that uses it has ended. Those of dead clients are found by
    the sweep.
    """

    def __init__(
        self,
        limits: LimitSettings,
        clock: Callable[[], float],
        new_id: Callable[[], str] = partial(secrets.token_hex, REGION_ID_BYTES),
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._new_id = new_id
        self._held: dict[str, _Held] = {}
        self._arriving: Counter[str] = Counter()
        """By tenant: regions that are being handed over."""
        self._guard = Lock()
        self._sweeper = PeriodicSweep(self.sweep, limits.region_idle_s, "region-watch")

    @property
    def region_bytes_max(self) -> int:
        """Most bytes of a region; 0 where none is taken."""
        return self._limits.region_bytes_max if self._limits.regions_max else 0

    def share(self, tenant: str, peer: str, request: pb.ShareRequest) -> pb.ShareReply:
        """Map what a caller offers and hands over; ``peer`` is where gRPC says that it is.

        Raises:
            Refused: it is not on this machine, not of this user, too large, or one too many.
        """
        if not is_local_peer(peer):
            raise _refusal("memory is shared with callers on this machine alone")
        if not 0 < request.region_bytes <= self.region_bytes_max:
            raise _refusal(f"a region has 1 to {self.region_bytes_max} bytes, found {request.region_bytes}")
        with self._arrival(tenant):
            try:
                received = received_region(request.socket_name, request.socket_proof, request.region_bytes)
            except InputError as error:
                raise _refusal(str(error)) from error
            name = self._new_id()
            with self._guard:
                self._held[name] = _Held(tenant, received, self._clock())
        self._sweeper.start()
        return pb.ShareReply(region=name, idle_s=self._limits.region_idle_s)

    @contextmanager
    def _arrival(self, tenant: str) -> Iterator[None]:
        """Keep a place for a region while it is handed over, which its tenant may be slow about.

        Raises:
            Refused: the tenant has as many as it may.
        """
        with self._guard:
            self._let_go()
            held_count = sum(held.tenant == tenant for held in self._held.values())
            if held_count + self._arriving[tenant] >= self._limits.regions_max:
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"a tenant has at most {self._limits.regions_max} regions"
                )
            self._arriving[tenant] += 1
        try:
            yield
        finally:
            with self._guard:
                self._arriving[tenant] -= 1
                if not self._arriving[tenant]:
                    del self._arriving[tenant]

    @contextmanager
    def window(self, tenant: str, asked: pb.SharedRange) -> Iterator[SharedSlice]:
        """Lend a part of a region for the length of the with block.

        Raises:
            InputError: it reaches beyond the region.
            Refused: no such region of this tenant.
        """
        with self._guard:
            held = self._held.get(asked.region)
            if held is None or held.tenant != tenant:
                raise _refusal("no such region")
            if asked.start + asked.length > held.region.region_bytes:
                raise InputError(
                    f"a region ends at {held.region.region_bytes}, found a call up to {asked.start + asked.length}"
                )
            held.users_count += 1
        try:
            yield SharedSlice(held.region, asked.region, asked.start, asked.length)
        finally:
            with self._guard:
                held.users_count -= 1
                held.used_s = self._clock()

    def unshare(self, tenant: str, name: str) -> bool:
        """Let a region go when its last call has ended; False, and nothing changed, where it is not this tenant's."""
        with self._guard:
            held = self._held.get(name)
            if held is None or held.tenant != tenant:
                return False
            self._end(name)
            return True

    def count(self, tenant: str) -> int:
        """Return how many regions a tenant has."""
        with self._guard:
            return sum(held.tenant == tenant for held in self._held.values())

    def sweep(self) -> bool:
        """Let go what a client has abandoned, or nobody has named for too long; tell whether any is left."""
        with self._guard:
            self._let_go()
            return bool(self._held)

    def _let_go(self) -> None:
        late_s = self._clock() - self._limits.region_idle_s
        for name, held in list(self._held.items()):
            if held.tie.has_ended or (not held.users_count and held.used_s <= late_s):
                self._end(name)

    def _end(self, name: str) -> None:
        self._held.pop(name).tie.close()

    def close(self) -> None:
        """Let every region go."""
        self._sweeper.close()
        with self._guard:
            for name in list(self._held):
                self._end(name)


def _refusal(text: str) -> Refused:
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, text, [(REASON, REASON_SHARE)])
