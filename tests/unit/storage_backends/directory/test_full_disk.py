"""Stores in a directory on real file systems that are full: they make room by what was used least recently."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.clock import ManualClock
from tests.support.files import FILE_BYTES, DiskFault, FaultyDisk, held, hits, put, small_disk, take_the_rest
from tests.support.running_service import running
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.components import Full
from unified_cache.core.errors import StorageError, StorageFullError
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore
from unified_cache.storage_backends.common.breaker import Backoff, Retries
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    OTHER_MODEL,
    PAGE_BYTES,
    blank_page,
    label,
    sealed_page,
)

DISK_BYTES = 24 << 20
LARGE_BYTES = 65_000
SLOT_BYTES = 65_536
PROMPT_PAGES = 8
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as path:
        yield path


def put_prompts(storage: DirectoryStorage, prompts: Sequence[int], level: Level = Level.CACHED) -> list[Answer]:
    """Put prompts of eight large pages, each by a call of its own."""
    answers: list[Answer] = []
    for prompt in prompts:
        numbers = range(prompt * PROMPT_PAGES, (prompt + 1) * PROMPT_PAGES)
        answers += storage.put([sealed_page(label(number), LARGE_BYTES) for number in numbers], level)
    return answers


def whole_prompts(storage: DirectoryStorage, prompts: Sequence[int]) -> list[int]:
    """Return the prompts of which every page is a hit."""
    pages = {prompt: range(prompt * PROMPT_PAGES, (prompt + 1) * PROMPT_PAGES) for prompt in prompts}
    return [
        prompt
        for prompt, numbers in pages.items()
        if all(storage.get([blank_page(label(number), LARGE_BYTES) for number in numbers]))
    ]


@pytest.mark.parametrize("bytes_max", [None, 1 << 30], ids=["unbounded", "capped"])
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("free_bytes_min", [0, 8 * MIB])
def test_a_full_disk_and_a_reserve_evict_the_least_recent_pages(
    bytes_max: int | None, level: Level, free_bytes_min: int, kind: StoreKind, disk: Path
) -> None:
    with closing(kind.open(disk / "store", bytes_max=bytes_max, free_bytes_min=free_bytes_min)) as storage:
        assert set(put_prompts(storage, range(120), level)) == {Answer.STORED}
        assert whole_prompts(storage, range(100, 120)) == list(range(100, 120))
        assert storage.counts.evicted_count > 0
        assert os.statvfs(disk).f_bavail * FILE_BYTES >= free_bytes_min
    with closing(kind.open(disk / "store", free_bytes_min=free_bytes_min)) as storage:
        assert whole_prompts(storage, range(100, 120)) == list(range(100, 120))
        assert set(put_prompts(storage, range(120, 140), level)) == {Answer.STORED}
        assert whole_prompts(storage, range(120, 140)) == list(range(120, 140))


@pytest.mark.parametrize("level", Level)
def test_of_a_put_larger_than_the_disk_the_first_pages_are_stored_and_the_next_put_is_taken(
    level: Level, kind: StoreKind, disk: Path
) -> None:
    page_bytes = 8192
    pages = [sealed_page(label(number), page_bytes) for number in range(DISK_BYTES // page_bytes + 400)]
    with closing(kind.open(disk / "store", free_bytes_min=0)) as storage:
        answers = storage.put(pages, level)
        stored_count = answers.count(Answer.STORED)
        assert stored_count * page_bytes > DISK_BYTES / 2
        assert answers == [Answer.STORED] * stored_count + [Answer.DECLINED] * (len(pages) - stored_count)
        assert set(put_prompts(storage, range(1000, 1002), level)) == {Answer.STORED}
        assert whole_prompts(storage, range(1000, 1002)) == [1000, 1001]


def test_slots_whose_table_could_not_be_written_are_free_again_where_nothing_is_in_it(tmp_path: Path) -> None:
    disk = FaultyDisk(DiskFault.ENOSPC, only="pwritev")
    with closing(PackedStorage.open(tmp_path / "store", free_bytes_min=0, disk=disk)) as storage:
        put_prompts(storage, [0])
        (file,) = (tmp_path / "store").rglob("*.pack")
        before_bytes = file.stat().st_size
        numbers = range(PROMPT_PAGES, 2 * PROMPT_PAGES)
        # Each page is a call, and so are its table's lines and their removal.
        disk.failing = range(len(disk.calls) + PROMPT_PAGES, len(disk.calls) + PROMPT_PAGES + 3)
        storage.put([sealed_page(label(number), LARGE_BYTES) for number in numbers], Level.CACHED)
        assert set(put_prompts(storage, [2])) == {Answer.STORED}
        assert file.stat().st_size <= before_bytes + 2 * PROMPT_PAGES * SLOT_BYTES, "no slot is nobody's"


@pytest.mark.parametrize("bytes_max", [None, 10 * MIB], ids=["unbounded", "capped"])
def test_a_store_whose_space_others_take_keeps_the_newest_pages_and_grows_when_it_comes_back(
    bytes_max: int | None, kind: StoreKind, disk: Path
) -> None:
    with closing(kind.open(disk / "store", bytes_max=bytes_max, free_bytes_min=0)) as storage:
        put_prompts(storage, range(30))
        take_the_rest(disk / "others")
        for prompt in range(30, 60):
            assert set(put_prompts(storage, [prompt])) == {Answer.STORED}
            assert whole_prompts(storage, [prompt]) == [prompt]
        assert whole_prompts(storage, range(50, 60)) == list(range(50, 60))
        (disk / "others").unlink()
        evicted_count = storage.counts.evicted_count
        assert set(put_prompts(storage, range(60, 61))) == {Answer.STORED}
        assert storage.counts.evicted_count <= evicted_count + (bytes_max is not None) * PROMPT_PAGES


def test_a_put_goes_on_to_evict_where_others_take_what_it_has_freed(kind: StoreKind, tmp_path: Path) -> None:
    disk = FaultyDisk(DiskFault.ENOSPC, only="pwritev")
    with closing(kind.open(tmp_path / "store", free_bytes_min=0, disk=disk)) as storage:
        put_prompts(storage, range(12))
        disk.failing = range(len(disk.calls), len(disk.calls) + 4)
        assert put_prompts(storage, [12]) == [Answer.STORED] * PROMPT_PAGES
        assert whole_prompts(storage, [11, 12]) == [11, 12]


def test_a_put_that_no_eviction_makes_room_for_is_declined_with_its_reason_and_evicts_nothing(
    kind: StoreKind, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(kind.open(disk / "store", free_bytes_min=8 * MIB)) as storage:
        put_prompts(storage, range(4))
        take_the_rest(disk / "others", left_bytes=MIB)
        assert set(put_prompts(storage, range(4, 8))) == {Answer.DECLINED}
        assert storage.counts.declined_count == 4 * PROMPT_PAGES
        assert storage.counts.evicted_count == 0
        assert whole_prompts(storage, range(4)) == list(range(4))
        assert "1.0 MiB free" in storage.decline_reason
        assert "8.0 MiB" in storage.decline_reason
        assert [record.levelname for record in caplog.records] == ["WARNING"], "once, and not for each put"


def test_of_a_batch_that_does_not_fit_the_first_pages_are_stored(kind: StoreKind, disk: Path) -> None:
    with closing(kind.open(disk / "store", free_bytes_min=0)) as storage:
        answers = storage.put([sealed_page(label(number), 5 * MIB) for number in range(6)], Level.DURABLE)
        assert answers == [Answer.STORED] * 4 + [Answer.DECLINED] * 2
        found = [blank_page(label(number), 5 * MIB) for number in range(6)]
        assert list(map(bool, storage.get(found))) == [True] * 4 + [False] * 2


def test_free_slots_take_pages_on_a_full_disk_and_below_the_reserve(disk: Path) -> None:
    with closing(PackedStorage.open(disk / "store", free_bytes_min=16 * MIB)) as storage:
        put_prompts(storage, range(10))
        take_the_rest(disk / "others")
        storage.remove([label(number) for number in range(3 * PROMPT_PAGES)])
        assert put_prompts(storage, range(10, 13)) == [Answer.STORED] * 3 * PROMPT_PAGES
        assert (storage.counts.evicted_count, storage.counts.declined_count) == (0, 0)


def test_pages_of_another_length_make_room_too(kind: StoreKind, disk: Path) -> None:
    with closing(kind.open(disk / "store", free_bytes_min=0)) as storage:
        put_prompts(storage, range(120))
        for number in range(1000, 1100):
            assert put(storage, range(number * 8, number * 8 + 8), Level.DURABLE) == [True] * 8
        assert all(hits(storage, range(8000, 8800)))


def test_an_identity_is_announced_to_a_store_on_a_full_disk(kind: StoreKind, disk: Path) -> None:
    with closing(kind.open(disk / "store", free_bytes_min=0)) as storage:
        put_prompts(storage, range(10))
        take_the_rest(disk / "others")
        for model in (MODEL, OTHER_MODEL):
            storage.register(manifest_of(model, LAYOUT), {})
        assert len(storage.manifests()) == 2


def test_a_store_without_a_cap_evicts_what_another_process_has_stored_and_passes_over_what_it_removed(
    disk: Path,
) -> None:
    with (
        closing(FileStorage.open(disk / "store", free_bytes_min=0)) as mine,
        closing(FileStorage.open(disk / "store", free_bytes_min=0)) as theirs,
    ):
        put_prompts(mine, range(60))
        put_prompts(theirs, range(100, 160))
        for prompt in range(200, 260):
            storage = (mine, theirs)[prompt % 2]
            assert set(put_prompts(storage, [prompt])) == {Answer.STORED}
        assert whole_prompts(mine, range(230, 260)) == list(range(230, 260))


def test_a_use_by_another_process_before_the_disk_was_full_counts(disk: Path) -> None:
    with (
        closing(FileStorage.open(disk / "store", free_bytes_min=0)) as mine,
        closing(FileStorage.open(disk / "store", free_bytes_min=0)) as theirs,
    ):
        put_prompts(theirs, range(30))
        assert whole_prompts(theirs, [0]) == [0]
        theirs.close()
        put_prompts(mine, range(30, 60))
        assert whole_prompts(mine, [0]) == [0]
        assert whole_prompts(mine, [1]) == []


SERVED_LAYOUT = ModelLayout(16, (Full((PoolSpec("kv", 8192),)),))
SERVED = Identity("served")


@pytest.mark.parametrize("storage_bytes", [None, 1 << 30], ids=["unbounded", "capped"])
def test_a_service_on_a_full_disk_keeps_the_newest_prompts(
    storage_bytes: int | None, kind: StoreKind, tmp_path: Path
) -> None:
    identity = SERVED.digest(SERVED_LAYOUT)
    labels = [Label(identity, sha256(b"%d" % number).digest(), "kv") for number in range(120 * PROMPT_PAGES)]
    prompts = [labels[start : start + PROMPT_PAGES] for start in range(0, len(labels), PROMPT_PAGES)]
    page_bytes = HEADER_BYTES + 8192
    with (
        small_disk(tmp_path / "disk", 4 * MIB) as disk,
        running(storage=f"{kind.value}:{disk}/store?free=0", storage_bytes=storage_bytes) as server,
        closing(open_storage(f"grpc://{server.address}")) as storage,
    ):
        storage.register(manifest_of(SERVED, SERVED_LAYOUT), {})
        for prompt in prompts:
            assert all(storage.put([sealed_page(each, page_bytes) for each in prompt], Level.CACHED))
        for prompt in prompts[-20:]:
            assert all(storage.get([blank_page(each, page_bytes) for each in prompt]))
        assert server.metrics()['unified_cache_service_store_evictions_total{cause="room"}'] > 0
        assert "store_put" not in server.kinds


def test_what_a_service_has_no_room_for_is_counted(kind: StoreKind, tmp_path: Path) -> None:
    page = sealed_page(Label(SERVED.digest(SERVED_LAYOUT), sha256().digest(), "kv"), HEADER_BYTES + 8192)
    with (
        small_disk(tmp_path / "disk", 4 * MIB) as disk,
        running(storage=f"{kind.value}:{disk}/store?free=4MB") as server,
        closing(open_storage(f"grpc://{server.address}")) as storage,
    ):
        take_the_rest(disk / "others", left_bytes=MIB)
        storage.register(manifest_of(SERVED, SERVED_LAYOUT), {})
        assert storage.put([page], Level.CACHED) == [Answer.DECLINED]
        assert server.metrics()['unified_cache_service_put_pages_total{pool="other",result="declined"}'] == 1


def test_an_engine_is_told_why_its_pages_are_declined(kind: StoreKind, disk: Path) -> None:
    with EngineStore.open(f"{kind.value}:{disk / 'store'}?free=8MiB") as store:
        take_the_rest(disk / "others", left_bytes=MIB)
        store.register(MODEL, LAYOUT)
        page = EnginePage(label(0), (memoryview(bytearray(PAGE_BYTES - HEADER_BYTES)),))
        assert store.put([page]) == [Answer.DECLINED]
        assert "8.0 MiB" in store.counts().last_error


def test_what_failed_on_a_full_disk_is_tried_again_after_the_shortest_pause_each_time() -> None:
    retries = Retries("registering", Backoff(1.0, 30.0), ManualClock())
    assert {retries.record_failure(StorageFullError("full")) for _ in range(20)} == {1.0}


class QuotaDisk(Disk):
    """A file system with a quota of which it says nothing until a write exceeds it. A directory takes a block of it."""

    def __init__(self, root: Path, bytes_max: int) -> None:
        self._root = root
        self._bytes_max = bytes_max

    def mkdir(
        self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes], mode: int = 0o777, *, dir_fd: int | None = None
    ) -> None:
        self._take(FILE_BYTES)
        os.mkdir(path, mode, dir_fd=dir_fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset >= os.fstat(fd).st_size or not self.has_data(fd, offset, offset + 1):
            self._take(sum(buffer.nbytes for buffer in buffers))
        return os.pwritev(fd, buffers, offset)

    def _take(self, new_bytes: int) -> None:
        used_bytes = sum(path.stat().st_blocks * 512 for path in self._root.rglob("*") if path.is_file())
        if used_bytes + new_bytes > self._bytes_max:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_put_in_which_any_one_call_finds_no_room_stores_all_the_same_and_loses_no_slot(
    kind: StoreKind, memory_path: Path
) -> None:
    for number in range(200):
        root = memory_path / str(number)
        with closing(kind.open(root, free_bytes_min=0, disk=FaultyDisk())) as storage:
            assert all(put(storage, range(3), Level.DURABLE))
        disk = FaultyDisk(DiskFault.ENOSPC)
        with closing(kind.open(root, free_bytes_min=0, disk=disk)) as storage:
            first = len(disk.calls) + number
            disk.failing = range(first, first + 1)
            stored = put(storage, range(3, 8), Level.DURABLE)
            is_over = len(disk.calls) < first
            disk.failing = range(0)
            assert stored == [True] * 5
            assert hits(storage, range(3, 8)) == stored
            assert storage.bytes_used == kind.taken_bytes() * len(held(storage, 8))
        with closing(kind.open(root)) as storage:
            assert hits(storage, range(3, 8)) == stored
        if is_over:
            return
    raise AssertionError("the put makes more calls than were tried")


def test_a_quota_of_the_file_system_evicts_as_a_full_disk_does(kind: StoreKind, memory_path: Path) -> None:
    root = memory_path / "store"
    with closing(kind.open(root, free_bytes_min=0, disk=QuotaDisk(root, 2 * MIB))) as storage:
        assert set(put_prompts(storage, range(20))) == {Answer.STORED}
        assert whole_prompts(storage, range(18, 20)) == [18, 19]
        assert held(storage, 1) == []


@pytest.mark.parametrize("object_bytes", [PAGE_BYTES, LARGE_BYTES])
def test_a_store_without_room_for_a_process_to_enter_it_makes_some_and_is_opened(
    object_bytes: int, kind: StoreKind, memory_path: Path
) -> None:
    root = memory_path / "store"
    with closing(kind.open(root, free_bytes_min=0)) as storage:
        for number in range(120):
            assert all(storage.put([sealed_page(label(number), object_bytes)], Level.CACHED))
    used_bytes = sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())
    with closing(kind.open(root, free_bytes_min=0, disk=QuotaDisk(root, used_bytes))) as storage:
        there = held(storage, 120)
        assert there == list(range(120 - len(there), 120)), "the least recent have gone"
        assert len(there) >= 40
        assert all(storage.put([sealed_page(label(number), object_bytes) for number in range(120, 130)], Level.DURABLE))


def test_pages_that_could_not_be_written_take_no_room_of_those_that_are_there(kind: StoreKind, tmp_path: Path) -> None:
    disk = FaultyDisk(DiskFault.EIO, only="pwritev")
    with closing(kind.open(tmp_path / "store", bytes_max=24 * FILE_BYTES, free_bytes_min=0, disk=disk)) as storage:
        assert all(put(storage, range(10)))
        disk.failing = range(len(disk.calls), 1 << 20)
        with pytest.raises(StorageError):
            put(storage, range(10, 20))
        disk.failing = range(0)
        assert all(put(storage, range(20, 30)))
        assert held(storage, 30) == [*range(10), *range(20, 30)]
