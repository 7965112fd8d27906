"""Quotas of tenants, and fair scheduling of their calls."""

import random
from collections.abc import Iterable
from threading import Thread

import grpc
import pytest

from tests.support.clock import ManualClock
from tests.support.running_service import called, refusal, running
from tests.support.service import refused
from tests.support.service_settings import service_settings
from unified_cache.core.seal import Label
from unified_cache.core.settings.service import QuotaSettings
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call
from unified_cache.service.access.fairness import AdmissionSlot, FairScheduler
from unified_cache.service.access.usage import Bound, TenantUsage
from unified_cache.service.limits import Limits
from unified_cache.storage_backends.protocol import PageIO, StoredObject
from unified_cache.testing.storage_contract import label

WAIT_S = 10.0
LIMITS = Limits()


def quota(**settings: object) -> QuotaSettings:
    return service_settings(None, {"quota": settings}).quota


def fair(clock: ManualClock | None = None, limits: Limits = LIMITS, **settings: object) -> FairScheduler:
    return FairScheduler(quota(**settings), limits, clock or ManualClock())


def entered(scheduler: FairScheduler, tenant: str) -> AdmissionSlot:
    """Let a call in, and have it wait for its turn."""
    slot = scheduler.enter(tenant)
    assert slot is not None
    scheduler.wait(slot, 0)
    return slot


def pages(count: int, start: int = 0) -> list[PageIO]:
    """Return pages of a byte each."""
    return [PageIO(label(number), (memoryview(b"x"),)) for number in range(start, start + count)]


def labels(numbers: Iterable[int]) -> list[Label]:
    return [label(number) for number in numbers]


class CountedLabel(Label):
    """A label that counts how often any is looked up."""

    looked_up_count = 0

    def __hash__(self) -> int:
        CountedLabel.looked_up_count += 1
        return super().__hash__()


@pytest.mark.threat("filling the store")
@pytest.mark.parametrize("held_count", [0, 400])
def test_a_call_that_exceeds_its_quota_by_far_looks_at_each_page_a_few_times(held_count: int) -> None:
    counts = []
    for size in (400, 800):
        usage = TenantUsage(quota(stored_bytes_max=size), 10_000, None)
        chain = [PageIO(CountedLabel(*each.label), each.buffers) for each in pages(2 * size)]
        usage.take("acme", chain[:held_count])
        CountedLabel.looked_up_count = 0
        assert usage.take("acme", chain, dict.fromkeys(each.label for each in chain)) == []
        assert usage.uncounted("acme", [each.label for each in chain]) == [each.label for each in chain[size:]]
        counts.append(CountedLabel.looked_up_count)
    assert counts[1] <= 2.5 * counts[0]


def test_a_tenant_with_a_quota_of_its_own_has_the_rest_as_every_tenant() -> None:
    settings = quota(stored_bytes_max=10, calls_max=2, tenants={"acme": {"calls_max": 4}, "beta": {}})
    assert [settings.of(name).stored_bytes_max for name in ("acme", "beta", "other")] == [10, 10, 10]
    assert [settings.of(name).calls_max for name in ("acme", "beta", "other")] == [4, 2, 2]


def test_pages_found_later_are_the_oldest_and_those_counted_already_stay_as_they_are() -> None:
    usage = TenantUsage(quota(stored_bytes_max=3), 1_000, None)
    usage.take("acme", pages(1, start=1))
    assert usage.find("acme", [StoredObject(label(number), 1) for number in range(3)]) == []
    assert usage.by_tenant() == {"acme": 3}
    assert usage.find("acme", [StoredObject(label(3), 1)]) == labels([3])
    assert usage.take("acme", pages(2, start=4)) == labels([0, 2])


def test_bytes_given_back_never_make_more_room_than_the_cap() -> None:
    usage = TenantUsage(quota(stored_bytes_max=10), 1_000, None)
    usage.drop("acme", labels(range(100)))
    usage.take("acme", pages(10))
    assert len(usage.take("acme", pages(1, start=10))) == 1


def test_pages_counted_are_bounded_and_the_tenant_with_the_most_loses_its_oldest_to_a_new_tenant() -> None:
    usage = TenantUsage(quota(), 4, None)
    for number in range(3):
        usage.take("many", pages(1, start=number))
    usage.take("few", [PageIO(label(0)._replace(pool="swa"), (memoryview(b"x"),))])
    assert usage.surplus(()) == {}
    usage.take("new", [PageIO(label(0)._replace(pool="state"), (memoryview(b"x"),))])
    assert usage.surplus(()) == {("many", Bound.PAGES): labels([0])}
    assert usage.by_tenant() == {"many": 2, "few": 1, "new": 1}


