"""Pages of stores in a directory: read into an engine's own rows, and never once these are another's."""

import errno
from pathlib import Path
from threading import Event

import pytest

from tests.support.engine_rows import EngineRows, label_of, opened_store, payload_of
from tests.support.files import FaultyDisk, refuses
from tests.support.store_kinds import StoreKind
from tests.support.wrappers import PATIENCE_S
from unified_cache.core.config import GuardConfig
from unified_cache.integrations.engine_store import EngineStoreConfig, Unavailable
from unified_cache.integrations.engine_store.buffers import BounceMemory
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

NUMBERS = range(5)
SOON_LATE = EngineStoreConfig(guard=GuardConfig(deadline_s=0.3, retry_rounds_max=1), bounce_bytes=1 << 20)
PATIENT = EngineStoreConfig(guard=GuardConfig(deadline_s=PATIENCE_S), bounce_bytes=1 << 20)


@pytest.fixture(params=list(StoreKind))
def kind(request: pytest.FixtureRequest) -> StoreKind:
    found: StoreKind = request.param
    return found


def test_pages_come_back_byte_by_byte_from_the_disk(kind: StoreKind, tmp_path: Path) -> None:
    with opened_store(
        kind.open(tmp_path / "store", disk=FaultyDisk(before={"preadv_cached": refuses(errno.EAGAIN)})), PATIENT
    ) as store:
        store.put(EngineRows.holding(NUMBERS).pages(NUMBERS))
        order = [3, 99, 0, 4]
        target = EngineRows(len(order))
        assert store.get(target.pages(order)) == Answer.of_reads(number in NUMBERS for number in order)
        assert [target.payload(slot) == payload_of(number) for slot, number in enumerate(order)] == [
            number in NUMBERS for number in order
        ]


def test_a_page_in_memory_is_copied_once(kind: StoreKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = BounceMemory.allocate(1 << 20)
    monkeypatch.setattr(BounceMemory, "allocate", lambda *given: memory)
    with opened_store(kind.open(tmp_path / "store", disk=Disk()), PATIENT) as store:
        store.put(EngineRows.holding(NUMBERS).pages(NUMBERS))
        memory.whole[:] = bytes(memory.bytes_max)
        target = EngineRows(len(NUMBERS))
        assert store.get(target.pages(NUMBERS)) == [Answer.HIT] * len(NUMBERS)
        assert [target.payload(number) for number in NUMBERS] == [payload_of(number) for number in NUMBERS]
        landed = bytes(memory.whole)
        assert not any(payload_of(number)[:64] in landed for number in NUMBERS)


def test_damaged_pages_are_flawed_in_rows_as_in_landing_memory(kind: StoreKind, tmp_path: Path) -> None:
    with opened_store(kind.open(tmp_path / "store", disk=Disk()), PATIENT) as store:
        store.put(EngineRows.holding(NUMBERS).pages(NUMBERS))
        for path in (tmp_path / "store").rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            at = content.find(payload_of(2)[-100:])
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([content[at] ^ 1]))
        rows = EngineRows(len(NUMBERS))
        answers = store.get(rows.pages(NUMBERS))
        assert answers == [Answer.FLAWED if number == 2 else Answer.HIT for number in NUMBERS]
        assert store.exists([label_of(2)]) == [Answer.MISS]


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_read_that_hangs_never_touches_rows_that_are_the_engine_s_again(
    kind: StoreKind, tmp_path: Path, call: str
) -> None:
    if kind is StoreKind.PACKED and call == "open":
        pytest.skip("its files are open")
    hangs, may_go_on = Event(), Event()

    def hang(*_given: object, **_named: object) -> None:
        assert not hangs.is_set() or may_go_on.wait(PATIENCE_S)

    disk = FaultyDisk(before={f"{call}_cached": refuses(errno.EAGAIN), call: hang})
    with opened_store(kind.open(tmp_path / "store", disk=disk), PATIENT) as store:
        store.put(EngineRows.holding([1, 2]).pages([1, 2]))
    store = opened_store(kind.open(tmp_path / "store", disk=disk), SOON_LATE)
    rows = EngineRows.holding([7, 8])
    hangs.set()
    assert store.get(rows.pages([1, 2])) == [Answer.UNAVAILABLE] * 2
    assert store.counts().unavailable[Method.GET, Unavailable.LATE] == 2
    may_go_on.set()
    assert store.wait_for_late_calls(PATIENCE_S)
    assert [rows.payload(0), rows.payload(1)] == [payload_of(7), payload_of(8)]
    rows.close()  # BufferError, had the store's thread a view of it
    store.close()
    with opened_store(kind.open(tmp_path / "store", disk=disk), PATIENT) as store:
        assert store.get(EngineRows(2).pages([1, 2])) == [Answer.HIT] * 2
