"""A packed store whose files rot, shrink or change places, and on whose disk calls fail: never a wrong page."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.support.files import INTRUDERS, DiskFault, FaultyDisk, descriptors, flip, hits, link, pipe, put, refuses
from tests.unit.storage_backends.packed.conftest import SLOT_BYTES, TAKEN_BYTES, opened, slots
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Flaw
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, bytes_of, label, listing, sealed_page

ENTRY_BYTES = 48
STAMP_BITS = 64
PAGES_OFFSET = 4096
NAME = f"kv.{PAGE_BYTES}.1.pack"
PAYLOAD_BITS = 200
PAGES = range(3)


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make files of eight slots, whose tables are read fast."""
    monkeypatch.setattr("unified_cache.storage_backends.packed.segment.SLOTS_MAX", 8)


@pytest.fixture
def root(memory_path: Path) -> Path:
    root = memory_path / "store"
    with closing(opened(root)) as storage:
        put(storage, PAGES)
    return root


@pytest.fixture
def pack(root: Path) -> Path:
    return root / label(0).identity.hex() / NAME


def check_recovery(root: Path, expected: Sequence[bool] | None = None) -> None:
    """Check that what was done to the store costs no more than misses, and keeps no page from being stored again."""
    with closing(VerifiedStorage(opened(root))) as storage:
        found = hits(storage, PAGES)
        assert expected is None or found == expected
        assert put(storage, PAGES, Level.DURABLE) == [True] * 3
        assert hits(storage, PAGES) == [True] * 3
    with closing(VerifiedStorage(opened(root))) as storage:
        assert hits(storage, PAGES) == [True] * 3


def restore(pack: Path, content: bytes) -> None:
    """Make this the only file."""
    for path in pack.parent.glob("*.pack"):
        path.unlink()
    pack.write_bytes(content)


# Bits


def test_every_bit_of_an_entry_counts_but_those_of_its_time(root: Path, pack: Path) -> None:
    sound = pack.read_bytes()
    for bit in range(ENTRY_BYTES * 8):
        restore(pack, sound)
        flip(pack, ENTRY_BYTES * 8 + bit)
        check_recovery(root, [True, bit >= ENTRY_BYTES * 8 - STAMP_BITS, True])


@pytest.mark.parametrize("stamp", [0, (1 << 64) - 1, (1 << 64) - 5, 1 << 63])
def test_a_time_of_use_that_cannot_be_costs_order_alone(stamp: int, root: Path, pack: Path) -> None:
    with pack.open("r+b") as file:
        file.seek(2 * ENTRY_BYTES - 8)
        file.write(stamp.to_bytes(8, "little"))
    check_recovery(root, [True] * 3)
    with closing(opened(root)) as storage:
        assert put(storage, [3]) == [True]


def test_a_flipped_bit_of_a_page_is_a_miss_and_the_page_can_be_put_again(root: Path, pack: Path) -> None:
    choice = random.Random(7)
    with closing(VerifiedStorage(opened(root))) as storage:
        for bit in choice.sample(range(PAGE_BYTES * 8), PAYLOAD_BITS):
            flip(pack, (PAGES_OFFSET + SLOT_BYTES) * 8 + bit)
            assert hits(storage, PAGES) == [True, False, True], bit
            assert put(storage, [1]) == [True]
            assert hits(storage, PAGES) == [True] * 3
        assert sum(storage.flaws_count.values()) == PAYLOAD_BITS


@pytest.mark.parametrize("block", [b"\0", b"\xff", b"\x5a"])
def test_a_table_of_garbage_is_one_without_pages(block: bytes, root: Path, pack: Path) -> None:
    with pack.open("r+b") as file:
        file.write(block * PAGES_OFFSET)
    check_recovery(root, [False] * 3)


# Lengths


def test_a_file_cut_anywhere_loses_what_is_beyond_and_nothing_else(root: Path, pack: Path) -> None:
    sound = pack.read_bytes()
    for cut in [*range(0, PAGES_OFFSET, 24), *range(PAGES_OFFSET, len(sound), 131), len(sound) - 1]:
        restore(pack, sound[:cut])
        whole_count = max(cut - PAGES_OFFSET + SLOT_BYTES - PAGE_BYTES, 0) // SLOT_BYTES
        check_recovery(root, [number < whole_count for number in PAGES])


def test_a_file_cut_and_filled_with_zeros_is_never_a_wrong_page(root: Path, pack: Path) -> None:
    sound = pack.read_bytes()
    for cut in range(0, len(sound), 131):
        restore(pack, sound[:cut] + bytes(len(sound) - cut))
        check_recovery(root)


