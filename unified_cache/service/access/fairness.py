"""Fair scheduling of calls: tenants take turns, so that no tenant waits for the queue of another.

A call holds a slot from when it is let in until it ends. It is half open until its first message has come, then it
waits for its turn. A tenant is let in as long as it has fewer calls in flight than places are left: however many
tenants take all that they may, places for others remain.

Of the calls that hold a slot, a few run at a time. The next call is chosen by tenant: the one with the fewest calls
running, and among equals the one served longest ago. So what a tenant waits for is bounded by what others have
running, and not by how many of their calls wait.

Administration is scheduled as a tenant of its own: a tenant whose calls hold all that it may, unread streams say, can
still be cleared, and the server drained.

A tenant that is alone may use most of the server. As soon as a second is active, fewer calls run at a time, since they
all share one interpreter. A call that takes long, such as a stream to a slow client, soon stops counting among those
that run, so no other tenant waits for it.
"""

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from threading import Condition, Event, Lock

from unified_cache.core.settings.service import QuotaSettings
from unified_cache.service.limits import Limits

ACTIVE_S = 1.0
"""Time for which a tenant counts as active after its last call."""

ADMINISTRATION = "/administration"
"""Ends the name that a tenant's administration is scheduled by; no tenant's name has a slash."""


class _State(Enum):
    HALF_OPEN = "half open"
    """No message has come."""
    WAITING = "waiting"
    RUNNING = "running"
    LEFT = "left"


@dataclass(slots=True, eq=False)
class AdmissionSlot:
    """The right of one call to be in flight: half open, waiting or running. The scheduler's to change."""

    tenant: str
    held_bytes: int = 0
    state: _State = _State.HALF_OPEN
    woken: Event | None = None
    """Set once its turn has come or it has left, where it has to wait for that."""


@dataclass(slots=True)
class _Tenant:
    """Calls in flight of one tenant."""

    half_open_count: int = 0
    waiting: deque[AdmissionSlot] = field(default_factory=deque)
    running: dict[AdmissionSlot, float] = field(default_factory=dict)
    """Start of each running call, in seconds; the first is the oldest."""
    bytes_count: int = 0
    served_last: int = 0

    @property
    def in_flight_count(self) -> int:
        """Calls that hold a slot."""
        return self.half_open_count + len(self.waiting) + len(self.running)


@dataclass(frozen=True, slots=True)
class TenantCalls:
    """Number and bytes of one tenant's calls at this moment."""

    half_open_count: int
    """Calls without a message so far."""
    running_count: int
    waiting_count: int
    bytes_in_flight: int


