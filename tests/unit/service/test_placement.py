"""Pages that a store has in memory, read straight into shared memory: the right ones, verified, whoever meddles."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.service import LoopbackServer, Wire, limits_with, refused
from tests.support.store_kinds import DirectoryStorage, StoreKind
from tests.unit.service.test_requests import BAD, MANIFEST, MODEL, OBJECT_BYTES, key, page, part, run, start
from tests.unit.service.test_sharing import Offered, bytes_in, get, offered, range_of, shared
from unified_cache.components import Full
from unified_cache.pool import ModelLayout, PoolSpec
from unified_cache.proto import service_pb2 as pb
from unified_cache.seal import HEADER_BYTES, Label
from unified_cache.service.requests import placement
from unified_cache.service.requests.calls import ServedCall
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import sealed_page
from unified_cache.wire.calls import Call

NUMBERS = range(6)


def nothing(buffers: Sequence[memoryview]) -> None:
    """Leave what was read as it is."""


class WatchedDisk(Disk):
    """A disk that has everything in memory, and lets somebody else at what was read before its reader looks at it."""

    def __init__(self) -> None:
        self.reads_count = 0
        self.then: Callable[[Sequence[memoryview]], None] = nothing

    @staticmethod
    def has_cached(fd: int, start: int, count: int) -> bool:
        return True

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads_count += 1
        count = os.preadv(fd, buffers, offset)
        self.then(buffers)
        return count


class Placing(NamedTuple):
    """A server over a directory, and a client that shares memory with it."""

    running: LoopbackServer
    wire: Wire
    memory: Offered
    name: str
    disk: WatchedDisk
    gets: list[int]
    """Pages of each get of the store, which are the reads that may wait."""

    def find(self, *numbers: int, at: int = 0) -> tuple[bytes, int]:
        self.gets.clear()
        self.disk.reads_count = 0
        return get(self.wire, range_of(self.name, len(numbers) * OBJECT_BYTES, at), *numbers)

    def content(self, count: int, at: int = 0) -> bytes:
        return bytes_in(self.memory.region, at, count * OBJECT_BYTES)


@contextmanager
def placing(store: DirectoryStorage, disk: WatchedDisk, host_bytes: int = 0) -> Iterator[Placing]:
    gets: list[int] = []
    read = store.get

    def counted(pages: Sequence[PageIO]) -> list[Answer]:
        gets.append(len(pages))
        return read(pages)

    store.get = counted  # type: ignore[method-assign]
    running = LoopbackServer.start(store, host_bytes=host_bytes)
    with closing(Wire(running)) as wire, offered() as memory:
        wire.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
        wire.put([start(*NUMBERS), part(b"".join(map(page, NUMBERS)))])
        yield Placing(running, wire, memory, shared(wire, memory), disk, gets)
    running.stop()


@pytest.fixture(params=list(StoreKind), ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> StoreKind:
    found: StoreKind = request.param
    return found


@pytest.fixture
def placed(kind: StoreKind, tmp_path: Path) -> Iterator[Placing]:
    disk = WatchedDisk()
    with placing(kind.open(tmp_path / "store", disk=disk), disk) as made:
        yield made


def test_what_the_store_has_in_memory_is_read_into_its_place_under_the_callers_name(placed: Placing) -> None:
    assert placed.find(*NUMBERS, at=4096) == (b"\x02" * len(NUMBERS), len(NUMBERS) * OBJECT_BYTES)
    assert placed.content(len(NUMBERS), at=4096) == b"".join(map(page, NUMBERS))
    assert placed.gets == []
    assert placed.disk.reads_count > 0


def test_pages_beyond_one_message_are_told_of_by_several(placed: Placing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PLACED_BYTES", 2 * OBJECT_BYTES)
    request = pb.GetRequest(
        runs=[run(*map(key, NUMBERS), object_bytes=OBJECT_BYTES)],
        shared=range_of(placed.name, len(NUMBERS) * OBJECT_BYTES),
    )
    parts = [pb.GetPart.FromString(message) for message in placed.wire.get(request)]
    assert [(each.offset, each.hits, each.shared_bytes) for each in parts] == [
        (number * OBJECT_BYTES, b"\x02\x02", 2 * OBJECT_BYTES) for number in (0, 2, 4)
    ]
    assert placed.content(len(NUMBERS)) == b"".join(map(page, NUMBERS))
    assert placed.gets == []


def test_a_page_that_is_not_there_leaves_no_gap(placed: Placing) -> None:
    assert placed.find(3, 9, 1, 8, 0) == (b"\x02\x00\x02\x00\x02", 3 * OBJECT_BYTES)
    assert placed.content(3) == page(3) + page(1) + page(0)


def test_a_caller_that_changes_what_is_read_has_the_page_and_costs_none(placed: Placing) -> None:
    def meddle(buffers: Sequence[memoryview]) -> None:
        placed.memory.region.write((memoryview(b"\xff"),), HEADER_BYTES + 5)

    placed.disk.then = meddle
    assert placed.find(1, 2) == (b"\x02\x02", 2 * OBJECT_BYTES)
    assert placed.content(2) == page(1) + page(2)
    assert placed.gets == [2], "what was found flawed where a caller could reach it is read again, out of reach"
    placed.disk.then = nothing
    assert placed.find(1, 2) == (b"\x02\x02", 2 * OBJECT_BYTES)
    assert placed.gets == []
    assert placed.running.notes.anomalies == []


def test_a_page_that_is_flawed_in_the_store_is_a_miss_and_is_removed(kind: StoreKind, tmp_path: Path) -> None:
    disk = WatchedDisk()
    with placing(kind.open(tmp_path / "store", disk=disk), disk) as placed:
        payload = page(2)[HEADER_BYTES:]
        (file,) = [each for each in (tmp_path / "store").rglob("*") if each.is_file() and payload in each.read_bytes()]
        whole = file.read_bytes()
        file.write_bytes(whole.replace(payload, bytes(len(payload))))
        assert placed.find(1, 2, 3) == (b"\x02\x00\x02", 2 * OBJECT_BYTES)
        assert placed.content(2) == page(1) + page(3)
        assert placed.find(2) == (b"\x00", 0)


def test_a_server_that_keeps_pages_in_its_memory_reads_them_there(kind: StoreKind, tmp_path: Path) -> None:
    disk = WatchedDisk()
    host_bytes = 2 * (OBJECT_BYTES + 2048)
    with placing(kind.open(tmp_path / "store", disk=disk), disk, host_bytes) as placed:
        hits, _ = placed.find(*NUMBERS)
        assert b"\x02" in hits
        assert placed.content(len(NUMBERS)) == b"".join(map(page, NUMBERS))
        assert placed.gets != []


def test_a_window_without_room_for_what_is_found_is_an_invalid_argument(placed: Placing) -> None:
    request = pb.GetRequest(
        runs=[run(key(1), key(2), object_bytes=OBJECT_BYTES)], shared=range_of(placed.name, 2 * OBJECT_BYTES - 1)
    )
    with refused(BAD):
        placed.wire.get(request)


def test_a_window_has_room_enough_if_what_is_found_fits(placed: Placing) -> None:
    request = pb.GetRequest(
        runs=[run(key(1), key(9), object_bytes=OBJECT_BYTES)], shared=range_of(placed.name, OBJECT_BYTES)
    )
    parts = [pb.GetPart.FromString(message) for message in placed.wire.get(request)]
    assert b"".join(each.hits for each in parts) == b"\x02\x00"


def test_a_call_that_finds_nothing_goes_on_with_every_batch(placed: Placing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed.running.service, "_limits", limits_with(batch_bytes=OBJECT_BYTES))
    moved: list[ServedCall] = []
    go_on = ServedCall.moved

    def noted(call: ServedCall) -> None:
        moved.append(call)
        go_on(call)

    monkeypatch.setattr(ServedCall, "moved", noted)
    assert placed.find(*range(20, 27)) == (bytes(7), 0)
    assert placed.gets == [1] * 7
    assert len(moved) >= 7


def test_a_call_of_16_mib_is_two_batches_whatever_its_headers_take() -> None:
    page_bytes, count = HEADER_BYTES + (1 << 20), 16
    puts: list[int] = []

    class CountedPuts(MemoryStorage):
        def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
            puts.append(len(pages))
            return super().put(pages, level)

    running = LoopbackServer.start(CountedPuts())
    layout = ModelLayout(16, (Full((PoolSpec("kv", page_bytes - HEADER_BYTES),)),))
    manifest = manifest_of(MODEL, layout)
    labels = [Label(manifest.identity, key(number), "kv") for number in range(count)]
    with closing(running.client()) as storage:
        storage.register(manifest, {})
        assert (
            storage.put([sealed_page(label, page_bytes) for label in labels], Level.CACHED) == [Answer.STORED] * count
        )
    assert puts == [count // 2] * 2
    running.stop()
