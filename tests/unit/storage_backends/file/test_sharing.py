"""Several stores on one directory: a cap that they keep together within a bound, whoever lives or dies."""

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.support.budget import examples
from tests.support.files import FILE_BYTES, FaultyDisk, bytes_in, held, object_paths, path_of, put
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import Clock
from unified_cache.storage_backends.file.quota import LISTED_MIN, SWEEP_SHARE
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

BATCH_PAGES = 4
NUMBERS = 400
"""Pages that processes choose from: several times the cap."""

SHARER = """
import random, sys
from contextlib import closing
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

root, seed, bytes_max, batch_pages, numbers_count = sys.argv[1], *map(int, sys.argv[2:])
choice = random.Random(seed)
with closing(FileStorage.open(root, bytes_max=bytes_max)) as storage:
    print("open", flush=True)
    for line in sys.stdin:
        hits_count = 0
        for _ in range(int(line)):
            numbers = choice.sample(range(numbers_count), batch_pages)
            level = choice.choice(list(Level))
            assert all(storage.put([sealed_page(label(number)) for number in numbers], level))
            found = [blank_page(label(number)) for number in choice.sample(range(numbers_count), 4) + numbers]
            for page, hit in zip(found, storage.get(found)):
                assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label)), page.label
                hits_count += bool(hit)
            if choice.random() < 0.1:
                storage.remove([label(choice.randrange(numbers_count))])
        print(hits_count, flush=True)
"""


def bound(bytes_max: int, processes_count: int, threads_count: int = 1) -> int:
    """Return the bytes that processes may hold together, each with so many threads that put batches."""
    puts_bytes = (2 * threads_count - 1) * BATCH_PAGES * FILE_BYTES
    return bytes_max + (processes_count - 1) * (2 * bytes_max // SWEEP_SHARE + puts_bytes)


@pytest.fixture
def root(memory_path: Path) -> Path:
    return memory_path / "store"


@contextmanager
def opened(
    root: Path, bytes_max: int | None, count: int = 2, disk: Disk | None = None, clock: Clock = time.time_ns
) -> Iterator[list[FileStorage]]:
    """Open several stores on one directory, the first of them over that disk."""
    with ExitStack() as stack:
        made = [FileStorage.open(root, bytes_max=bytes_max, clock=clock, disk=disk)]
        made += [FileStorage.open(root, bytes_max=bytes_max, clock=clock) for _ in range(count - 1)]
        for storage in made:
            stack.enter_context(closing(storage))
        yield made


# One cap


def test_a_use_whose_time_is_not_written_yet_counts_in_a_sweep(root: Path) -> None:
    clock = itertools.count(1 << 60).__next__
    with opened(root, 6 * FILE_BYTES, clock=clock) as (mine, theirs):
        put(mine, [0, 1, 2])
        put(theirs, [3, 4, 5])
        before = path_of(root, label(2)).stat().st_mtime_ns
        assert mine.get([blank_page(label(2))]) == [Answer.HIT]
        put(mine, [6, 7])
        assert path_of(root, label(2)).stat().st_mtime_ns == before
        assert held(mine, 8) == [0, 2, 3, 4, 6, 7]


def test_a_sweep_that_finds_more_than_the_cap_evicts_down_to_the_low_mark(root: Path) -> None:
    cap = 32 * FILE_BYTES
    with opened(root, cap) as (mine, theirs):
        for number in range(30):
            put(theirs, [number])
        for number in range(100, 102):
            put(mine, [number])
        put(mine, [102])
        assert bytes_in(root) == 33 * FILE_BYTES, "within the bound: mine has not swept, for what it stored is little"
        put(mine, [103])
        assert bytes_in(root) == cap - cap // 8 + FILE_BYTES


def test_a_page_evicted_before_it_had_its_name_counts_once_it_has_and_another_goes(root: Path) -> None:
    def evict(_source: str, target: str, **_fds: int) -> None:
        """Let another put make room when the first draft is to be renamed."""
        if target == str(path_of(root, label(0)).relative_to(root)):
            assert put(storage, range(10, 13)) == [True] * 3

    disk = FaultyDisk(before={"rename": evict})
    with closing(FileStorage.open(root, bytes_max=3 * FILE_BYTES, disk=disk)) as storage:
        put(storage, [0])
        assert bytes_in(root) == 3 * FILE_BYTES
        put(storage, [14])
        assert bytes_in(root) == 3 * FILE_BYTES


USES: Mapping[str, Callable[[FileStorage], object]] = {
    "touch": lambda storage: storage.touch([label(0)]),
    "get": lambda storage: storage.get([blank_page(label(0))]),
    "put": lambda storage: put(storage, [0]),
}
REMOVALS: Mapping[str, Callable[[FileStorage], object]] = {
    "evicted": lambda storage: put(storage, [3]),
    "removed": lambda storage: storage.remove([label(0)]),
}


@pytest.mark.parametrize("removal", REMOVALS.values(), ids=REMOVALS)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_page_used_at_the_moment_that_it_goes_takes_no_room(
    use: Callable[[FileStorage], object], removal: Callable[[FileStorage], object], root: Path
) -> None:
    def use_it(path: str, **_fds: int) -> None:
        """Let another thread use the page that is about to be removed."""
        if path == str(path_of(root, label(0)).relative_to(root)):
            use(storage)

    disk = FaultyDisk(before={"unlink": use_it})
    with closing(FileStorage.open(root, bytes_max=3 * FILE_BYTES, disk=disk)) as storage:
        put(storage, [0])
        put(storage, [1])
        put(storage, [2])
        removal(storage)
        put(storage, [4])
        assert bytes_in(root) == 3 * FILE_BYTES


def test_a_page_that_goes_after_a_put_found_it_there_takes_no_room(root: Path) -> None:
    others: list[int] = []
    # Another put makes room when a page that is there is made recent.
    disk = FaultyDisk(before={"utime": lambda _fd, **_ns: put(storage, [others.pop()]) if others else None})
    with closing(FileStorage.open(root, bytes_max=3 * FILE_BYTES, disk=disk)) as storage:
        for number in range(3):
            put(storage, [number])
        others.append(3)
        assert put(storage, [0]) == [True], "it was there"
        put(storage, [4])
        assert held(storage, 5) == [2, 3, 4]


# Losing no page to a race


def test_a_page_put_right_while_an_intruder_is_cleared_away_is_not_lost(root: Path) -> None:
    def put_it(source: str, _target: str, **_fds: int) -> None:
        """Let somebody put the page between the look at the intruder and its removal."""
        if source == str(path.relative_to(root)):
            path.unlink()
            assert put(other, [1], Level.DURABLE) == [True]

    path, disk = path_of(root, label(1)), FaultyDisk(before={"rename": put_it})
    with closing(FileStorage.open(root, disk=disk)) as storage, closing(FileStorage.open(root)) as other:
        put(other, [1])
        os.truncate(path, 5)
        assert storage.get([blank_page(label(1))]) == [Answer.FLAWED]
        assert other.get([blank_page(label(1))]) == [Answer.HIT]


# Sweeps


class ListingDisk(Disk):
    """Counts the objects that are looked at, in a listing or one by one."""

    def __init__(self) -> None:
        self.listed_count = 0

    def stat(self, path: str, *, dir_fd: int, follow_symlinks: bool) -> os.stat_result:  # type: ignore[override]
        self.listed_count += path.count("/") == 2
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)


