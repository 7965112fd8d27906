"""Leases and the host tier: what is pinned, what goes, and for whom room is made."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

import grpc
import pytest

from tests.support.clock import ManualClock
from tests.support.service import LoopbackServer, Wire, limits_with, refused
from tests.unit.service.test_requests import IDENTITY, MANIFEST, OBJECT_BYTES, key, page, part, run, start
from unified_cache.proto import service_pb2 as pb
from unified_cache.seal import HEADER_BYTES, Label
from unified_cache.service.requests.lookup import PrefixLabels
from unified_cache.service.store import host_tier
from unified_cache.service.store.host_tier import HostTier
from unified_cache.service.store.leases import Leases
from unified_cache.service.store.pages import HeldPage, blank_page, charged_bytes, page_in
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.wire.calls import Call

NOT_FOUND = grpc.StatusCode.NOT_FOUND


class LeasedPages:
    """A server with room for ten pages in memory, and a clock that is moved by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        limits = limits_with(leased_share=0.8, lease_s_max=60.0, leases_max=2)
        self.running = LoopbackServer.start(
            MemoryStorage(), limits, host_bytes=10 * charged_bytes(OBJECT_BYTES), clock=self.clock
        )
        self.wire = Wire(self.running)
        self.wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))

    def put(self, *numbers: int) -> None:
        parts = [part(page(number), at * OBJECT_BYTES) for at, number in enumerate(numbers)]
        assert set(pb.PutReply.FromString(self.wire.put([start(*numbers), *parts])).stored) == {2}

    def lease(self, *numbers: int, lease_s: float = 10.0) -> pb.LookupReply:
        request = pb.LookupRequest(
            identity=IDENTITY,
            keys=pb.Keys(keys=map(key, numbers)),
            pools=[pb.RequiredPool(name="kv")],
            lease_s=lease_s,
        )
        return pb.LookupReply.FromString(self.wire.ask(Call.LOOKUP, request))

    def tiers(self, *numbers: int) -> list[int]:
        """Tell where each page is got from: 1 is memory, 2 the store."""
        request = pb.GetRequest(runs=[run(*map(key, numbers), object_bytes=OBJECT_BYTES)])
        return [hit for message in self.wire.get(request) for hit in pb.GetPart.FromString(message).hits]

    def release(self, lease: str) -> None:
        self.wire.ask(Call.RELEASE, pb.ReleaseRequest(lease=lease))

    def leases_count(self) -> int:
        return pb.StatsReply.FromString(self.wire.ask(Call.STATS, pb.StatsRequest())).leases_count


@pytest.fixture
def server() -> Iterator[LeasedPages]:
    server = LeasedPages()
    yield server
    server.wire.close()
    server.running.stop()


def test_a_lease_keeps_what_was_looked_up_in_memory_until_it_is_released(server: LeasedPages) -> None:
    server.put(0, 1, 2)
    reply = server.lease(0, 1, 2)
    assert (reply.end_max, reply.leased_count) == (3, 3)
    server.put(*range(10, 19))
    assert server.tiers(0, 1, 2) == [1, 1, 1]
    server.release(reply.lease)
    server.put(*range(20, 30))
    assert server.tiers(0, 1, 2) == [2, 2, 2]


def test_a_lease_ends_by_itself_when_its_time_is_over(server: LeasedPages) -> None:
    server.put(0)
    reply = server.lease(0, lease_s=10.0)
    server.clock.now_s += 10.0
    assert server.leases_count() == 0
    with refused(NOT_FOUND):
        server.release(reply.lease)
    server.put(*range(10, 20))
    assert server.tiers(0) == [2]


def test_a_lease_keeps_a_page_that_comes_into_memory_later(server: LeasedPages) -> None:
    server.put(0)
    server.put(*range(10, 20))
    assert server.lease(0).leased_count == 0
    reply = server.wire.ask(Call.PREFETCH, pb.PrefetchRequest(runs=[run(key(0), object_bytes=OBJECT_BYTES)]))
    assert pb.PrefetchReply.FromString(reply).held_count == 1
    server.put(*range(20, 29))
    assert server.tiers(0) == [1]


@pytest.mark.parametrize("name", ["", "x", "0" * 32])
def test_a_release_of_an_unknown_lease_is_not_found_and_changes_nothing(server: LeasedPages, name: str) -> None:
    server.put(0)
    server.lease(0)
    with refused(NOT_FOUND):
        server.release(name)
    assert server.leases_count() == 1


def test_a_release_of_another_tenants_lease_is_not_found_and_changes_nothing(server: LeasedPages) -> None:
    server.put(0)
    reply = server.lease(0)
    with refused(NOT_FOUND):
        Wire(server.running, "other:admin").ask(Call.RELEASE, pb.ReleaseRequest(lease=reply.lease))
    assert server.leases_count() == 1
    server.release(reply.lease)
    assert server.leases_count() == 0


def test_a_second_release_is_not_found_and_takes_no_other_lease_with_it(server: LeasedPages) -> None:
    server.put(0)
    first, second = server.lease(0), server.lease(0)
    server.release(first.lease)
    with refused(NOT_FOUND):
        server.release(first.lease)
    server.put(*range(10, 19))
    assert server.tiers(0) == [1]
    server.release(second.lease)


def test_leases_beyond_the_number_or_the_share_of_memory_are_not_granted(server: LeasedPages) -> None:
    server.put(*range(8))
    assert server.lease(*range(5)).lease == ""
    assert server.lease(0).lease
    assert server.lease(0).lease
    assert server.lease(0).lease == ""
    assert server.leases_count() == 2


