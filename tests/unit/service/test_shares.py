"""Tenants share the store by quota: what one puts costs none of the others a page below its share."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.service import LoopbackServer, Wire
from tests.support.service_settings import service_settings
from tests.unit.service.test_requests import IDENTITY, OBJECT_BYTES, key, page, part, run, start
from tests.unit.service.test_tenancy import put, tenant
from unified_cache.core.seal import Label
from unified_cache.core.settings.limits import QuotaSettings
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire.calls import Call
from unified_cache.service.access.usage import TenantUsage
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import PageIO, StorageBackend

CAP_PAGES = 20

DIRECTORIES: dict[str, type[FileStorage | PackedStorage]] = {"file": FileStorage, "packed": PackedStorage}


def opened(kind: str, directory: Path) -> StorageBackend:
    return DIRECTORIES[kind].open(directory / "store", bytes_max=CAP_PAGES * OBJECT_BYTES)


@pytest.fixture(params=sorted(DIRECTORIES))
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopbackServer]:
    """Yield a server whose tenants may each store far more than the store holds; nothing stays in its memory."""
    server = LoopbackServer.start(opened(request.param, tmp_path))
    yield server
    server.stop()


def put_durable(wire: Wire, *numbers: int) -> bytes:
    parts = [part(page(number), at * OBJECT_BYTES) for at, number in enumerate(numbers)]
    return pb.PutReply.FromString(wire.put([start(*numbers, level=pb.DURABLE), *parts])).stored


def stored(wire: Wire, *numbers: int) -> list[int]:
    """Return those of the pages that the store has."""
    reply = wire.ask(Call.EXISTS, pb.ExistsRequest(runs=[run(*map(key, numbers))]))
    return [number for number, found in zip(numbers, pb.ExistsReply.FromString(reply).found, strict=True) if found]


@pytest.mark.threat("filling the store")
def test_a_neighbours_puts_evict_no_durable_page_below_the_fair_share(shared: LoopbackServer) -> None:
    quiet, flood = tenant(shared, "quiet"), tenant(shared, "flood")
    mine = list(range(10))
    assert put_durable(quiet, *mine) == b"\x02" * 10
    for first in range(0, 100, 5):
        assert put_durable(flood, *range(first, first + 5)) == b"\x02" * 5
    assert stored(quiet, *mine) == mine
    assert stored(flood, *range(100)) == list(range(90, 100))
    assert shared.notes.kinds == []


@pytest.mark.threat("filling the store")
def test_puts_of_many_tenants_at_the_same_time_leave_the_store_nothing_to_choose(tmp_path: Path) -> None:
    store = FileStorage.open(tmp_path / "store", bytes_max=CAP_PAGES * OBJECT_BYTES)
    server = LoopbackServer.start(store)
    quiet = tenant(server, "quiet")
    assert put_durable(quiet, *range(4)) == b"\x02" * 4
    floods = [tenant(server, f"flood{number}") for number in range(4)]
    with ThreadPoolExecutor(len(floods)) as pool:
        list(pool.map(lambda flood: [put_durable(flood, *range(at, at + 3)) for at in range(0, 60, 3)], floods))
    assert stored(quiet, *range(4)) == list(range(4))
    assert store.counts.evicted_count == 0
    assert store.bytes_used <= CAP_PAGES * OBJECT_BYTES
    assert sum(server.usage.by_tenant().values()) == store.bytes_used
    server.stop()


def test_a_tenant_alone_uses_the_whole_store_and_gives_way_to_the_next_down_to_its_share(
    shared: LoopbackServer,
) -> None:
    first = tenant(shared, "first")
    for number in range(30):
        put(first, number)
    assert stored(first, *range(30)) == list(range(10, 30))
    second, third = tenant(shared, "second"), tenant(shared, "third")
    for number in range(30):
        put(second, number)
    assert stored(first, *range(30)) == list(range(20, 30))
    put(third, 0, 1)
    assert len(stored(first, *range(30))) == len(stored(second, *range(30))) == 9
    assert stored(third, 0, 1) == [0, 1]


def test_pages_that_were_there_before_the_server_are_a_tenants_own_once_they_are_read(tmp_path: Path) -> None:
    before = LoopbackServer.start(opened("file", tmp_path))
    put_durable(tenant(before, "quiet"), *range(8))
    before.stop()
    after = LoopbackServer.start(opened("file", tmp_path))
    quiet, flood = tenant(after, "quiet"), tenant(after, "flood")
    quiet.get(pb.GetRequest(runs=[run(*map(key, range(4)), object_bytes=OBJECT_BYTES)]))
    assert after.usage.by_tenant() == {"quiet": 4 * OBJECT_BYTES}
    for number in range(60):
        put(flood, number)
    assert stored(quiet, *range(8)) == [0, 1, 2, 3]
    after.stop()


def test_a_page_that_is_put_again_is_a_recent_one(shared: LoopbackServer) -> None:
    only = tenant(shared, "only")
    for number in range(20):
        put(only, number)
    put(only, 0)
    put(only, 20, 21, 22)
    assert stored(only, *range(23)) == [0, *range(4, 23)]


def test_a_page_that_is_touched_is_a_recent_one(shared: LoopbackServer) -> None:
    only = tenant(shared, "only")
    for number in range(20):
        put(only, number)
    only.ask(Call.TOUCH, pb.TouchRequest(runs=[run(key(0), key(99))]))
    put(only, 20, 21, 22)
    assert stored(only, *range(23)) == [0, *range(4, 23)]


def paged(number: int, identity: bytes = IDENTITY) -> PageIO:
    return PageIO(Label(identity, key(number), "kv"), None, (memoryview(b"x"),))


def test_a_tenant_with_twice_the_quota_has_twice_the_share() -> None:
    settings = service_settings(
        None, {"quota": {"stored_bytes_max": 1_000, "tenants": {"large": {"stored_bytes_max": 2_000}}}}
    )
    usage = TenantUsage(settings.quota, 1_000, 30)
    for number in range(40):
        usage.take("large", [paged(number)])
        usage.take("small", [paged(number, identity=bytes(32))])
    usage.surplus(())
    assert (usage.held_bytes("large"), usage.held_bytes("small")) == (20, 10)


@pytest.mark.threat("filling the store")
@pytest.mark.parametrize("seed", range(20))
def test_what_is_counted_fits_the_store_and_nobody_below_its_share_pays_for_it(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"tenant{number}" for number in range(5)]
    caps = {name: {"stored_bytes_max": rng.randint(20, 200)} for name in names}
    usage = TenantUsage(service_settings(None, {"quota": {"tenants": caps}}).quota, 1_000, 60)
    for step in range(300):
        name = rng.choice(names)
        fresh = [paged(rng.randrange(200), identity=bytes([names.index(name)]) * 32) for _ in range(rng.randint(1, 8))]
        usage.take(name, fresh)
        held = {each: usage.held_bytes(each) for each in names}
        active = {each: caps[each]["stored_bytes_max"] for each in names if held[each]}
        gone = usage.surplus({page.label for page in fresh})
        assert sum(map(usage.held_bytes, names)) <= 60
        for each, quota in active.items():
            share = 60 * quota // sum(active.values())
            lost_count = sum(label.identity == bytes([names.index(each)]) * 32 for label in gone)
            if held[each] <= share:
                assert not lost_count, f"step {step}: {each} had {held[each]} of {share} and lost {lost_count}"
        if rng.random() < 0.1:
            usage.drop_identity(name, bytes([names.index(name)]) * 32)
            assert usage.held_bytes(name) == 0


def test_without_a_cap_on_the_store_no_page_is_asked_to_go() -> None:
    usage = TenantUsage(QuotaSettings(), 1_000, None)
    for number in range(100):
        usage.take("acme", [paged(number)])
    assert usage.surplus(()) == []
