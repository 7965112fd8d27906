"""Several stores on one directory: one cap, one order of use, one journal, whoever lives or dies."""

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event

import pytest

from tests.support.budget import examples
from tests.support.files import FaultyDisk, bytes_in, held, object_paths, path_of, put
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.stamps import STAMP_GRAIN_NS
from unified_cache.storage_backends.file.journal import FILE_BYTES_MAX, FILES_BEHIND_MAX, Journal, JournalLine
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, bytes_of, label, sealed_page

SHARER = """
import random, sys
from contextlib import closing
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

root, seed, bytes_max, steps_count = sys.argv[1], *map(int, sys.argv[2:])
choice = random.Random(seed)
hits_count = 0
with closing(FileStorage.open(root, bytes_max=bytes_max)) as storage:
    for _ in range(steps_count):
        numbers = choice.sample(range(120), 4)
        level = choice.choice(list(Level))
        assert all(storage.put([sealed_page(label(number)) for number in numbers], level))
        found = [blank_page(label(number)) for number in choice.sample(range(120), 4) + numbers]
        for page, hit in zip(found, storage.get(found)):
            assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label)), page.label
            hits_count += bool(hit)
        if choice.random() < 0.1:
            storage.remove([label(choice.randrange(120))])
    assert storage.counts.unrecorded_count == 0
print(hits_count)
"""


@pytest.fixture
def clock() -> Callable[[], int]:
    """One clock for all stores; each call is later than the one before by more than the grain of a stamp."""
    return itertools.count(2 * STAMP_GRAIN_NS, 2 * STAMP_GRAIN_NS).__next__


@pytest.fixture
def two(root: Path, clock: Callable[[], int]) -> Iterator[Sequence[FileStorage]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(FileStorage.open(root, bytes_max=6 * PAGE_BYTES, clock=clock)))
            for _ in range(2)
        ]


# One cap


def test_the_cap_binds_all_processes_together(two: Sequence[FileStorage], root: Path) -> None:
    mine, theirs = two
    for number in range(40):
        assert put((mine, theirs)[number % 2], [number]) == [True]
        assert bytes_in(root) == mine.bytes_used == theirs.bytes_used <= 6 * PAGE_BYTES
    assert held(mine, 40) == list(range(34, 40))


def test_a_page_that_another_process_used_is_evicted_after_one_that_nobody_used(two: Sequence[FileStorage]) -> None:
    mine, theirs = two
    put(mine, [0, 1, 2])
    put(mine, [3, 4, 5])
    assert theirs.get([blank_page(label(0))]) == [Answer.HIT]
    assert put(theirs, [1]) == [True]
    put(mine, [6, 7, 8])
    assert held(mine, 9) == [0, 1, 3, 6, 7, 8]


def test_a_page_that_another_process_stored_can_be_touched_before_it_was_met(two: Sequence[FileStorage]) -> None:
    mine, theirs = two
    put(mine, [0, 1, 2])
    put(mine, [3, 4, 5])
    theirs.touch([label(0), label(77)])
    assert theirs.bytes_used == mine.bytes_used == 6 * PAGE_BYTES
    put(mine, [6, 7, 8])
    assert held(mine, 78) == [0, 3, 4, 6, 7, 8]


def test_a_process_without_a_cap_is_counted_by_one_with_a_cap(root: Path) -> None:
    with closing(FileStorage.open(root)) as free, closing(FileStorage.open(root, bytes_max=4 * PAGE_BYTES)) as capped:
        put(free, range(10))
        assert bytes_in(root) == 10 * PAGE_BYTES == capped.bytes_used
        assert put(capped, [10]) == [True]
        assert bytes_in(root) == 4 * PAGE_BYTES == free.bytes_used


def test_a_page_without_room_because_of_what_others_keep_is_stored_in_its_place(two: Sequence[FileStorage]) -> None:
    mine, theirs = two
    put(theirs, range(6))
    assert put(mine, range(6, 12)) == [True] * 6
    assert held(theirs, 12) == list(range(6, 12))
    assert theirs.get([blank_page(label(0)), blank_page(label(6))]) == [Answer.MISS, Answer.HIT]


def test_a_store_that_opens_while_another_is_busy_counts_what_that_one_has_begun(root: Path) -> None:
    opened: list[FileStorage] = []

    class OpensAnotherStore(Disk):
        """Lets somebody else open the store when the first draft is to be renamed."""

        def rename(  # type: ignore[override]
            self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int
        ) -> None:
            if not opened and target != "store.json":
                opened.append(FileStorage.open(root))
            os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    with closing(FileStorage.open(root, disk=OpensAnotherStore())) as storage:
        put(storage, range(5))
        with closing(opened[0]) as other:
            assert other.bytes_used == storage.bytes_used == bytes_in(root) == 5 * PAGE_BYTES


