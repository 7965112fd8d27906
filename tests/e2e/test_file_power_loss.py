"""Stores in a directory on an ext4 of its own from which the power is taken while a process writes. Needs root."""

import array
import fcntl
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.file_writer import PAGES_IN_BATCH, bytes_of_page, writer_command
from tests.support.files import put, temps
from tests.support.store_kinds import StoreKind
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

IMAGE_BYTES = 256 << 20
STOP_S = 30
"""Longest wait for a command or a process on a file system whose power is gone."""

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: from now on nothing reaches the disk."""
NO_LOG_FLUSH = 2
"""Not even what the journal holds in memory, which is what a loss of power leaves."""


class Island:
    """A file system in a file, mounted in a directory."""

    def __init__(self, image: Path, place: Path) -> None:
        self._image = image
        self.place = place
        self._is_mounted = False

    def make(self) -> None:
        """Make the file system; skips the test where this machine cannot."""
        if os.geteuid() != 0:
            pytest.skip("mounting a file system needs root")
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 on this machine")
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self.place.mkdir()
        try:
            self.mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine mounts no file: {error.stderr.strip()}")

    def mount(self) -> None:
        """Mount it, which replays its journal."""
        _run("mount", "-o", "loop", str(self._image), str(self.place))
        self._is_mounted = True

    def lose_power(self) -> None:
        """Let nothing more reach the disk, and drop what has not."""
        fd = os.open(self.place, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, array.array("I", [NO_LOG_FLUSH]))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Unmount it if it is mounted."""
        if self._is_mounted:
            _run("umount", str(self.place))
            self._is_mounted = False


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=STOP_S)


@pytest.fixture
def island(tmp_path: Path) -> Iterator[Island]:
    island = Island(tmp_path / "image", tmp_path / "island")
    island.make()
    try:
        yield island
    finally:
        island.unmount()


def write_until_dark(kind: StoreKind, island: Island, first_batch: int, bytes_max: int, batches_min: int) -> list[int]:
    """Let a process write, take the power from it in the middle of something; return the batches acknowledged."""
    command = writer_command(kind, str(island.place / "store"), first_batch, bytes_max)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        try:
            acknowledged = [int(child.stdout.readline()) for _ in range(batches_min)]
            island.lose_power()
            # A CACHED put may still seem to succeed, in memory; a DURABLE one must not.
            acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
            assert child.wait(STOP_S) == 0
        finally:
            child.kill()
    island.unmount()
    island.mount()
    return acknowledged


def read_all(storage: VerifiedStorage, numbers: range) -> list[bool]:
    """Read pages; what is there must be exact."""
    found = [blank_page(label(number), bytes_of_page(number)) for number in numbers]
    hits = storage.get(found)
    for number, page, hit in zip(numbers, found, hits, strict=True):
        assert not hit or bytes_of(page) == bytes_of(sealed_page(page.label, bytes_of_page(number)))
    return list(map(bool, hits))


def numbers_of(batch: int) -> range:
    return range(batch * PAGES_IN_BATCH, (batch + 1) * PAGES_IN_BATCH)


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("cycles_count", [2, pytest.param(40, marks=pytest.mark.long)])
def test_a_loss_of_power_loses_no_durable_page_and_leaves_no_wrong_one(
    cycles_count: int, kind: StoreKind, island: Island
) -> None:
    choice = random.Random(13)
    root = island.place / "store"
    durable: set[int] = set()
    for cycle in range(cycles_count):
        first_batch = cycle * 1000
        batches = write_until_dark(kind, island, first_batch, 0, choice.randrange(2, 14))
        durable.update(batch for batch in batches if batch % 2)
        store = kind.open(root)
        assert temps(root) == []
        with closing(VerifiedStorage(store)) as storage:
            for batch in durable:
                assert all(read_all(storage, numbers_of(batch))), batch
            for batch in range(first_batch, max(batches) + 2):
                read_all(storage, numbers_of(batch))
            bytes_used = store.bytes_used
        kind.check_room(root, bytes_used)
    assert len(durable) >= 2 * cycles_count


@pytest.mark.parametrize("kind", StoreKind)
def test_a_loss_of_power_while_pages_are_evicted_leaves_whole_pages_and_a_store_that_serves(
    kind: StoreKind, island: Island
) -> None:
    root = island.place / "store"
    bytes_max = 6 * sum(map(bytes_of_page, range(PAGES_IN_BATCH)))
    batches = write_until_dark(kind, island, 0, bytes_max, 20)
    store = kind.open(root, bytes_max=bytes_max)
    assert temps(root) == []
    with closing(VerifiedStorage(store)) as storage:
        for batch in range(max(batches) + 2):
            read_all(storage, numbers_of(batch))
        assert put(store, [1_000_001], Level.DURABLE) == [True]
        assert storage.get([blank_page(label(1_000_001))]) == [Answer.HIT]
        bytes_used = store.bytes_used
    assert bytes_used <= bytes_max
    kind.check_room(root, bytes_used)