class FairScheduler:
    """Admission of calls up to their tenant's quota, and the choice of those that run. Thread-safe.

    ``limits.calls_max`` is the number of places for calls of all tenants; ``clock`` gives seconds.
    """

    def __init__(self, quota: QuotaSettings, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.recheck_s = limits.turn_hold_s / 2
        """Seconds between two checks, by a waiting call, for calls that have run for long."""
        self.quota = quota
        self.limits = limits
        self._clock = clock
        self._active: OrderedDict[str, float] = OrderedDict()
        """Last time at which each tenant started or ended a call, the longest ago first."""
        self._tenants: dict[str, _Tenant] = {}
        self._in_flight_count = 0
        self._waiting_count = 0
        self._servings = itertools.count(1)
        self._guard = Lock()
        self._idle = Condition(self._guard)

    def enter(self, tenant: str, *, administers: bool = False) -> AdmissionSlot | None:
        """Admit a call, half open; None where its tenant, or that one's administration, has as many as it may.

        The caller must ``leave`` with the slot in the end.
        """
        if administers:
            tenant += ADMINISTRATION
        with self._guard:
            found = self._tenants.get(tenant) or _Tenant()
            places_left = self.limits.calls_max - self._in_flight_count
            if found.in_flight_count >= min(self.quota.of(tenant).calls_max, places_left):
                return None
            self._tenants[tenant] = found
            found.half_open_count += 1
            self._in_flight_count += 1
            self._record_active(tenant)
            return AdmissionSlot(tenant)

    def hold(self, slot: AdmissionSlot, count_bytes: int) -> bool:
        """Count memory that a call takes until it ends; False, and nothing counted, beyond what its tenant may."""
        with self._guard:
            if slot.state is _State.LEFT:
                return False
            tenant = self._tenants[slot.tenant]
            if tenant.bytes_count + count_bytes > self.quota.of(slot.tenant).bytes_in_flight_max:
                return False
            tenant.bytes_count += count_bytes
            slot.held_bytes += count_bytes
            return True

    def wait(self, slot: AdmissionSlot, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for a call's turn; False if it did not come in time."""
        if slot.state is _State.HALF_OPEN:
            self._queue(slot)
        woken, waited_s = slot.woken, 0.0
        while woken is not None and waited_s < timeout_s and not woken.wait(min(self.recheck_s, timeout_s - waited_s)):
            waited_s += self.recheck_s
            self.recheck()
        return slot.state is _State.RUNNING

    def _queue(self, slot: AdmissionSlot) -> None:
        with self._guard:
            if slot.state is not _State.HALF_OPEN:
                return
            tenant = self._tenants[slot.tenant]
            tenant.half_open_count -= 1
            tenant.waiting.append(slot)
            self._waiting_count += 1
            slot.state = _State.WAITING
            self._start_waiting()
            if slot.state is _State.WAITING:
                slot.woken = Event()

    def by_tenant(self) -> dict[str, TenantCalls]:
        """Return the number of calls of every tenant, and of every tenant's administration, that has any."""
        with self._guard:
            return {
                name: TenantCalls(each.half_open_count, len(each.running), len(each.waiting), each.bytes_count)
                for name, each in self._tenants.items()
            }

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until no call holds a slot; return whether none does."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._tenants, timeout_s)

    def leave(self, slot: AdmissionSlot, *, unless_running: bool = False) -> None:
        """End a call, ``unless_running`` where its client has gone; the second time does nothing. From any thread."""
        with self._guard:
            if slot.state is _State.LEFT or (unless_running and slot.state is _State.RUNNING):
                return
            self._release(slot)
            slot.state = _State.LEFT
            if not self._tenants:
                self._idle.notify_all()
            self._start_waiting()
        if slot.woken is not None:
            slot.woken.set()

    def _release(self, slot: AdmissionSlot) -> None:
        tenant = self._tenants[slot.tenant]
        if slot.state is _State.RUNNING:
            del tenant.running[slot]
        elif slot.state is _State.WAITING:
            tenant.waiting.remove(slot)
            self._waiting_count -= 1
        else:
            tenant.half_open_count -= 1
        tenant.bytes_count -= slot.held_bytes
        self._in_flight_count -= 1
        self._record_active(slot.tenant)
        if not tenant.in_flight_count:
            del self._tenants[slot.tenant]

    def recheck(self) -> None:
        """Start waiting calls whose turn has come because others have run for long."""
        with self._guard:
            self._start_waiting()

    def _record_active(self, tenant: str) -> None:
        if not tenant.endswith(ADMINISTRATION):  # a look at the server makes no tenant slower
            self._active[tenant] = self._clock()
            self._active.move_to_end(tenant)

    def _fresh_max(self, now_s: float) -> int:
        """Return how many calls may run at a time, those that have run for long aside."""
        while self._active and next(iter(self._active.values())) < now_s - ACTIVE_S:
            self._active.popitem(last=False)
        active_count = len(self._tenants.keys() | self._active.keys())
        return self.limits.tenant_running_max if active_count <= 1 else self.limits.shared_running_max

    def _start_waiting(self) -> None:
        """Start the calls whose turn it is, as many as may run."""
        if not self._waiting_count:
            return
        now_s = self._clock()
        since_s = now_s - self.limits.turn_hold_s
        fresh_count = sum(began_s > since_s for tenant in self._tenants.values() for began_s in tenant.running.values())
        fresh_max = self._fresh_max(now_s)
        while fresh_count < fresh_max:
            eligible = [
                tenant
                for tenant in self._tenants.values()
                if tenant.waiting and len(tenant.running) < self.limits.tenant_running_max
            ]
            if not eligible:
                return
            tenant = min(eligible, key=lambda each: (len(each.running), each.served_last))
            slot = tenant.waiting.popleft()
            self._waiting_count -= 1
            tenant.running[slot] = now_s
            tenant.served_last = next(self._servings)
            fresh_count += 1
            slot.state = _State.RUNNING
            if slot.woken is not None:
                slot.woken.set()
