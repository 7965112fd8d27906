"""Stores in a directory whose writer is killed, or whose power goes, and how long they take to come back."""

import array
import fcntl
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.budget import LONG, examples
from tests.support.file_writer import PAGES_IN_BATCH, bytes_of_page, writer_command
from tests.support.files import bytes_in, put, temps
from tests.support.store_kinds import StoreKind
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, listing, sealed_page

IMAGE_BYTES = 256 << 20
STOP_S = 30
"""Longest wait for a command or a process on a file system whose power is gone."""

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: from now on nothing reaches the disk."""
NO_LOG_FLUSH = 2
"""Not even what the journal holds in memory, which is what a loss of power leaves."""


@dataclass
class Killed:
    """A directory whose writer is killed, which takes nothing from what it has said."""

    place: Path

    def strike(self, writer: "subprocess.Popen[str]") -> None:
        """End the writer in the middle of something."""
        writer.kill()

    def come_back(self) -> None:
        """Make the directory as the next process finds it."""

    def kept(self, batches: set[int]) -> set[int]:
        """Return those of the batches acknowledged that must be there."""
        return batches

    def close(self) -> None:
        """Give everything back."""


class PowerLost(Killed):
    """A directory on an ext4 in a file, whose power goes under a writer. Needs root."""

    def __init__(self, directory: Path) -> None:
        """Skip the test where this machine cannot."""
        super().__init__(directory / "island")
        self._image = directory / "image"
        self._is_mounted = False
        if os.geteuid() != 0:
            pytest.skip("mounting a file system needs root")
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 on this machine")
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self.place.mkdir()
        try:
            self._mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine mounts no file: {error.stderr.strip()}")

    def strike(self, writer: "subprocess.Popen[str]") -> None:
        """Let nothing more reach the disk; a put of the writer fails sooner or later, and none that is DURABLE holds.

        A CACHED put may still seem to succeed, in memory.
        """
        fd = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, array.array("I", [NO_LOG_FLUSH]))
        finally:
            os.close(fd)

    def come_back(self) -> None:
        """Drop what has not reached the disk, and replay the journal."""
        self.close()
        self._mount()

    def kept(self, batches: set[int]) -> set[int]:
        return {batch for batch in batches if batch % 2}

    def close(self) -> None:
        if self._is_mounted:
            _run("umount", str(self.place))
            self._is_mounted = False

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self.place))
        self._is_mounted = True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=STOP_S)


@pytest.fixture(params=[Killed, PowerLost])
def blow(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Killed]:
    """What befalls a writer."""
    blow = request.param(tmp_path)
    try:
        yield blow
    finally:
        blow.close()


def write_until_struck(kind: StoreKind, blow: Killed, first_batch: int, bytes_max: int, batches_min: int) -> set[int]:
    """Let a process write until it is struck, and return the batches that it was promised."""
    command = writer_command(kind, str(blow.place / "store"), first_batch, bytes_max)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        try:
            acknowledged = {int(child.stdout.readline()) for _ in range(batches_min)}
            blow.strike(child)
            acknowledged.update(int(line) for line in child.stdout if line.endswith("\n"))
            child.wait(STOP_S)
        finally:
            child.kill()
    blow.come_back()
    return acknowledged


def read_all(storage: VerifiedStorage, batches: set[int]) -> set[int]:
    """Read the pages of batches; what is there must be exact. Return the numbers of what is."""
    numbers = [batch * PAGES_IN_BATCH + i for batch in sorted(batches) for i in range(PAGES_IN_BATCH)]
    found = [blank_page(label(number), bytes_of_page(number)) for number in numbers]
    hits = storage.get(found)
    for number, page, hit in zip(numbers, found, hits, strict=True):
        assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label, bytes_of_page(number)))
    return {number for number, hit in zip(numbers, hits, strict=True) if hit}


def check_whole(storage: VerifiedStorage, hits: set[int]) -> None:
    """Check that these pages, each whole, are all that a store lists after a writer was killed."""
    listed = {(found.label, found.object_bytes) for found in listing(storage, label(0).identity)}
    assert listed == {(label(number), bytes_of_page(number)) for number in hits}
    assert storage.flaws_count == {}


@pytest.mark.parametrize("kind", StoreKind)
def test_a_writer_struck_again_and_again_tears_no_page_and_loses_none_that_it_was_promised(
    kind: StoreKind, blow: Killed
) -> None:
    root, choice = blow.place / "store", random.Random(7)
    is_killed = not isinstance(blow, PowerLost)
    cycles_count = examples(8, 110) if is_killed else examples(2, 40)
    kept: set[int] = set()
    begun: set[int] = set()
    reads_count = 0
    for cycle in range(cycles_count):
        first_batch = cycle * 1000
        batches = write_until_struck(kind, blow, first_batch, 0, choice.randrange(2, 14))
        kept |= blow.kept(batches)
        # The batch after the last one acknowledged may be there in part.
        begun |= batches | {max(batches, default=first_batch - 1) + 1}
        store = kind.open(root)
        assert temps(root) == []
        assert len(list((root / "tmp").iterdir())) == 1
        with closing(VerifiedStorage(store)) as storage:
            hits = read_all(storage, begun)
            assert {batch * PAGES_IN_BATCH + i for batch in kept for i in range(PAGES_IN_BATCH)} <= hits
            reads_count += len(hits)
            if is_killed:
                check_whole(storage, hits)
            bytes_used = store.bytes_used
        kind.check_room(root, bytes_used)
    assert len(kept) >= 2 * cycles_count
    assert reads_count >= (0 if not is_killed else 50_000 if LONG else 500)


@pytest.mark.parametrize("kind", StoreKind)
def test_a_writer_struck_while_it_evicts_leaves_whole_pages_and_the_next_one_keeps_the_cap(
    kind: StoreKind, blow: Killed
) -> None:
    root, choice = blow.place / "store", random.Random(11)
    is_killed = not isinstance(blow, PowerLost)
    batch_bytes = sum(kind.taken_bytes(bytes_of_page(number)) for number in range(PAGES_IN_BATCH))
    bytes_max = 6 * batch_bytes
    begun: set[int] = set()
    for cycle in range(examples(4, 60) if is_killed else 1):
        batches = write_until_struck(kind, blow, cycle * 1000, bytes_max, choice.randrange(8, 20))
        begun |= batches | {max(batches) + 1}
        if is_killed and kind is StoreKind.FILE:
            assert bytes_in(root) <= bytes_max + batch_bytes
        store = kind.open(root, bytes_max=bytes_max)
        assert temps(root) == []
        with closing(VerifiedStorage(store)) as storage:
            hits = read_all(storage, begun)
            if is_killed:
                check_whole(storage, hits)
                assert len(hits) >= 4 * PAGES_IN_BATCH
            assert put(storage, [1_000_001], Level.DURABLE) == [True]
            assert storage.get([blank_page(label(1_000_001))]) == [Answer.HIT]
            assert store.remove([label(1_000_001)]) == 1
            bytes_used = store.bytes_used
            assert bytes_used <= bytes_max
        kind.check_room(root, bytes_used)


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("objects_count", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_store_is_back_with_its_first_hit_within_five_seconds_of_a_hundred_thousand_objects(
    objects_count: int, kind: StoreKind, tmp_path: Path
) -> None:
    with closing(kind.open(tmp_path / "store")) as storage:
        for start in range(0, objects_count, 1000):
            labels = [label(number) for number in range(start, start + 1000)]
            storage.put([PageIO(named, (memoryview(b"x"),)) for named in labels], Level.CACHED)
    # This thread's processor time at the small size: on a busy machine, in a process with threads of other tests, the
    # wall clock of a quarter of a second says little.
    clock = time.monotonic if LONG else time.thread_time
    taken_s: list[float] = []
    for _ in range(3):  # The best of three: whatever else this machine does makes none faster.
        started_s = clock()
        with closing(kind.open(tmp_path / "store", bytes_max=2 * objects_count * kind.taken_bytes(1))) as storage:
            assert storage.get([PageIO(label(7), (memoryview(bytearray(1)),))]) == [Answer.HIT]
            taken_s.append(clock() - started_s)
            assert storage.bytes_used == objects_count * kind.taken_bytes(1)
    assert min(taken_s) <= 5 * objects_count / 100_000
