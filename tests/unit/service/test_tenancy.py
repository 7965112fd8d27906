"""Tenants never share a page, and cannot tell that another has one; what each may store is bounded."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.support.service import LoopbackServer, Notes, Wire, wait_for
from tests.support.service_settings import service_settings
from tests.support.store_calls import ScriptedStorage, raising
from tests.support.store_kinds import StoreKind
from tests.unit.service.test_requests import (
    IDENTITY,
    LAYOUT,
    MANIFEST,
    OBJECT_BYTES,
    key,
    page,
    part,
    run,
    start,
)
from unified_cache.core.errors import StorageError
from unified_cache.core.pool import Identity
from unified_cache.core.seal import Label
from unified_cache.core.settings.service import QuotaSettings, Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire import REASON, REASON_HELLO, Call
from unified_cache.service.access.callers import Caller, Refused
from unified_cache.service.access.registry import Registry
from unified_cache.service.access.usage import Bound, TenantUsage
from unified_cache.service.limits import Limits
from unified_cache.service.store import tenants
from unified_cache.service.store.tenants import TenantStore
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of, model_of_tenant, tenant_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.offline.stores import identities_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.wrappers.layer import Method
from unified_cache.testing.storage_contract import sealed_page

TAKEN_BYTES = StoreKind.FILE.taken_bytes(OBJECT_BYTES)
"""What a page takes of a file store."""

FAILS = raising(StorageError("it fails on purpose", retryable=True))

READER, WRITER, OTHER_WRITER = (
    Caller("acme", Role.READER),
    Caller("acme", Role.WRITER),
    Caller("other", Role.WRITER),
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[LoopbackServer]:
    running = LoopbackServer.start(
        FileStorage.open(tmp_path / "store"),
        stored_bytes_max=10 * TAKEN_BYTES,
    )
    yield running
    running.stop()


def tenant(running: LoopbackServer, name: str, role: str = "admin") -> Wire:
    wire = Wire(running, f"{name}:{role}")
    wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
    return wire


def put(wire: Wire, *numbers: int) -> bytes:
    parts = [part(page(number), at * OBJECT_BYTES) for at, number in enumerate(numbers)]
    return pb.PutReply.FromString(wire.put([start(*numbers), *parts])).stored


def every_answer(wire: Wire, *numbers: int) -> list[object]:
    """Ask for pages in every way there is."""
    runs = [run(*map(key, numbers), object_bytes=OBJECT_BYTES)]
    return [
        wire.ask(Call.EXISTS, pb.ExistsRequest(runs=runs)),
        wire.ask(Call.TOUCH, pb.TouchRequest(runs=runs)),
        wire.get(pb.GetRequest(runs=runs)),
        wire.ask(Call.SCAN, pb.ScanRequest(identity=IDENTITY)),
        wire.ask(Call.IDENTITIES, pb.IdentitiesRequest()),
        wire.ask(Call.REMOVE, pb.RemoveRequest(runs=runs)),
        wire.ask(Call.CLEAR, pb.ClearRequest(identity=IDENTITY)),
    ]


@pytest.mark.threat("reading other tenants' pages")
def test_what_one_tenant_stored_another_sees_no_trace_of(running: LoopbackServer) -> None:
    owner, other, nobody = tenant(running, "owner"), tenant(running, "other"), tenant(running, "nobody")
    assert put(owner, 0, 1) == b"\x02\x02"
    absent = every_answer(nobody, 7, 8)
    assert every_answer(other, 0, 1) == absent
    said = pb.HelloReply.FromString(other.ask(Call.HELLO, pb.HelloRequest()))
    assert (said.tenant, said.stored_bytes, said.identities_count) == ("other", 0, 0)
    runs = [run(key(0), key(1), object_bytes=OBJECT_BYTES)]
    assert pb.ExistsReply.FromString(owner.ask(Call.EXISTS, pb.ExistsRequest(runs=runs))).found == b"\x01\x01"


@pytest.mark.threat("calling as another tenant")
def test_a_tenant_is_whom_the_credentials_name_and_no_request_can_say_another(running: LoopbackServer) -> None:
    requests = [each for name, each in pb.DESCRIPTOR.message_types_by_name.items() if name.endswith("Request")]
    assert not [each.full_name for each in (*requests, pb.PutStart.DESCRIPTOR) if "tenant" in each.fields_by_name]
    put(tenant(running, "acme"), 0, 1)
    for name, stored_bytes in (("acme", 2 * TAKEN_BYTES), ("other", 0)):
        said = pb.HelloReply.FromString(tenant(running, name).ask(Call.HELLO, pb.HelloRequest()))
        assert (said.tenant, said.stored_bytes, said.identities_count) == (name, stored_bytes, 1)


@pytest.mark.threat("reading other tenants' pages")
def test_a_tenant_whose_name_and_model_read_like_anothers_shares_nothing() -> None:
    named = [("a", "model"), ("b", "model"), ("a", "@b/model"), ("b", "@a/model"), ("a", "a/model")]
    registry = Registry(Limits())
    digests = {
        registry.add(Caller(tenant, Role.WRITER), manifest_of(Identity(model), LAYOUT)).stored.identity
        for tenant, model in named
    }
    assert len(digests) == len(named)


def test_what_lies_in_the_store_can_be_read_by_tools_and_says_whose_it_is(
    running: LoopbackServer, tmp_path: Path
) -> None:
    put(tenant(running, "team-a"), 0)
    put(tenant(running, "team-b"), 0)
    with_tools = FileStorage.open(tmp_path / "store")
    assert sorted(kept.name for kept in identities_of(with_tools)) == ["@team-a/model", "@team-b/model"]
    for kept in identities_of(with_tools):
        assert [found.object_bytes for found in with_tools.scan(kept.digest).objects] == [OBJECT_BYTES]
    with_tools.close()


@pytest.mark.threat("filling the store")
def test_a_tenant_at_its_quota_loses_its_own_least_recent_pages_and_no_one_elses(running: LoopbackServer) -> None:
    full, other = tenant(running, "full"), tenant(running, "other")
    put(other, 0)
    for number in range(30):
        assert put(full, number) == b"\x02"
    put(full, 22)
    put(full, 30, 31)
    assert stored(full, *range(32)) == list(range(22, 32))
    assert stored(other, 0) == [0]
    assert running.usage.by_tenant() == {"full": 10 * TAKEN_BYTES, "other": TAKEN_BYTES}
    assert running.usage.evicted_count() == {("full", Bound.QUOTA): 22}
    assert running.notes.kinds == []


@pytest.mark.parametrize("bound", Bound)
def test_of_a_put_that_comes_in_many_batches_and_exceeds_a_bound_the_first_pages_stay(
    tmp_path: Path, bound: Bound
) -> None:
    quota_pages = 10 if bound is Bound.QUOTA else 100
    cap_pages = 10 if bound is Bound.SHARE else None
    store = FileStorage.open(tmp_path / "store", bytes_max=cap_pages and cap_pages * TAKEN_BYTES)
    limits = Limits(batch_bytes=3 * OBJECT_BYTES)
    pages_max = 10 if bound is Bound.PAGES else 100
    running = LoopbackServer.start(
        store, limits, stored_bytes_max=quota_pages * TAKEN_BYTES, counted_pages_max=pages_max
    )
    wire = tenant(running, "large")
    put(wire, *range(100, 104))
    assert put(wire, *range(14)) == b"\x02" * 10 + b"\x00" * 4
    assert stored(wire, *range(14), *range(100, 104)) == list(range(10))
    assert set(running.notes.kinds) == {"declined"}
    assert "large" in running.notes.anomalies[0][1]
    running.stop()


def test_pages_that_the_store_evicted_unnoticed_are_counted_until_they_are_the_oldest() -> None:
    backend = MemoryStorage()
    running = LoopbackServer.start(backend, stored_bytes_max=5 * OBJECT_BYTES)
    wire = tenant(running, "a")
    put(wire, *range(5))
    backend.remove(list(backend._pages)[3:])
    assert put(wire, 5, 6) == b"\x02\x02"
    assert stored(wire, *range(7)) == [0, 1, 2, 5, 6]
    running.stop()


@pytest.mark.threat("filling the store")
def test_pages_that_are_known_only_when_they_are_read_count_then_and_the_oldest_go() -> None:
    backend = MemoryStorage()
    before, after = LoopbackServer.start(backend), LoopbackServer.start(backend, stored_bytes_max=2 * OBJECT_BYTES)
    put(tenant(before, "a"), *range(3))
    wire = tenant(after, "a")
    for number in range(3):
        assert wire.get(pb.GetRequest(runs=[run(key(number), object_bytes=OBJECT_BYTES)]))
    assert stored(wire, *range(3)) == [1, 2]
    assert after.usage.evicted_count() == {("a", Bound.QUOTA): 1}
    before.stop()
    after.stop()


@pytest.mark.threat("filling the store")
@pytest.mark.parametrize("kind", StoreKind)
def test_a_restart_counts_what_each_tenant_has_by_last_use(tmp_path: Path, kind: StoreKind) -> None:
    taken_bytes = kind.taken_bytes(OBJECT_BYTES)
    before = LoopbackServer.start(opened(kind, tmp_path))
    for number in (3, 0, 2, 1, 4):
        put_durable(tenant(before, "acme"), number)
    put_durable(tenant(before, "other"), 0)
    before.stop()
    after = LoopbackServer.start(opened(kind, tmp_path), stored_bytes_max=4 * taken_bytes)
    acme = tenant(after, "acme")
    assert after.usage.by_tenant() == {"acme": 4 * taken_bytes, "other": taken_bytes}
    assert stored(acme, *range(5)) == [0, 1, 2, 4]
    put(acme, 5)
    assert stored(acme, *range(6)) == [1, 2, 4, 5]
    after.stop()


@pytest.mark.parametrize(("is_elsewhere", "kinds"), [(False, []), (True, ["not_counted"])])
def test_a_store_without_a_catalog_is_said_to_be_uncounted_unless_it_began_empty(
    is_elsewhere: bool, kinds: list[str]
) -> None:
    store = ScriptedStorage()
    store.claims["exists_costs_io"] = is_elsewhere
    running = LoopbackServer.start(store)
    assert running.notes.kinds == kinds
    running.stop()


def test_an_identity_whose_manifest_cannot_be_read_is_said_to_be_uncounted(tmp_path: Path) -> None:
    before = LoopbackServer.start(opened(StoreKind.FILE, tmp_path))
    put_durable(tenant(before, "acme"), 0)
    before.stop()
    (manifest,) = tmp_path.glob("store/*/manifest.json")
    manifest.write_text("spoiled")
    notes = Notes()
    with closing(TenantStore(opened(StoreKind.FILE, tmp_path), before.usage, notes)) as store:
        store.count_stored(Event())
        assert (notes.kinds, store.is_counted) == (["not_counted"], False)


def test_a_store_that_cannot_be_listed_is_said_to_be_uncounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = LoopbackServer.start(opened(StoreKind.FILE, tmp_path))
    notes = Notes()
    unlisted = ScriptedStorage(FileStorage.open(tmp_path / "store"))
    unlisted.before[Method.MANIFESTS] = FAILS
    store = TenantStore(unlisted, running.usage, notes)
    stop = Event()
    counting = Thread(target=store.count_stored, args=(stop,))
    counting.start()
    wait_for(lambda: notes.kinds == ["not_counted"])
    stop.set()
    counting.join()
    monkeypatch.setattr(tenants, "RECOUNT_S", 0)
    store.count_stored(Event())
    assert notes.kinds == ["not_counted"] * (1 + tenants.COUNTS_MAX)
    assert not store.is_counted
    store.close()
    running.stop()


def test_one_tenant_stores_two_forms_of_one_model_side_by_side(running: LoopbackServer) -> None:
    """A rolling upgrade: engines of the old form and of the new one use the server at the same time."""
    other = manifest_of(Identity("model", "r1", "fp8"), LAYOUT)
    old, new = tenant(running, "acme"), Wire(running, "acme:admin")
    put(old, 0)
    new.ask(Call.HELLO, pb.HelloRequest(manifest=other))
    runs = [run(key(0), identity=other.identity)]
    assert pb.ExistsReply.FromString(new.ask(Call.EXISTS, pb.ExistsRequest(runs=runs))).found == b"\x00"
    assert put(old, 1) == b"\x02"
    new.ask(Call.CLEAR, pb.ClearRequest(identity=other.identity))
    runs = [run(key(0), key(1))]
    assert pb.ExistsReply.FromString(old.ask(Call.EXISTS, pb.ExistsRequest(runs=runs))).found == b"\x01\x01"


@pytest.mark.threat("displacing identities")
def test_readers_that_name_more_than_may_be_known_displace_nothing_that_a_writer_registered() -> None:
    registry = Registry(Limits(identities_max=3))
    owned = [manifest_of(Identity("model", f"r{number}"), LAYOUT) for number in range(3)]
    for manifest in owned:
        registry.add(WRITER, manifest)
    asked = [manifest_of(Identity("asked", f"r{number}"), LAYOUT) for number in range(10)]
    for manifest in (*asked, owned[0]):
        registry.add(READER, manifest)
    assert {each.manifest.identity for each in registry.registered("acme")} == {each.identity for each in owned}
    for manifest in asked[-3:]:
        assert registry.find("acme", manifest.identity).manifest == manifest
    for manifest in asked[:-3]:
        with pytest.raises(Refused, match="say Hello"):
            registry.find("acme", manifest.identity)


def test_an_identity_that_a_reader_named_first_is_the_writers() -> None:
    registry = Registry(Limits(identities_max=1))
    registry.add(READER, MANIFEST)
    registry.add(WRITER, MANIFEST)
    registry.add(READER, manifest_of(Identity("asked"), LAYOUT))
    assert registry.registered("acme") == [registry.find("acme", IDENTITY)]
    assert len(registry.of("acme")) == 2
    registry.forget("acme", IDENTITY)
    with pytest.raises(Refused, match="say Hello"):
        registry.find("acme", IDENTITY)


def test_a_reader_alone_reads_after_a_restart_what_its_tenant_stored(tmp_path: Path) -> None:
    before = LoopbackServer.start(FileStorage.open(tmp_path / "store"))
    put(tenant(before, "acme"), 0)
    before.stop()
    after = LoopbackServer.start(FileStorage.open(tmp_path / "store"))
    reader = tenant(after, "acme", "reader")
    (answer,) = map(pb.GetPart.FromString, reader.get(pb.GetRequest(runs=[run(key(0), object_bytes=OBJECT_BYTES)])))
    assert answer.content == page(0)
    after.stop()


def test_a_full_registry_forgets_the_identity_that_nobody_used_for_longest() -> None:
    registry = Registry(Limits(identities_max=3))
    manifests = [manifest_of(Identity("model", f"r{number}"), LAYOUT) for number in range(5)]
    for manifest in manifests[:3]:
        registry.add(WRITER, manifest)
    registry.find("acme", manifests[0].identity)
    registry.add(WRITER, manifests[1])
    registry.add(OTHER_WRITER, manifests[4])
    registry.add(WRITER, manifests[3])
    known = {registration.manifest.identity for registration in registry.of("acme")}
    assert known == {manifests[number].identity for number in (0, 1, 3)}
    with pytest.raises(Refused, match="say Hello") as forgotten:
        registry.find("acme", manifests[2].identity)
    assert forgotten.value.trailing == ((REASON, REASON_HELLO),)
    assert registry.add(WRITER, manifests[2]).manifest == manifests[2]


# Tenants share the store by quota: what one puts costs none of the others a page below its share


CAP_PAGES = 20


def opened(kind: StoreKind, directory: Path) -> Store:
    return kind.open(directory / "store", bytes_max=CAP_PAGES * kind.taken_bytes(OBJECT_BYTES))


@pytest.fixture(params=StoreKind)
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
def test_puts_of_many_tenants_at_the_same_time_leave_the_store_nothing_to_choose(tmp_path: Path) -> None:
    store = FileStorage.open(tmp_path / "store", bytes_max=CAP_PAGES * TAKEN_BYTES)
    server = LoopbackServer.start(store)
    quiet = tenant(server, "quiet")
    assert put_durable(quiet, *range(4)) == b"\x02" * 4
    floods = [tenant(server, f"flood{number}") for number in range(4)]
    with ThreadPoolExecutor(len(floods)) as pool:
        list(pool.map(lambda flood: [put_durable(flood, *range(at, at + 3)) for at in range(0, 60, 3)], floods))
    assert stored(quiet, *range(4)) == list(range(4))
    assert store.counts.evicted_count == 0
    assert store.bytes_used <= CAP_PAGES * TAKEN_BYTES
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


def test_what_a_tenant_lost_is_what_it_had_stored_and_has_no_more(shared: LoopbackServer) -> None:
    only, other = tenant(shared, "only"), tenant(shared, "other")
    stored_count = sum(put(only, *range(at, at + 30)).count(2) for at in (0, 30, 60))
    assert stored_count == 3 * CAP_PAGES, "of each put the first pages"
    assert put(other, *range(3)) == b"\x02" * 3
    left_count = len(stored(only, *range(90)))
    assert shared.usage.evicted_count() == {("only", Bound.SHARE): stored_count - left_count}


@pytest.mark.parametrize("used", ["put", "touched", "read"])
def test_a_page_that_is_used_again_is_a_recent_one(shared: LoopbackServer, used: str) -> None:
    only = tenant(shared, "only")
    for number in range(20):
        put(only, number)
    match used:
        case "put":
            put(only, 0)
        case "touched":
            only.ask(Call.TOUCH, pb.TouchRequest(runs=[run(key(0), key(99))]))
        case _:
            only.get(pb.GetRequest(runs=[run(key(0), object_bytes=OBJECT_BYTES)]))
    put(only, 20, 21, 22)
    assert stored(only, *range(23)) == [0, *range(4, 23)]


def paged(number: int, identity: bytes = IDENTITY) -> PageIO:
    return PageIO(Label(identity, key(number), "kv"), (memoryview(b"x"),))


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
        gone = [label for lost in usage.surplus({page.label for page in fresh}).values() for label in lost]
        assert sum(map(usage.held_bytes, names)) <= 60
        for each, quota in active.items():
            share = 60 * quota // sum(active.values())
            lost_count = sum(label.identity == bytes([names.index(each)]) * 32 for label in gone)
            if held[each] <= share:
                assert not lost_count, f"step {step}: {each} had {held[each]} of {share} and lost {lost_count}"
        if rng.random() < 0.1:
            usage.drop_identity(name, bytes([names.index(name)]) * 32)
            assert usage.held_bytes(name) == 0


def test_a_manifest_that_does_not_describe_its_identity_is_no_tenant_s() -> None:
    ours = manifest_of(Identity(model_of_tenant("acme", "m")), LAYOUT)
    forged = Manifest()
    forged.CopyFrom(ours)
    forged.model = model_of_tenant("other", "m")
    assert (tenant_of(ours), tenant_of(forged)) == ("acme", "")


# What is counted


class EveryLevel(MemoryStorage):
    """A store to which every level is the same."""

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        return super().put(pages, Level.CACHED)


class TwoTenants:
    """Two tenants of a store in memory, which may store five pages each and eight together."""

    def __init__(self) -> None:
        self.memory, self.notes = EveryLevel(), Notes()
        self.fickle = ScriptedStorage(self.memory)
        cap_bytes = 8 * OBJECT_BYTES
        self.usage = TenantUsage(QuotaSettings(stored_bytes_max=5 * OBJECT_BYTES), 12, cap_bytes)
        self.store = TenantStore(self.fickle, self.usage, self.notes)
        registry = Registry(Limits())
        self.manifests = {name: registry.add(Caller(name, Role.WRITER), MANIFEST).stored for name in ("a", "b")}

    def labels(self, name: str, numbers: Iterable[int]) -> list[Label]:
        return [Label(self.manifests[name].identity, key(number), "kv") for number in numbers]

    def put(self, name: str, numbers: Iterable[int], level: Level = Level.CACHED) -> list[Answer]:
        pages = [sealed_page(each, OBJECT_BYTES) for each in self.labels(name, numbers)]
        return self.store.put(name, pages, level, {self.manifests[name].identity: self.manifests[name]})

    def held(self) -> dict[str, int]:
        """Bytes that the store has of each tenant."""
        counts = {name: len(self.memory.scan(each.identity).objects) for name, each in self.manifests.items()}
        return {name: count * OBJECT_BYTES for name, count in counts.items() if count}


def test_bytes_and_pages_of_each_tenant_are_those_in_the_store_after_every_call() -> None:
    rng = random.Random(1)
    two, happened = TwoTenants(), Counter[str]()
    for _ in range(800):
        name, some = rng.choice("ab"), [rng.randrange(9) for _ in range(rng.randrange(1, 4))]
        answer = rng.choice([None] * 8 + [Answer.DECLINED, Answer.UNAVAILABLE])
        two.fickle.answers = {} if answer is None else {Method.PUT: answer}
        two.fickle.before, two.fickle.after = {}, {}
        if rng.random() < 0.2:
            rng.choice([two.fickle.before, two.fickle.after])[Method.PUT] = FAILS
        match rng.choice(["put", "put", "durable", "read", "remove", "clear", "touch"]):
            case "put":
                with suppress(Refused):
                    happened[" ".join(sorted({each.value for each in two.put(name, some)}))] += 1
            case "durable":
                with suppress(Refused):
                    two.put(name, some, Level.DURABLE)
            case "read":
                asked = two.labels(name, some)
                happened["hit"] += sum(bool(answer) for answer, _ in two.store.read(name, asked, OBJECT_BYTES))
            case "remove":
                happened["removed"] += two.store.remove(name, two.labels(name, some))
            case "clear" if rng.random() < 0.2:
                happened["cleared"] += two.store.clear(name, two.manifests[name].identity)
            case _:
                two.store.touch(name, two.labels(name, some))
        assert two.usage.by_tenant() == two.held()
    assert min(happened[each] for each in ("stored", "declined", "unavailable", "hit", "removed", "cleared")) > 5


@pytest.mark.parametrize("again", ["put", "read", "remove", "clear"])
def test_pages_that_come_again_or_went_take_nothing_of_the_bounds_that_all_tenants_share(again: str) -> None:
    two = TwoTenants()
    for _ in range(20):
        assert two.put("a", range(4)) == [Answer.STORED] * 4
        match again:
            case "read":
                two.store.read("a", two.labels("a", range(4)), OBJECT_BYTES)
            case "remove":
                assert two.store.remove("a", two.labels("a", [0, 1, 2, 3, 0])) == 4
            case "clear":
                assert two.store.clear("a", two.manifests["a"].identity) == 4
            case _:
                two.put("a", [0, 0, 1])
    assert two.put("b", range(4)) == [Answer.STORED] * 4
    assert two.usage.evicted_count().total() == 0


def test_pages_that_a_failed_remove_took_along_are_counted_no_more() -> None:
    two = TwoTenants()
    two.put("a", range(3))

    def half_of_it() -> None:
        two.memory.remove(two.labels("a", [0]))
        FAILS()

    two.fickle.before[Method.REMOVE] = half_of_it
    with pytest.raises(StorageError):
        two.store.remove("a", two.labels("a", range(3)))
    assert two.usage.by_tenant() == two.held() == {"a": 2 * OBJECT_BYTES}


def test_every_page_that_is_asked_for_or_put_counts_once_by_its_answer() -> None:
    two = TwoTenants()
    two.put("a", [0, 1, 1])
    two.put("a", [1, 2])
    two.fickle.answers[Method.PUT] = Answer.DECLINED
    two.put("a", [3, 0])
    assert two.notes.puts_count == {Answer.STORED: 5, Answer.DECLINED: 1}
    two.store.exists("a", two.labels("a", [0, 1, 7]))
    assert two.notes.reads_count == {("a", Answer.HIT): 2, ("a", Answer.MISS): 1}
    two.store.read("a", two.labels("a", [0, 8, 9]), OBJECT_BYTES)
    two.fickle.before[Method.EXISTS] = FAILS
    two.store.exists("b", two.labels("b", [0, 1]))
    assert two.notes.reads_count == {
        ("a", Answer.HIT): 3,
        ("a", Answer.MISS): 3,
        ("b", Answer.UNAVAILABLE): 2,
    }