def test_pages_beyond_the_end_of_a_file_cut_under_an_open_store_are_flawed_and_can_be_put_again(
    root: Path, pack: Path
) -> None:
    with closing(opened(root)) as storage:
        os.truncate(pack, PAGES_OFFSET + SLOT_BYTES + 5)
        assert storage.get([blank_page(label(number)) for number in PAGES]) == [Answer.HIT, *[Answer.FLAWED] * 2]
        assert storage.exists([label(number) for number in PAGES]) == [Answer.HIT, *[Answer.MISS] * 2]
        assert storage.bytes_used == TAKEN_BYTES
        assert put(storage, PAGES) == [True] * 3
        assert hits(storage, PAGES) == [True] * 3
    check_recovery(root, [True] * 3)


# Names


def test_files_that_changed_places_are_misses_and_can_be_put_again(root: Path, pack: Path) -> None:
    with closing(opened(root)) as storage:
        storage.put([sealed_page(label(number, "other")) for number in PAGES], Level.CACHED)
    other = pack.with_name(pack.name.replace("kv", "other"))
    for _ in range(2):
        pack.rename(root / "aside")
        other.rename(pack)
        (root / "aside").rename(other)
        with closing(VerifiedStorage(opened(root))) as storage:
            found = [blank_page(label(number, pool)) for number in PAGES for pool in ("kv", "other")]
            assert storage.get(found) == [Answer.FLAWED] * 6
            assert storage.flaws_count == {Flaw.FOREIGN: 6}
            for page in found:
                assert storage.put([sealed_page(page.label)], Level.CACHED) == [Answer.STORED]
            assert storage.get(found) == [Answer.HIT] * 6
            assert list(map(bytes_of, found)) == [bytes_of(sealed_page(page.label)) for page in found]
            assert len(list(listing(storage, label(0).identity))) == 6


@pytest.mark.parametrize("number", [2, 7, 999_999_999])
def test_a_file_under_another_number_is_the_same_file(number: int, root: Path, pack: Path) -> None:
    pack.rename(pack.with_name(f"kv.{PAGE_BYTES}.{number}.pack"))
    check_recovery(root, [True] * 3)
    with closing(opened(root)) as storage:
        put(storage, range(20), Level.DURABLE)
    with closing(opened(root)) as storage:
        assert hits(storage, range(20)) == [True] * 20


@pytest.mark.parametrize(
    "name",
    [
        f"other.{PAGE_BYTES}.1.pack",
        *(f"kv.{length}.1.pack" for length in (0, 1, PAGE_BYTES - 1, PAGE_BYTES + 1, 32_768, 10**15 - 1)),
    ],
)
def test_a_file_under_the_name_of_another_pool_or_length_is_never_a_wrong_page(
    name: str, root: Path, pack: Path
) -> None:
    pack.rename(pack.with_name(name))
    with closing(VerifiedStorage(opened(root))) as storage:
        for each in list(listing(storage, label(0).identity)):
            page = blank_page(each.label, each.object_bytes)
            assert storage.get([page]) == [Answer.FLAWED]
    check_recovery(root, [False] * 3)


def test_a_copy_of_a_file_brings_no_page_back_that_was_removed(root: Path, pack: Path) -> None:
    shutil.copy(pack, pack.with_name(f"kv.{PAGE_BYTES}.5.pack"))
    with closing(opened(root)) as storage:
        assert storage.bytes_used == 3 * TAKEN_BYTES
        assert hits(storage, PAGES) == [True] * 3
        storage.remove([label(1)])
    with closing(opened(root)) as storage:
        assert hits(storage, PAGES) == [True, False, True]


@pytest.mark.parametrize(
    "name",
    [
        *(f"kv.{PAGE_BYTES}.01.pack", f"kv.0{PAGE_BYTES}.1.pack", f"KV.{PAGE_BYTES}.1.pack", f".{PAGE_BYTES}.1.pack"),
        *(f"kv.{PAGE_BYTES}.pack", f"kv.{PAGE_BYTES}.1.pack.bak", "kv.-1.1.pack", "kv.1.x.pack", "README", "0"),
    ],
)
def test_a_name_that_the_store_does_not_give_is_left_alone(name: str, root: Path, pack: Path) -> None:
    stranger = pack.with_name(name)
    shutil.copy(pack, stranger)
    sound = stranger.read_bytes()
    (root / "zz").mkdir()
    (root / "zz" / NAME).touch()
    check_recovery(root, [True] * 3)
    with closing(opened(root)) as storage:
        storage.remove([label(number) for number in PAGES])
    assert stranger.read_bytes() == sound
    assert (root / "zz" / NAME).exists()


@pytest.mark.parametrize("make", [lambda path, _: path.touch(), link, pipe])
def test_what_is_called_like_an_identity_and_is_no_directory_is_left_alone(
    make: Callable[[Path, Path], None], root: Path
) -> None:
    make(root / ("ab" * 32), root.parent)
    check_recovery(root, [True] * 3)
    assert os.path.lexists(root / ("ab" * 32))


