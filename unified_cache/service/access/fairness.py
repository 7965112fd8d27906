"""What each tenant uses: bytes stored, and calls in flight that take turns so that no tenant's flood is another's wait.

A call holds a place from when it is let in until it ends. Of those that hold one, a few work at a time. Whose call is
next is decided by tenant: the one with the fewest calls at work, and among equals the one served longest ago. So what
a tenant waits for is bounded by what others have at work, and not by how many of their calls wait.

A tenant that is alone may use most of the server. As soon as a second is active, fewer calls work at a time, since
they all wait for one interpreter. A call that takes long, as a stream does whose client is slow, soon does not count
among those any more, so it keeps nobody waiting.
"""

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from threading import Condition, Event, Lock

from unified_cache.service.settings import QuotaSettings

__all__ = ["Place", "StoredBytes", "TenantCalls", "Turns"]


class StoredBytes:
    """Count bytes stored by tenant, each under its cap; a ``Usage``. Thread-safe.

    It begins at nothing with the process: what is stored and what is gone is told by whoever stores it.
    """

    def __init__(self, quota: QuotaSettings) -> None:
        self._quota = quota
        self._stored: dict[str, int] = {}
        self._guard = Lock()

    def reserve(self, tenant: str, count_bytes: int) -> bool:
        """Count bytes that are about to be stored; False, and nothing counted, where the cap would be passed."""
        with self._guard:
            stored = self._stored.get(tenant, 0) + count_bytes
            full = tenant not in self._stored and len(self._stored) >= self._quota.tenants_max
            if full or stored > self._quota.of(tenant).stored_bytes_max:
                return False
            self._stored[tenant] = stored
            return True

    def give_back(self, tenant: str, count_bytes: int) -> None:
        """Count bytes as gone; never below nothing, since a restart forgets what was stored before it."""
        with self._guard:
            stored = self._stored.get(tenant, 0) - count_bytes
            if stored > 0:
                self._stored[tenant] = stored
            else:
                self._stored.pop(tenant, None)

    def by_tenant(self) -> dict[str, int]:
        """Return the bytes counted now; a copy."""
        with self._guard:
            return dict(self._stored)


class _State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    LEFT = "left"


@dataclass(slots=True)
class _Tenant:
    """One tenant with calls in flight."""

    waiting: deque["Place"] = field(default_factory=deque)
    running: dict["Place", float] = field(default_factory=dict)
    """When each began, in seconds; the first is the oldest."""
    bytes_count: int = 0
    served_last: int = 0

    def fresh_count(self, since_s: float) -> int:
        """Return how many began after ``since_s``."""
        return sum(began_s > since_s for began_s in self.running.values())


@dataclass(frozen=True, slots=True)
class TenantCalls:
    """Calls of one tenant now."""

    running_count: int
    waiting_count: int
    bytes_in_flight: int