def test_a_tenant_holds_at_most_its_calls_and_bytes_in_flight() -> None:
    scheduler = fair(calls_max=2, bytes_in_flight_max=100)
    first, second = entered(scheduler, "acme"), entered(scheduler, "acme")
    assert scheduler.enter("acme") is None
    assert scheduler.hold(first, 60)
    assert not scheduler.hold(second, 41)
    assert scheduler.hold(second, 40)
    assert scheduler.hold(entered(scheduler, "other"), 100)
    scheduler.leave(first)
    assert not scheduler.hold(second, 61)
    assert scheduler.hold(second, 60)
    scheduler.leave(second)
    assert not scheduler.hold(second, 1)
    assert set(scheduler.by_tenant()) == {"other"}


@pytest.mark.threat("huge messages")
def test_a_call_of_more_bytes_than_its_tenant_may_hold_is_refused() -> None:
    with running(quota={"bytes_in_flight_max": 100}) as server, grpc.insecure_channel(server.address) as channel:
        assert refusal(channel, Call.IDENTITIES, pb.IdentitiesRequest(after=bytes(32))) is None
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "as many bytes in flight as it may"):
            called(channel, Call.IDENTITIES, pb.IdentitiesRequest(after=bytes(100)))


@pytest.mark.threat("starving other tenants")
def test_turns_go_to_the_tenant_with_the_fewest_calls_at_work() -> None:
    scheduler = fair(limits=Limits(tenant_running_max=2, shared_running_max=2))
    flood = [entered(scheduler, "flood") for _ in range(10)]
    assert [scheduler.wait(slot, 0) for slot in flood] == [True] * 2 + [False] * 8
    late = entered(scheduler, "late")
    assert not scheduler.wait(late, 0)
    scheduler.leave(flood[0])
    assert scheduler.wait(late, 0)
    assert not scheduler.wait(flood[2], 0)
    scheduler.leave(flood[1])
    assert scheduler.wait(flood[2], 0)


def test_among_equals_the_tenant_served_longest_ago_is_next() -> None:
    scheduler = fair(limits=Limits(tenant_running_max=1, shared_running_max=1))
    slots = {name: [entered(scheduler, name) for _ in range(2)] for name in ("a", "b", "c")}
    served: list[str] = []
    while len(served) < 6:
        (running,) = [name for name, calls in scheduler.by_tenant().items() if calls.running_count]
        served.append(running)
        scheduler.leave(slots[running].pop(0))
    assert served == ["a", "b", "c", "a", "b", "c"]


def test_a_tenant_alone_has_most_turns_and_every_second_while_another_is_active() -> None:
    clock = ManualClock()
    scheduler = fair(clock, Limits(tenant_running_max=4, shared_running_max=1))
    flood = [entered(scheduler, "flood") for _ in range(12)]
    assert sum(scheduler.wait(slot, 0) for slot in flood) == 4
    quiet = [entered(scheduler, "quiet") for _ in range(2)]
    for slot in flood[:4]:
        scheduler.leave(slot)
    assert [scheduler.wait(slot, 0) for slot in quiet] == [True, False]
    assert not any(scheduler.wait(slot, 0) for slot in flood)
    scheduler.leave(quiet[0])
    assert sum(scheduler.wait(slot, 0) for slot in flood) == 1
    assert not scheduler.wait(quiet[1], 0)
    scheduler.leave(flood[4])
    assert scheduler.wait(quiet[1], 0)
    scheduler.leave(quiet[1])
    clock.sleep(1.1)
    scheduler.recheck()
    assert sum(scheduler.wait(slot, 0) for slot in flood) == 4


def test_a_call_that_takes_long_keeps_nobody_waiting() -> None:
    clock = ManualClock()
    scheduler = fair(clock, Limits(shared_running_max=1, turn_hold_s=0.1))
    slow, quiet, fast = (entered(scheduler, tenant) for tenant in ("acme", "quiet", "acme"))
    assert [scheduler.wait(slot, 0) for slot in (slow, quiet, fast)] == [True, False, False]
    clock.sleep(0.2)
    scheduler.recheck()
    assert [scheduler.wait(slot, 0) for slot in (slow, quiet, fast)] == [True, True, False]
    scheduler.leave(quiet)
    assert scheduler.wait(fast, 0)