@pytest.mark.parametrize("number", [1, 999_999_999])
@pytest.mark.parametrize("make", INTRUDERS)
def test_an_intruder_in_the_place_of_a_file_is_cleared_away(
    make: Callable[[Path, Path], None], number: int, root: Path, pack: Path
) -> None:
    bystander = root.parent / "bystander"
    sound = pack.read_bytes()
    pack.rename(bystander)
    pack = pack.with_name(f"kv.{PAGE_BYTES}.{number}.pack")
    make(pack, bystander)
    with closing(opened(root)) as storage:
        assert storage.counts.foreign_count == 1
        assert not os.path.lexists(pack)
        assert put(storage, PAGES) == [True] * 3
    check_recovery(root, [True] * 3)
    assert bystander.read_bytes() == sound


# Calls that fail


def test_an_object_that_cannot_be_read_is_a_miss_and_its_slot_is_used_no_more_before_a_restart(
    root: Path, pack: Path
) -> None:
    disk = FaultyDisk(DiskFault.EIO, only="preadv")
    with closing(opened(root, disk)) as storage:
        disk.failing = range(len(disk.calls) + 1, len(disk.calls) + 2)
        assert hits(storage, PAGES) == [True, False, True]
        assert storage.bytes_used == 2 * TAKEN_BYTES
        assert storage.exists([label(1)]) == [Answer.MISS]
        put(storage, range(1, 12))
        assert hits(storage, range(12)) == [True] * 12
        assert (1, 1) not in slots(storage, range(12))
        storage.remove([label(number) for number in range(12)])
    assert pack.exists()
    with closing(opened(root)) as storage:
        put(storage, [1])
        assert slots(storage, [1]) == [(1, 0)]
        storage.remove([label(1)])
    assert not pack.exists()


def test_a_slot_that_became_another_page_while_its_page_could_not_be_read_stays_that_page(root: Path) -> None:
    def refuse_late(_fd: int, _buffers: object, offset: int) -> None:
        if offset == PAGES_OFFSET + SLOT_BYTES:
            storage.remove([label(1)])
            assert put(storage, [9], Level.DURABLE) == [True]
            refuses(errno.EIO)()

    with closing(opened(root, FaultyDisk(before={"preadv": refuse_late}))) as storage:
        assert hits(storage, PAGES) == [True, False, True]
        assert storage.exists([label(9)]) == [Answer.HIT]
    with closing(opened(root)) as storage:
        assert hits(storage, [0, 1, 2, 9]) == [True, False, True, True]


@pytest.mark.parametrize("faults_count", [1, 2])
def test_a_clear_takes_out_what_an_earlier_removal_could_not_or_says_that_it_cannot(
    faults_count: int, root: Path
) -> None:
    disk = FaultyDisk(only="pwritev")
    with closing(opened(root, disk)) as storage:
        disk.failing = range(len(disk.calls), len(disk.calls) + faults_count)
        with pytest.raises(StorageError):
            storage.remove([label(1)])
        if faults_count == 2:
            with pytest.raises(StorageError):
                storage.clear(label(1).identity)
        assert storage.clear(label(1).identity) >= 0
    with closing(opened(root)) as storage:
        assert hits(storage, PAGES) == [False] * 3


def test_of_two_clears_the_later_removes_no_file_that_a_put_has_made_meanwhile(root: Path) -> None:
    steps: list[Callable[[], object]] = []
    hooks = {"unlink": lambda *_, **__: steps.pop()() if steps else None, "preadv": refuses(errno.EIO)}
    disk = FaultyDisk(before=hooks)
    with closing(opened(root, disk)) as storage:
        disk.before["preadv"] = bool

        def clear_and_put() -> None:
            storage.clear(label(1).identity)
            assert put(storage, [2], Level.DURABLE) == [True]

        steps.append(clear_and_put)
        storage.clear(label(1).identity)
        assert put(storage, [3]) == [True]
    with closing(opened(root)) as storage:
        assert hits(storage, range(4)) == [False, False, True, True]


def test_a_fault_that_is_not_the_objects_is_raised_and_loses_nothing(root: Path) -> None:
    disk = FaultyDisk(DiskFault.EMFILE, only="preadv")
    with closing(opened(root, disk)) as storage:
        disk.failing = range(len(disk.calls) + 1, len(disk.calls) + 2)
        with pytest.raises(StorageError, match=r"cannot read .*Too many open files \(EMFILE\)") as raised:
            hits(storage, PAGES)
        assert raised.value.retryable
        assert hits(storage, PAGES) == [True] * 3


