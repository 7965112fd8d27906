"""Pages of stores in a directory: read into an engine's own rows, and never once these are another's."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest

from tests.support.engine_rows import EngineRows, label_of, opened_store, payload_of
from tests.support.files import RefusingDisk
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


class GatedDisk(Disk):
    """A disk that hangs in one call, once it was told to."""

    def __init__(self) -> None:
        self.hangs, self.may_go_on = Event(), Event()

    def _wait(self) -> None:
        if self.hangs.is_set():
            assert self.may_go_on.wait(PATIENCE_S)


class OpeningHangs(GatedDisk):
    """A disk that has no name in memory, and hangs where one is looked up."""

    def open_cached(self, name: str, flags: int, *, dir_fd: int) -> int:  # type: ignore[override]
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def open(  # type: ignore[override]
        self, path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        self._wait()
        return os.open(path, flags, mode, dir_fd=dir_fd)


class ReadingHangs(GatedDisk):
    """A disk of which nothing is in memory, and whose reads hang."""

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._wait()
        return os.preadv(fd, buffers, offset)


def test_pages_come_back_byte_by_byte_from_the_disk(kind: StoreKind, tmp_path: Path) -> None:
    with opened_store(kind.open(tmp_path / "store", disk=RefusingDisk(errno.EAGAIN)), PATIENT) as store:
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


@pytest.mark.parametrize("disk", [OpeningHangs(), ReadingHangs()])
def test_a_read_that_hangs_never_touches_rows_that_are_the_engine_s_again(
    kind: StoreKind, tmp_path: Path, disk: GatedDisk
) -> None:
    if kind is StoreKind.PACKED and isinstance(disk, OpeningHangs):
        pytest.skip("its files are open")
    disk.hangs.clear()
    disk.may_go_on.clear()
    with opened_store(kind.open(tmp_path / "store", disk=disk), PATIENT) as store:
        store.put(EngineRows.holding([1, 2]).pages([1, 2]))
    store = opened_store(kind.open(tmp_path / "store", disk=disk), SOON_LATE)
    rows = EngineRows.holding([7, 8])
    disk.hangs.set()
    assert store.get(rows.pages([1, 2])) == [Answer.UNAVAILABLE] * 2
    assert store.counts().unavailable[Method.GET, Unavailable.LATE] == 2
    disk.may_go_on.set()
    assert store.wait_for_late_calls(PATIENCE_S)
    assert [rows.payload(0), rows.payload(1)] == [payload_of(7), payload_of(8)]
    rows.close()  # BufferError, had the store's thread a view of it
    store.close()
    with opened_store(kind.open(tmp_path / "store", disk=disk), PATIENT) as store:
        assert store.get(EngineRows(2).pages([1, 2])) == [Answer.HIT] * 2