def test_a_page_granted_room_by_a_writer_that_died_is_counted_until_it_is_to_be_evicted_or_the_store_is_opened_alone(
    root: Path,
) -> None:
    class Death(BaseException): ...

    class Deadly(Disk):
        def rename(  # type: ignore[override]
            self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int
        ) -> None:
            raise Death

        def write(self, fd: int, content: bytes) -> int:  # type: ignore[override]
            if content[:2] == b"\n-":
                raise OSError(5, "dead")  # it takes nothing back either
            return os.write(fd, content)

    put_by_dead = FileStorage.open(root)
    put_by_dead.close()
    with closing(FileStorage.open(root, bytes_max=3 * PAGE_BYTES)) as living:
        dying = FileStorage.open(root, disk=Deadly())
        with pytest.raises(Death):
            put(dying, [0, 1])
        assert living.bytes_used == 2 * PAGE_BYTES
        assert bytes_in(root) == 0
        assert put(living, [2, 3, 4]) == [True] * 3
        assert living.bytes_used == bytes_in(root) == 3 * PAGE_BYTES
        with pytest.raises(Death):
            put(dying, [0, 1])
        dying.close()
    with closing(FileStorage.open(root)) as alone:
        assert alone.bytes_used == bytes_in(root)


def test_a_page_that_another_process_evicted_before_it_had_its_name_counts_once_it_has(root: Path) -> None:
    class EvictsBeforeRename(Disk):
        """Lets somebody else make room when the first draft is to be renamed."""

        def rename(  # type: ignore[override]
            self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int
        ) -> None:
            if target == path_of(root, label(0)).name:
                assert put(other, range(10, 13)) == [True] * 3
            os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    with ExitStack() as stack:
        other = stack.enter_context(closing(FileStorage.open(root, bytes_max=3 * PAGE_BYTES)))
        storage = stack.enter_context(closing(FileStorage.open(root, disk=EvictsBeforeRename())))
        put(storage, [0])
        assert other.bytes_used == storage.bytes_used == bytes_in(root) == 4 * PAGE_BYTES
        put(other, [14])
        assert other.bytes_used == bytes_in(root) == 3 * PAGE_BYTES


def test_a_put_goes_on_where_the_journal_cannot_be_written_and_says_so(root: Path) -> None:
    disk, cap = FaultyDisk(only="write"), 9 * PAGE_BYTES
    with (
        closing(FileStorage.open(root, bytes_max=cap, disk=disk)) as storage,
        closing(FileStorage.open(root, bytes_max=cap)) as other,
    ):
        disk.failing = range(len(disk.calls), len(disk.calls) + 1)
        assert put(storage, [1]) == [True]
        assert storage.counts.unrecorded_count == 1
        assert storage.bytes_used == PAGE_BYTES
        assert other.bytes_used == 0
        # Met, it is counted.
        assert other.get([blank_page(label(1))]) == [Answer.HIT]
        assert other.bytes_used == PAGE_BYTES


# Losing no page to a race


def test_a_page_put_right_while_an_intruder_is_cleared_away_is_not_lost(root: Path) -> None:
    class PutsBeforeRemoval(Disk):
        """Lets somebody put the page between the look at the intruder and its removal."""

        def rename(  # type: ignore[override]
            self, source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int
        ) -> None:
            if source == path.name:
                path.unlink()
                assert put(other, [1], Level.DURABLE) == [True]
            os.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    path = path_of(root, label(1))
    with closing(FileStorage.open(root, disk=PutsBeforeRemoval())) as storage, closing(FileStorage.open(root)) as other:
        put(other, [1])
        os.truncate(path, 5)
        assert storage.get([blank_page(label(1))]) == [Answer.FLAWED]
        assert other.get([blank_page(label(1))]) == [Answer.HIT]


# The journal


def journals(directory: Path, count: int) -> list[Journal]:
    fd = os.open(directory, os.O_RDONLY)
    opened = [Journal.open(Disk(), fd) for _ in range(count)]
    os.close(fd)
    return opened


def lines(start: int, count: int) -> list[JournalLine]:
    return [
        JournalLine(label(number % 50), None if number % 3 == 0 else number) for number in range(start, start + count)
    ]


def test_everybody_comes_to_the_same_state_across_files(tmp_path: Path) -> None:
    one, two, three = journals(tmp_path, 3)
    seen: dict[Journal, list[JournalLine]] = {journal: [] for journal in (one, two, three)}
    choice = random.Random(3)
    number = 0
    for _ in range(400):
        journal = choice.choice((one, one, two, three))
        news = journal.exchange(lines(number, 50))
        assert news is not None
        seen[journal] += news
        number += 50
    for journal in (one, two, three):
        seen[journal] += journal.exchange(()) or ()
    assert len(list((tmp_path / "journal").iterdir())) == 2
    # At the end of a file some see a line twice; nobody misses one, and what was said of an object last stands.
    assert all(set(changes) == set(lines(0, number)) for changes in seen.values())
    assert dict(seen[one]) == dict(seen[two]) == dict(seen[three]) == dict(lines(number - 50, 50))
    for journal in (one, two, three):
        journal.close()


