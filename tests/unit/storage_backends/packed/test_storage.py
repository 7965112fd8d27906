"""Promises of the packed store alone: slots, times of use in tables, calls on the disk, one opener, threads."""

import errno
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import DiskFault, FaultyDisk, descriptors, held, hits, put, refuses
from tests.unit.storage_backends.packed.conftest import SLOT_BYTES, TAKEN_BYTES, opened, packs
from unified_cache.core.errors import InputError, StorageError
from unified_cache.core.seal import Label, verify_buffers
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.packed.segment import taken_bytes
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, bytes_of, label, listing, sealed_page

# Calls on the disk


def test_exists_makes_no_call_on_the_disk_and_a_read_makes_one(root: Path) -> None:
    disk = FaultyDisk()
    with closing(opened(root, disk=disk, pages_max=10)) as storage:
        put(storage, range(9))
        disk.calls.clear()
        assert held(storage, 12) == list(range(9))
        assert hits(storage, [11]) == [False]
        assert disk.calls == []
        assert hits(storage, [3]) == [True]
        assert storage.get([blank_page(label(4), cuts=(1, 2, 900))]) == [Answer.HIT]
        assert disk.calls == ["preadv"] * 2
        disk.calls.clear()
        put(storage, [9], Level.CACHED)
        assert disk.calls == ["fstatvfs", "pwritev", "pwritev"]
        disk.calls.clear()
        put(storage, [10, 3], Level.DURABLE)
        # Page 3 is there, and read.
        assert disk.calls == [
            "preadv",
            "pwritev",
            "fstatvfs",
            "pwritev",
            "fdatasync",
            "fstat",
            "pwritev",
            "fdatasync",
            "fstat",
        ]


# Who may open it


def test_a_second_opener_is_refused_and_harms_nobody(root: Path) -> None:
    storage = opened(root)
    put(storage, range(5))
    before = descriptors(root)
    with pytest.raises(StorageError, match=f"{root} must be open once at a time") as raised:
        opened(root)
    assert raised.value.retryable
    assert descriptors(root) == before
    assert put(storage, [5], Level.DURABLE) == [True]
    assert hits(storage, range(6)) == [True] * 6
    storage.close()
    with closing(opened(root)) as storage:
        assert hits(storage, range(6)) == [True] * 6


def test_what_names_no_object_costs_no_slot(root: Path) -> None:
    nameless = PageIO(Label(b"short", bytes(32), "kv"), (memoryview(bytearray(10)),))
    with closing(opened(root)) as storage:
        put(storage, [1])
        with pytest.raises(InputError):
            storage.get([blank_page(label(1), 7), nameless])
        with pytest.raises(InputError):
            storage.put([nameless], Level.CACHED)
        storage.remove([label(1)])
    assert packs(root) == []


# Threads


def test_every_page_that_a_thread_gets_is_whole_and_no_slot_is_lost(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.packed.segments.IDLE_BYTES_MAX", 3 * SLOT_BYTES)
    storage = opened(root, pages_max=8)

    def use(seed: int) -> int:
        choice = random.Random(seed)
        hits_count = 0
        for turn in range(150):
            batch = [label(number) for number in choice.sample(range(12), 3)]
            stored = storage.put([sealed_page(named, salt=seed) for named in batch], choice.choice(list(Level)))
            assert len(stored) == 3
            found = [blank_page(named, cuts=(100, 600)) for named in batch]
            for page, hit in zip(found, storage.get(found), strict=True):
                assert not hit or verify_buffers(page.buffers, page.label) is None
                hits_count += bool(hit)
            storage.remove([choice.choice(batch)])
            if turn % 10 == 0:
                storage.put([sealed_page(choice.choice(batch), 3000)], Level.CACHED)
            assert storage.bytes_used <= 8 * TAKEN_BYTES
        return hits_count

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(use, range(6))) > 0
    sys.setswitchinterval(interval_s)
    assert storage.bytes_used == sum(taken_bytes(each.object_bytes) for each in listing(storage, label(0).identity))
    storage.remove([label(number) for number in range(12)])
    assert storage.bytes_used == 0
    storage.close()
    assert packs(root) == []


# Calls of the packed store that meet: another call comes in the middle of one, at a call on the disk


OTHER = "other"
"""A pool of its own, and so files of its own."""