def test_nothing_is_leased_where_nothing_can_be_restored(server: LeasedPages) -> None:
    reply = server.lease(7)
    assert (reply.end_max, reply.lease) == (0, "")
    assert server.leases_count() == 0


def label(number: int) -> Label:
    return Label(bytes(32), hashlib.sha256(b"%d" % number).digest(), "kv")


def held(payload_bytes: int = 100) -> HeldPage:
    return blank_page(HEADER_BYTES + payload_bytes)


HELD_BYTES = charged_bytes(HEADER_BYTES + 100)


def test_room_is_made_by_the_tenant_that_holds_most() -> None:
    tier = HostTier(10 * HELD_BYTES)
    for number in range(3):
        assert tier.admit("quiet", label(number), held(), tier.epoch)
    for number in range(100, 200):
        assert tier.admit("loud", label(number), held(), tier.epoch)
    assert tier.used("quiet") == (3, 3 * HELD_BYTES)
    assert tier.used("loud") == (7, 7 * HELD_BYTES)


def test_a_page_that_finds_no_room_beside_pinned_ones_is_not_admitted() -> None:
    tier = HostTier(2 * HELD_BYTES)
    tier.pin([label(0), label(1)])
    assert tier.admit("a", label(0), held(), tier.epoch)
    assert tier.admit("a", label(1), held(), tier.epoch)
    assert not tier.admit("b", label(2), held(), tier.epoch)
    assert not tier.admit("b", label(3), held(10_000), tier.epoch)
    assert tier.contains("a", [label(0), label(1)]) == [True, True]
    tier.unpin("a", [label(0)])
    assert tier.admit("b", label(2), held(), tier.epoch)
    assert tier.contains("a", [label(0), label(1)]) == [False, True]


def test_a_search_for_victims_meets_every_pinned_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned_count, victims_count = 2_000, 50
    compared: list[Label] = []

    class CountedLabels(OrderedDict[Label, HeldPage]):
        def __iter__(self) -> Iterator[Label]:
            for each in super().__iter__():
                compared.append(each)
                yield each

    monkeypatch.setattr(host_tier, "OrderedDict", CountedLabels)
    tier = HostTier((pinned_count + victims_count) * HELD_BYTES)
    pinned = [label(number) for number in range(pinned_count)]
    for each in pinned:
        assert tier.admit("a", each, held(), tier.epoch)
    tier.pin(pinned)
    for number in range(pinned_count, pinned_count + 2 * victims_count):
        assert tier.admit("a", label(number), held(), tier.epoch)
    assert tier.evicted_count == victims_count
    assert len(compared) == pinned_count + victims_count
    assert all(tier.contains("a", pinned))


def test_a_page_that_leases_let_go_is_the_last_to_be_evicted_and_pins_are_counted() -> None:
    tier = HostTier(3 * HELD_BYTES)
    for number in range(3):
        tier.admit("a", label(number), held(), tier.epoch)
    tier.pin([label(0), label(0)])
    tier.unpin("a", [label(0)])
    for number in (3, 4):
        assert tier.admit("a", label(number), held(), tier.epoch)
    assert tier.contains("a", [label(0), label(1), label(2)]) == [True, False, False]
    tier.unpin("a", [label(0)])
    for number in (5, 6):
        assert tier.admit("a", label(number), held(), tier.epoch)
    assert tier.contains("a", [label(number) for number in (0, 3, 4)]) == [True, False, False]
    assert [page is not None for page in tier.find("a", [label(0), label(3)])] == [True, False]


def test_small_pages_count_with_what_they_take_beyond_their_bytes() -> None:
    tier = HostTier(1 << 20)
    for number in range(10_000):
        tier.admit("a", label(number), held(1), tier.epoch)
    pages_count, used_bytes = tier.used("a")
    assert pages_count < (1 << 20) / 1024
    assert used_bytes == pages_count * charged_bytes(HEADER_BYTES + 1)


def test_a_lease_counts_small_pages_with_what_they_take_beyond_their_bytes(server: LeasedPages) -> None:
    server.put(*range(4))
    assert server.lease(*range(4)).lease
    assert server.lease(*range(4)).lease == ""  # a tenant's half of 8 pages in 10, overhead included


def test_leases_of_all_tenants_together_keep_no_more_than_their_share() -> None:
    tier = HostTier(1000)
    leases = Leases(tier, limits_with(leased_share=0.5), ManualClock(1000.0), iter("abcdef").__next__)
    assert [leases.grant(tenant, [label(0)], 200, 1.0) for tenant in ("a", "b", "c")] == ["a", "b", ""]
    assert leases.grant("a", [label(1)], 100, 1.0) == ""


def test_what_is_leased_is_named_as_what_was_looked_up_however_much_of_it() -> None:
    labels = PrefixLabels(IDENTITY, [key(number) for number in range(6)])

    def named(pool: str, start: int, end: int) -> list[Label]:
        return [Label(IDENTITY, key(number), pool) for number in range(start, end)]

    for end in (4, 6, 3, 0):
        assert labels.of([("kv", 0, end), ("swa", 2, end)]) == named("kv", 0, end) + named("swa", 2, end)


def test_a_small_page_does_not_keep_the_message_alive_that_it_came_in() -> None:
    message = bytes(10_000)
    small = page_in([memoryview(message)[:500]])
    large = page_in([memoryview(message)[:9_000]])
    assert [piece.obj is message for piece in small.payload] == [False]
    assert [piece.obj is message for piece in large.payload] == [True]
    assert small.object_bytes == 500