def test_a_call_that_gives_up_waiting_frees_its_place_and_one_at_work_goes_on() -> None:
    scheduler = fair(limits=Limits(tenant_running_max=1))
    running, waiting = entered(scheduler, "acme"), entered(scheduler, "acme")
    scheduler.leave(running, unless_running=True)
    assert scheduler.wait(running, 0)
    waiter = Thread(target=scheduler.leave, args=(waiting,), kwargs={"unless_running": True})
    waiter.start()
    assert not scheduler.wait(waiting, WAIT_S)
    waiter.join()
    scheduler.leave(waiting)
    scheduler.leave(running)
    scheduler.leave(running)
    assert scheduler.by_tenant() == {}
    assert scheduler.wait_idle(0)


def test_administration_has_places_and_a_turn_whatever_its_tenant_has_in_flight() -> None:
    clock = ManualClock()
    scheduler = fair(clock, Limits(tenant_running_max=2), calls_max=3, bytes_in_flight_max=1)
    held = [entered(scheduler, "acme") for _ in range(3)]
    assert scheduler.hold(held[0], 1)
    assert scheduler.enter("acme") is None
    asked = scheduler.enter("acme", administers=True)
    assert asked is not None
    assert scheduler.hold(asked, 1)
    clock.sleep(LIMITS.turn_hold_s)
    assert scheduler.wait(asked, 0)
    assert [scheduler.wait(slot, 0) for slot in held] == [True, True, False]
    for slot in held:
        scheduler.leave(slot)
    assert not scheduler.wait_idle(0)
    scheduler.leave(asked)
    assert scheduler.wait_idle(0)
    alone = [entered(scheduler, "acme") for _ in range(2)]
    assert [scheduler.wait(slot, 0) for slot in alone] == [True, True], "a look at the server makes no tenant slower"


def test_calls_that_have_outlived_their_turn_hold_no_place() -> None:
    clock = ManualClock()
    scheduler = fair(clock)
    slow = [entered(scheduler, tenant) for tenant in ("a", "b") for _ in range(8)]
    for _ in slow:
        clock.sleep(0.1)
        scheduler.recheck()
    assert all(scheduler.wait(slot, 0) for slot in slow)
    assert scheduler.wait(entered(scheduler, "c"), 0)


@pytest.mark.threat("starving other tenants")
@pytest.mark.parametrize("flooding_count", [1, 2, 4, 8])
def test_tenants_that_take_all_they_may_leave_places_to_others(flooding_count: int) -> None:
    scheduler = fair(limits=Limits(calls_max=1024), calls_max=10_000)
    for _ in range(1024):
        for number in range(flooding_count):
            scheduler.enter(f"flood-{number}")
    held = [calls.half_open_count for calls in scheduler.by_tenant().values()]
    equal_share = 1024 // (flooding_count + 1)
    assert all(abs(count - equal_share) <= 1 for count in held)
    assert scheduler.enter("other") is not None


@pytest.mark.parametrize("seed", range(20))
def test_places_and_turns_are_never_lost(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(calls_max=12, tenant_running_max=rng.randint(1, 4), shared_running_max=4)
    scheduler = fair(limits=limits, calls_max=5, bytes_in_flight_max=50)
    half_open: list[AdmissionSlot] = []
    queued: list[AdmissionSlot] = []
    for _ in range(500):
        chosen = rng.random()
        if chosen < 0.5:
            entering = scheduler.enter(rng.choice("abc"))
            half_open += [] if entering is None else [entering]
        elif chosen < 0.75 and half_open:
            slot = half_open.pop(rng.randrange(len(half_open)))
            scheduler.hold(slot, rng.randint(0, 20))
            scheduler.wait(slot, 0)
            queued.append(slot)
        elif half_open or queued:
            slots = rng.choice([each for each in (half_open, queued) if each])
            slot = slots.pop(rng.randrange(len(slots)))
            scheduler.leave(slot, unless_running=True) if rng.random() < 0.2 else None
            scheduler.leave(slot)
        by_tenant = scheduler.by_tenant()
        running_count = sum(calls.running_count for calls in by_tenant.values())
        assert sum(scheduler.wait(slot, 0) for slot in queued) == running_count
        assert sum(calls.half_open_count for calls in by_tenant.values()) == len(half_open)
        assert len(half_open) + len(queued) < 12
        assert running_count <= limits.shared_running_max
        for calls in by_tenant.values():
            assert calls.running_count <= limits.tenant_running_max
            assert calls.half_open_count + calls.running_count + calls.waiting_count <= 5
            assert calls.bytes_in_flight <= 50
            # Nobody waits while a turn is free.
            assert not calls.waiting_count or running_count == 4 or calls.running_count == limits.tenant_running_max
    for slot in half_open + queued:
        scheduler.leave(slot)
    assert scheduler.by_tenant() == {}