class MeetingDisk(Disk):
    """A disk on which something happens behind one sync of a file's bytes."""

    def __init__(self) -> None:
        self.syncs: list[int] = []
        self.meetings: dict[int, Callable[[], object]] = {}
        """What happens behind the sync of that number, from 1 on."""

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Let what is to happen happen."""
        self.syncs.append(os.fstat(fd).st_ino)
        self.meetings.pop(len(self.syncs), lambda: None)()


@pytest.fixture
def meeting() -> MeetingDisk:
    return MeetingDisk()


@pytest.fixture
def met(meeting: MeetingDisk, root: Path) -> Iterator[PackedStorage]:
    with closing(opened(root, disk=meeting)) as storage:
        yield storage


def test_a_durable_page_that_another_put_was_first_to_store_cached_is_synced_all_the_same(
    meeting: MeetingDisk, met: PackedStorage
) -> None:
    meeting.meetings[2] = lambda: put(met, [1], Level.CACHED)
    assert put(met, [1], Level.DURABLE) == [True]
    assert len(meeting.syncs) == 3  # pages, entries, and the page of the other put


def test_a_put_at_another_length_that_comes_between_is_what_is_stored(meeting: MeetingDisk, met: PackedStorage) -> None:
    longer = sealed_page(label(1), 2 * PAGE_BYTES)
    meeting.meetings[2] = lambda: met.put([longer], Level.CACHED)
    assert put(met, [1], Level.DURABLE) == [False]
    found = blank_page(label(1), 2 * PAGE_BYTES)
    assert met.get([found]) == [Answer.HIT]
    assert bytes_of(found) == bytes_of(longer)
    assert met.bytes_used == taken_bytes(2 * PAGE_BYTES)


@pytest.mark.parametrize("syncs_count", [0, 1])
def test_a_durable_put_does_not_mind_that_a_page_which_was_there_goes_meanwhile_with_its_file(
    syncs_count: int, meeting: MeetingDisk, met: PackedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, longer = label(2)._replace(pool=OTHER), sealed_page(label(3), 2 * PAGE_BYTES)
    met.put([sealed_page(there), longer], Level.CACHED)
    monkeypatch.setattr(met._segments, "_idle_bytes_max", 0)
    (segment,) = [each for each in met._segments.of_identity(there.identity) if each.key.pool == OTHER]

    def remove() -> None:
        met.remove([there])
        for _ in range(syncs_count):  # of another put, which comes first
            with pytest.raises(FileNotFoundError):
                segment.sync()

    meeting.meetings[3] = remove
    assert met.put([sealed_page(label(1)), longer, sealed_page(there)], Level.DURABLE)[:2] == [Answer.STORED] * 2
    assert met.exists([label(1), there]) == [Answer.HIT, Answer.MISS]


def test_a_clear_does_not_mind_that_a_page_put_meanwhile_goes_again_with_its_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = label(2)._replace(pool=OTHER)
    steps: dict[str, Callable[[], object]] = {}
    disk = FaultyDisk(
        before={name: lambda *_, name=name, **__: steps.pop(name, bool)() for name in ("pwritev", "unlink")}
    )
    with closing(opened(root, disk=disk)) as storage:
        put(storage, [1])

        def remove() -> None:
            monkeypatch.setattr(storage._segments, "_idle_bytes_max", 0)
            storage.remove([other])

        steps |= {"pwritev": lambda: storage.put([sealed_page(other)], Level.CACHED), "unlink": remove}
        assert storage.clear(label(1).identity) == 1
        assert not steps
        assert storage.exists([label(1), other]) == [Answer.MISS] * 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_durable_put_fails_where_somebody_removed_the_file_under_it_and_the_next_one_makes_another(
    number: int, root: Path
) -> None:
    with closing(opened(root)) as storage:
        put(storage, [1])
        for path in root.rglob("*.pack"):
            path.unlink()
        with pytest.raises(StorageError, match="ENOENT"):
            put(storage, [number], Level.DURABLE)
        assert put(storage, [1, 2], Level.DURABLE) == [True, True]
    with closing(opened(root)) as storage:
        assert storage.exists([label(1), label(2)]) == [Answer.HIT, Answer.HIT]


@pytest.mark.parametrize(
    "remove",
    [
        lambda storage: storage.remove([label(number) for number in range(3)]),
        lambda storage: storage.clear(label(0).identity),
    ],
    ids=["remove", "clear"],
)
def test_a_page_that_is_unreadable_again_and_again_leaves_nothing_behind_when_it_is_removed(
    remove: Callable[[PackedStorage], int], root: Path
) -> None:
    disk = FaultyDisk(DiskFault.EIO, only="preadv")
    with closing(opened(root, disk=disk)) as storage:
        for _ in range(3):
            put(storage, range(3))
            disk.failing = range(1 << 30)
            assert storage.get([blank_page(label(1))]) == [Answer.UNAVAILABLE]
            disk.failing = range(0)
        assert remove(storage) == 3
    with closing(opened(root)) as storage:
        assert storage.exists([label(number) for number in range(3)]) == [Answer.MISS] * 3
        assert storage.bytes_used == 0


def test_a_file_whose_name_could_not_be_made_to_stay_does_not_stay(root: Path) -> None:
    opened(root).close()
    disk = FaultyDisk(DiskFault.EIO, only="fsync")
    with closing(opened(root, disk=disk)) as storage:
        disk.failing = range(1 << 30)
        for number in range(5):
            with pytest.raises(StorageError, match="EIO"):
                put(storage, [number])
        disk.failing = range(0)
        assert list(root.rglob("*.pack")) == []
        assert put(storage, [1]) == [True]
        assert [path.name for path in root.rglob("*.pack")] == [f"kv.{PAGE_BYTES}.1.pack"]


def test_a_store_that_was_closed_can_be_opened_while_a_child_of_its_process_lives(root: Path) -> None:
    storage = opened(root)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        storage.close()
        with closing(opened(root)) as again:
            assert put(again, [1]) == [True]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_way_that_cannot_be_synced_is_no_reason_to_refuse_a_new_store(root: Path) -> None:
    def refuse(fd: int) -> None:
        """Refuse for the directory that leads to the store, as one of another kind of file system does."""
        if os.fstat(fd).st_ino == root.parent.stat().st_ino:
            refuses(errno.EINVAL)()

    with closing(opened(root, disk=FaultyDisk(before={"fsync": refuse}))) as storage:
        assert put(storage, [1], Level.DURABLE) == [True]