def test_a_process_that_is_alone_lists_nothing_however_much_it_stores(root: Path) -> None:
    disk = ListingDisk()
    with closing(FileStorage.open(root, bytes_max=8 * FILE_BYTES, disk=disk)) as storage:
        for number in range(100):
            put(storage, [number])
            assert bytes_in(root) <= 8 * FILE_BYTES
        assert disk.listed_count == 0


@pytest.mark.parametrize("was_there", [False, True], ids=["came", "was there"])
def test_who_came_or_was_there_and_went_is_noticed_by_one_sweep(was_there: bool, root: Path) -> None:
    disk = ListingDisk()
    other = FileStorage.open(root) if was_there else None
    with closing(FileStorage.open(root, bytes_max=8 * FILE_BYTES, disk=disk)) as storage:
        put(storage, [0])
        with closing(other or FileStorage.open(root)) as other:
            put(other, range(100, 120))
        put(storage, [1])
        assert bytes_in(root) == 8 * FILE_BYTES
        listed_count = disk.listed_count
        for number in range(2, 50):
            put(storage, [number])
        assert disk.listed_count == listed_count


def test_a_sweep_lists_a_few_objects_with_each_put_and_is_over_in_time(root: Path) -> None:
    disk, pages_max = ListingDisk(), 1024
    sweep_pages = pages_max // SWEEP_SHARE
    with opened(root, pages_max * FILE_BYTES, disk=disk) as (slow, fast):
        put(fast, range(2000, 2700))
        for number in range(sweep_pages):
            put(slow, [number])
        assert disk.listed_count == 0
        for number in range(sweep_pages, 2 * sweep_pages):
            before = disk.listed_count
            put(slow, [number])
            assert disk.listed_count - before <= LISTED_MIN + 2 * (number + 1) // sweep_pages or (
                number == 2 * sweep_pages - 1
            )
        assert disk.listed_count >= 700 + sweep_pages
        put(slow, range(3000, 3300))
        assert bytes_in(root) == pages_max * FILE_BYTES, "it counts what the other one stored"