def test_who_is_too_far_behind_is_told_so_and_reads_on_from_what_is_kept(tmp_path: Path) -> None:
    fast, slow, late = journals(tmp_path, 3)
    line_bytes = len(f"+{label(0).object_name} 1\n")
    for start in range(0, (FILES_BEHIND_MAX + 2) * FILE_BYTES_MAX // line_bytes, 500):
        assert fast.exchange(lines(start, 500)) is not None
    assert slow.exchange(()) is None
    assert late.exchange(lines(7, 1)) is None
    assert (late.exchange(lines(7, 1)) or [])[-1:] == lines(7, 1)
    caught_up = slow.exchange(())
    assert caught_up is not None
    assert caught_up[-1:] == lines(7, 1)
    assert (fast.exchange(()) or [])[-1:] == lines(7, 1)
    for journal in (fast, slow, late):
        journal.close()


@pytest.mark.parametrize("torn", [b"+", b"\n+abc", b"+" + b"0" * 64 + b"/", b"\xff\x00\n\n\n-x\n", b"x" * 100_000])
def test_a_line_that_somebody_left_half_written_hides_no_other(torn: bytes, tmp_path: Path) -> None:
    one, two = journals(tmp_path, 2)
    one.exchange(lines(1, 2))
    with (tmp_path / "journal" / "0").open("ab") as file:
        file.write(torn)
    assert one.exchange(lines(4, 2)) == lines(4, 2)
    assert two.exchange(()) == lines(1, 2) + lines(4, 2)
    one.close()
    two.close()


def test_what_a_failed_exchange_had_read_is_returned_by_the_next_one(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    disk = FaultyDisk(only="pread")
    one, two = Journal.open(disk, fd), Journal.open(Disk(), fd)
    os.close(fd)
    two.exchange(lines(1, 2))
    disk.failing = range(1, 2)  # the second read of an exchange, which finds the end
    with pytest.raises(OSError, match="Input/output error"):
        one.exchange(())
    assert one.exchange(lines(9, 1)) == lines(1, 2) + lines(9, 1)
    one.close()
    two.close()


def test_a_store_that_lost_track_of_the_others_lists_the_directory(root: Path) -> None:
    with closing(FileStorage.open(root)) as slow, closing(FileStorage.open(root)) as fast:
        put(slow, range(3))
        put(fast, [4])
        pages = [PageIO(label(number), None, (memoryview(b"x"),)) for number in range(10, 60)]
        labels = [page.label for page in pages]
        line_bytes = len(f"+{label(0).object_name} 1\n")
        for _ in range((FILES_BEHIND_MAX + 2) * FILE_BYTES_MAX // line_bytes // 90):
            fast.put(pages, Level.CACHED)
            fast.remove(labels)
        put(fast, [3])
        assert slow.bytes_used == fast.bytes_used == 5 * PAGE_BYTES
        assert slow.counts.unrecorded_count == 0


class ListingDisk(Disk):
    """Counts the objects that are looked at in a listing, and may let the first one wait."""

    def __init__(self) -> None:
        self.listed_count = 0
        self.is_listing = Event()
        self.goes_on = Event()
        self.goes_on.set()

    def stat(self, path: str, *, dir_fd: int, follow_symlinks: bool) -> os.stat_result:  # type: ignore[override]
        if "/" in path:
            self.listed_count += 1
            self.is_listing.set()
            assert self.goes_on.wait(60)
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 30 lines be too far ahead to be followed, and four objects be a step of a listing."""
    monkeypatch.setattr("unified_cache.storage_backends.file.journal.FILE_BYTES_MAX", 1000)
    monkeypatch.setattr("unified_cache.storage_backends.file.listing.LISTED_AT_ONCE", 4)


@pytest.mark.usefixtures("small_steps")
def test_a_process_that_lost_track_of_the_others_lists_a_few_objects_a_call_and_keeps_the_cap_again(root: Path) -> None:
    disk, cap = ListingDisk(), 50 * PAGE_BYTES
    with (
        closing(FileStorage.open(root, bytes_max=cap, disk=disk)) as slow,
        closing(FileStorage.open(root, bytes_max=cap)) as fast,
    ):
        put(slow, [1000])
        for number in range(60):
            put(fast, [number])
        calls_count = 0
        while disk.listed_count < 50:
            before = disk.listed_count
            assert slow.get([blank_page(label(55))]) == [Answer.HIT]
            assert disk.listed_count <= before + 4
            calls_count += 1
        assert 12 <= calls_count <= 14
        put(slow, [2000])
        slow.get([blank_page(label(55))])
        assert slow.bytes_used == fast.bytes_used == bytes_in(root) == cap
        assert held(slow, 60) == list(range(11, 60))
        assert slow.counts.unrecorded_count == 0


@pytest.mark.usefixtures("small_steps")
def test_no_call_waits_for_the_listing_that_another_one_goes_on_with(root: Path) -> None:
    disk, cap = ListingDisk(), 50 * PAGE_BYTES
    with (
        closing(FileStorage.open(root, bytes_max=cap, disk=disk)) as slow,
        closing(FileStorage.open(root, bytes_max=cap)) as fast,
        ThreadPoolExecutor(1) as thread,
    ):
        for number in range(40):
            put(fast, [number])
        put(slow, [100])
        disk.is_listing.clear()
        disk.goes_on.clear()
        listing = thread.submit(slow.get, [blank_page(label(1))])
        assert disk.is_listing.wait(60)
        assert slow.get([blank_page(label(2))]) == [Answer.HIT]
        assert put(slow, [101]) == [True]
        slow.remove([label(3), label(39)])
        assert not listing.done()
        disk.goes_on.set()
        assert listing.result(60) == [Answer.HIT]
        assert slow.bytes_used == fast.bytes_used == bytes_in(root) == 40 * PAGE_BYTES


@pytest.mark.usefixtures("small_steps")
def test_a_listing_that_fails_begins_anew(root: Path) -> None:
    disk, cap = FaultyDisk(only="listdir"), 50 * PAGE_BYTES
    with (
        closing(FileStorage.open(root, bytes_max=cap, disk=disk)) as slow,
        closing(FileStorage.open(root, bytes_max=cap)) as fast,
    ):
        for number in range(40):
            put(fast, [number])
        put(slow, [100])
        for number in range(8):
            disk.failing = range(len(disk.calls) + number, len(disk.calls) + number + 1)
            assert slow.get([blank_page(label(1))]) == [Answer.HIT]
        disk.failing = range(0)
        assert slow.bytes_used == fast.bytes_used == bytes_in(root) == 41 * PAGE_BYTES


# In earnest


@pytest.mark.parametrize("capped", [False, True])
def test_threads_on_two_stores_see_no_wrong_byte_and_keep_the_cap(capped: bool, root: Path) -> None:
    bytes_max = 40 * PAGE_BYTES if capped else None
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(FileStorage.open(root, bytes_max=bytes_max))) for _ in range(2)]

        def use(seed: int) -> int:
            choice = random.Random(seed)
            storage = stores[seed % 2]
            hits_count = 0
            for _ in range(examples(40, 400)):
                numbers = choice.sample(range(100), 5)
                assert put(storage, numbers) == [True] * 5
                found = [blank_page(label(number)) for number in choice.sample(range(100), 5)]
                for page, hit in zip(found, storage.get(found), strict=True):
                    assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label))
                    hits_count += bool(hit)
                if choice.random() < 0.2:
                    storage.remove([label(choice.randrange(100))])
            return hits_count

        with ThreadPoolExecutor(6) as threads:
            assert sum(threads.map(use, range(6))) > 0
        if capped:
            assert bytes_in(root) <= 40 * PAGE_BYTES
            put(stores[0], [200])
        assert stores[0].bytes_used == stores[1].bytes_used
        # A page removed by one thread while another puts it may be counted until it is met again.
        assert abs(stores[0].bytes_used - bytes_in(root)) <= 6 * PAGE_BYTES


def test_processes_in_one_directory_see_no_wrong_byte_and_keep_the_cap(root: Path) -> None:
    bytes_max, processes_count = 40 * PAGE_BYTES, 3
    FileStorage.open(root).close()
    steps_count = examples(150, 3000)
    commands = [
        [sys.executable, "-c", SHARER, str(root), str(seed), str(bytes_max), str(steps_count)]
        for seed in range(processes_count)
    ]
    with ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            for command in commands
        ]
        peak_bytes = 0
        while any(child.poll() is None for child in children):
            peak_bytes = max(peak_bytes, bytes_in(root))
        for child in children:
            hits, errors = child.communicate()
            assert child.returncode == 0, errors
            assert int(hits) > 0
    # A listing sees what is being removed, and what came and went while it went through the directories.
    assert peak_bytes <= bytes_max + 2 * 4 * processes_count * PAGE_BYTES
    assert bytes_in(root) <= bytes_max + 4 * processes_count * PAGE_BYTES
    assert list((root / "tmp").iterdir()) == []
    with closing(FileStorage.open(root, bytes_max=bytes_max)) as storage:
        assert storage.bytes_used == bytes_in(root) <= bytes_max
        assert len(object_paths(root)) > 20