class Turns:
    """Let calls in up to their tenant's quota, and give those that are in their turn. Thread-safe.

    ``clock`` gives seconds.
    """

    def __init__(self, quota: QuotaSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.look_s = quota.turn_hold_s / 2
        """How often a call that waits looks whether others have held their turns for long."""
        self._quota = quota
        self._clock = clock
        self._active: OrderedDict[str, float] = OrderedDict()
        """When each tenant last began or ended a call, the longest ago first."""
        self._tenants: dict[str, _Tenant] = {}
        self._running_count = 0
        self._servings = itertools.count(1)
        self._guard = Lock()
        self._idle = Condition(self._guard)

    def enter(self, tenant: str, request_bytes: int) -> "Place | None":
        """Give a call a place, which it must leave in the end; None where the tenant has no more."""
        quota = self._quota.of(tenant)
        with self._guard:
            found = self._tenants.get(tenant)
            if found is None:
                found = self._tenants[tenant] = _Tenant()
            in_flight = len(found.running) + len(found.waiting)
            if in_flight >= quota.calls_max or found.bytes_count + request_bytes > quota.bytes_in_flight_max:
                self._forget_if_idle(tenant, found)
                return None
            place = Place(self, tenant, request_bytes)
            found.bytes_count += request_bytes
            found.waiting.append(place)
            self._note_active(tenant)
            self._go_on()
            return place

    def by_tenant(self) -> dict[str, TenantCalls]:
        """Return the calls of every tenant that has any."""
        with self._guard:
            return {
                name: TenantCalls(len(each.running), len(each.waiting), each.bytes_count)
                for name, each in self._tenants.items()
            }

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until no call holds a place; tell whether none does."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._tenants, timeout_s)

    def leave(self, place: "Place", *, only_waiting: bool) -> None:
        """Let a place go, as ``Place.leave`` and ``Place.give_up`` do."""
        with self._guard:
            if place.state is _State.LEFT or (only_waiting and place.state is _State.RUNNING):
                return
            tenant = self._tenants[place.tenant]
            if place.state is _State.RUNNING:
                del tenant.running[place]
                self._running_count -= 1
            else:
                tenant.waiting.remove(place)
            tenant.bytes_count -= place.request_bytes
            place.state = _State.LEFT
            self._note_active(place.tenant)
            self._forget_if_idle(place.tenant, tenant)
            self._go_on()
        place.called.set()

    def look(self) -> None:
        """Give turns that became free because others have held theirs for long."""
        with self._guard:
            self._go_on()

    def _note_active(self, tenant: str) -> None:
        self._active[tenant] = self._clock()
        self._active.move_to_end(tenant)

    def _fresh_max(self, now_s: float) -> int:
        """Return how many calls may be at work, those that take long aside."""
        while self._active and next(iter(self._active.values())) < now_s - self._quota.active_s:
            self._active.popitem(last=False)
        active_count = len(self._tenants.keys() | self._active.keys())
        return self._quota.running_max if active_count <= 1 else self._quota.shared_running_max

    def _go_on(self) -> None:
        """Give turns to those whose turn it is, while there are any."""
        now_s = self._clock()
        since_s = now_s - self._quota.turn_hold_s
        fresh_count = sum(tenant.fresh_count(since_s) for tenant in self._tenants.values())
        fresh_max = self._fresh_max(now_s)
        while self._running_count < self._quota.running_max and fresh_count < fresh_max:
            eligible = [
                tenant
                for tenant in self._tenants.values()
                if tenant.waiting and len(tenant.running) < self._quota.tenant_running_max
            ]
            if not eligible:
                return
            tenant = min(eligible, key=lambda each: (len(each.running), each.served_last))
            place = tenant.waiting.popleft()
            tenant.running[place] = now_s
            tenant.served_last = next(self._servings)
            self._running_count += 1
            fresh_count += 1
            place.state = _State.RUNNING
            place.called.set()

    def _forget_if_idle(self, name: str, tenant: _Tenant) -> None:
        if not tenant.waiting and not tenant.running:
            self._tenants.pop(name, None)
            if not self._tenants:
                self._idle.notify_all()


class Place:
    """What a call holds while it is in flight."""

    __slots__ = ("_turns", "called", "request_bytes", "state", "tenant")

    def __init__(self, turns: Turns, tenant: str, request_bytes: int) -> None:
        self._turns = turns
        self.tenant = tenant
        self.request_bytes = request_bytes
        self.state = _State.WAITING
        self.called = Event()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the call's turn; False if it did not come."""
        waited_s = 0.0
        while waited_s < timeout_s and not self.called.wait(min(self._turns.look_s, timeout_s - waited_s)):
            waited_s += self._turns.look_s
            self._turns.look()
        return self.state is _State.RUNNING

    def give_up(self) -> None:
        """Stop waiting, as when the client has gone; a call that is at work goes on. From any thread."""
        self._turns.leave(self, only_waiting=True)

    def leave(self) -> None:
        """Let the place go; twice is once."""
        self._turns.leave(self, only_waiting=False)