def test_gets_and_touches_list_nothing_while_a_sweep_is_under_way(root: Path) -> None:
    disk, cap = ListingDisk(), 1024 * FILE_BYTES
    with opened(root, cap, disk=disk) as (slow, fast):
        put(fast, range(2000, 2700))
        for number in range(1024 // SWEEP_SHARE + 1):
            put(slow, [number])
        listed_count = disk.listed_count
        assert 0 < listed_count < 700
        assert slow.get([blank_page(label(2001))]) == [Answer.HIT]
        slow.touch([label(2002)])
        slow.remove([label(2003)])
        assert disk.listed_count - listed_count <= 3 < LISTED_MIN, "a look at a page that was named, no more"


def test_what_is_stored_and_removed_during_a_sweep_is_counted_right(root: Path) -> None:
    cap = 1024 * FILE_BYTES
    with opened(root, cap) as (slow, fast):
        put(fast, range(2000, 2900))
        for number in range(1024 // SWEEP_SHARE + 1):
            put(slow, [number])
        slow.remove([label(number) for number in (0, 1, 2, 2000, 2001)])
        put(slow, range(100, 160))
        put(slow, range(200, 260))
        assert bytes_in(root) == cap


def test_a_sweep_that_fails_begins_again(root: Path) -> None:
    disk, cap = FaultyDisk(only="listdir"), 64 * FILE_BYTES
    with opened(root, cap, disk=disk) as (slow, fast):
        put(fast, range(60))
        disk.failing = range(len(disk.calls), 1 << 30)
        for number in range(100, 120):
            assert put(slow, [number]) == [True]
        disk.failing = range(0)
        for number in range(120, 125):
            put(slow, [number])
        assert bytes_in(root) <= cap


# In earnest


@pytest.mark.parametrize("capped", [False, True])
def test_threads_on_two_stores_see_no_wrong_byte_and_keep_the_cap_within_its_bound(capped: bool, root: Path) -> None:
    bytes_max = 40 * FILE_BYTES if capped else None
    with opened(root, bytes_max) as stores:

        def use(seed: int) -> int:
            choice = random.Random(seed)
            storage = stores[seed % 2]
            hits_count = 0
            for _ in range(examples(40, 400)):
                numbers = choice.sample(range(NUMBERS), BATCH_PAGES)
                assert put(storage, numbers) == [True] * BATCH_PAGES
                found = [blank_page(label(number)) for number in choice.sample(range(NUMBERS), 4) + numbers]
                for page, hit in zip(found, storage.get(found), strict=True):
                    assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label))
                    hits_count += bool(hit)
                if choice.random() < 0.2:
                    storage.remove([label(choice.randrange(NUMBERS))])
            return hits_count

        with ThreadPoolExecutor(6) as threads:
            assert sum(threads.map(use, range(6))) > 0
        # Nobody stores or removes now, so what lies there can be summed up.
        if capped:
            assert bytes_in(root) <= bound(40 * FILE_BYTES, 2, threads_count=3)
        assert stores[0].bytes_used == stores[1].bytes_used == bytes_in(root)


def test_processes_in_one_directory_keep_the_cap_within_its_bound_and_one_of_them_may_be_killed(root: Path) -> None:
    bytes_max, processes_count, puts_count = 64 * FILE_BYTES, 3, 40
    seeds = itertools.count()

    def start(stack: ExitStack) -> "subprocess.Popen[str]":
        given = [bytes_max, BATCH_PAGES, NUMBERS]
        command = [sys.executable, "-c", SHARER, str(root), str(next(seeds)), *map(str, given)]
        child = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        assert answer_of(child) == "open"
        return child

    def answer_of(child: "subprocess.Popen[str]") -> str:
        assert child.stdout is not None
        line = child.stdout.readline().strip()
        assert line, child.communicate()[1]
        return line

    def go_on(child: "subprocess.Popen[str]") -> None:
        assert child.stdin is not None
        child.stdin.write(f"{puts_count}\n")
        child.stdin.flush()

    with ExitStack() as stack:
        children = [start(stack) for _ in range(processes_count)]
        hits_count = 0
        for _ in range(examples(4, 60)):
            for child in children:
                go_on(child)
            # One is killed while all are at work, and another takes its place when the bound has been looked at.
            killed, *living = children
            hits_count += sum(int(answer_of(child)) for child in living[:1])
            killed.kill()
            killed.communicate()
            hits_count += sum(int(answer_of(child)) for child in living[1:])
            # Nobody is at work now, so what lies there can be summed up.
            assert bytes_in(root) <= bound(bytes_max, processes_count)
            children = [*living, start(stack)]
        assert hits_count > 0
        for child in children:
            _, errors = child.communicate("")
            assert child.returncode == 0, errors
    with closing(FileStorage.open(root, bytes_max=bytes_max)) as storage:
        assert storage.bytes_used == bytes_in(root) <= bytes_max
        assert len(object_paths(root)) > 20
    assert list((root / "tmp").iterdir()) == []