@pytest.mark.parametrize("fault", [DiskFault.EIO, DiskFault.EMFILE])
def test_a_put_in_which_any_one_call_fails_leaves_nothing_of_its_batch_and_loses_no_slot(
    fault: DiskFault, root: Path
) -> None:
    batch = range(3, 14)  # in two files, one of them new
    failed_count = 0
    for number in range(100):
        disk = FaultyDisk(fault)
        with closing(opened(root, disk)) as storage:
            at = len(disk.calls) + number
            disk.failing = {at}
            try:
                put(storage, batch, Level.DURABLE)
            except StorageError:
                failed_count += 1
                assert hits(storage, range(14)) == [True] * 3 + [False] * 11
                assert storage.bytes_used == 3 * TAKEN_BYTES
            is_over = len(disk.calls) < at
            disk.failing = range(0)
            assert put(storage, batch) == [True] * 11
            assert hits(storage, range(14)) == [True] * 14
            storage.remove([label(each) for each in batch])
            assert set(slots(storage, range(14))) == {(1, 0), (1, 1), (1, 2)}
            assert sum(len(free._idle) for free in storage._segments._free.values()) == 11
        assert descriptors(root) == []
        with closing(opened(root)) as storage:
            assert hits(storage, range(14)) == [True] * 3 + [False] * 11
        assert len(list(root.rglob("*.pack"))) == 1
        if is_over:
            break
    assert failed_count >= 11 + 2 + 2


def test_a_disk_that_takes_no_write_for_a_while_loses_no_page_and_no_later_put(root: Path) -> None:
    disk = FaultyDisk(DiskFault.EIO, only="pwritev")
    with closing(opened(root, disk)) as storage:
        disk.failing = range(1 << 30)
        with pytest.raises(StorageError, match="cannot store pages in"):
            put(storage, [3, 4])
        assert hits(storage, PAGES) == [True] * 3
        with pytest.raises(StorageError, match="cannot remove objects from"):
            storage.remove([label(1), label(4)])
        assert hits(storage, PAGES) == [True, False, True]
        assert storage.get([blank_page(label(2), 7)]) == [Answer.FLAWED]
        disk.failing = range(0)
        assert put(storage, [5, 6, 7]) == [True] * 3
        assert hits(storage, [0, 5, 6, 7]) == [True] * 4
    with closing(VerifiedStorage(opened(root))) as storage:
        assert hits(storage, [0, 5, 6, 7]) == [True] * 4
        # They could not be removed, as was said; nobody got their slots, so they are what they were.
        assert hits(storage, [1, 2]) == [True] * 2
    check_recovery(root)


def test_a_store_that_cannot_be_read_is_not_opened_and_not_harmed(root: Path) -> None:
    right = FaultyDisk()
    opened(root, right).close()
    for number in range(len(right.calls)):
        for fault in (DiskFault.EIO, DiskFault.EMFILE):
            with suppress(StorageError):
                opened(root, FaultyDisk(fault, range(number, number + 1))).close()
            assert descriptors(root) == []
            with closing(opened(root)) as storage:
                assert hits(storage, PAGES) == [True] * 3, (number, right.calls[number])


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_table_that_cannot_be_read_costs_its_file_alone_until_the_store_is_opened_again(
    call: str, root: Path, pack: Path
) -> None:
    with closing(opened(root)) as storage:
        put(storage, range(3, 20))  # in two more files
    first = pack.stat()

    def refuse(place: str | int, *_given: object, **_named: object) -> None:
        """Refuse the first file, by its name or an open descriptor."""
        if str(place).endswith(f"/{pack.name}") or (isinstance(place, int) and os.fstat(place).st_ino == first.st_ino):
            refuses(errno.EIO)()

    bad = FaultyDisk(before={call: refuse})
    with closing(opened(root, bad)) as storage:
        assert hits(storage, range(20)) == [False] * 8 + [True] * 12
        assert put(storage, [0, 30], Level.DURABLE) == [True, True]
        assert hits(storage, [0, 30]) == [True, True]
    with closing(opened(root)) as storage:
        assert hits(storage, [*range(20), 30]) == [True] * 21
        assert storage.bytes_used == 21 * TAKEN_BYTES
    with closing(opened(root, bad)) as storage:
        storage.clear(label(0).identity)
    with closing(opened(root)) as storage:
        assert hits(storage, range(20)) == [False] * 20


def test_a_store_is_closed_whatever_fails(root: Path) -> None:
    disk = FaultyDisk(DiskFault.EIO)
    storage = opened(root, disk)
    hits(storage, PAGES)
    storage.put([PageIO(label(5), (memoryview(b"short"),))], Level.CACHED)
    storage.remove([label(1), label(5)])
    disk.failing = range(1 << 30)
    storage.close()
    assert descriptors(root) == []
    with closing(opened(root)) as storage:
        assert hits(storage, PAGES) == [True, False, True]
