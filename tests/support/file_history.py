"""History of one process with a store in a directory, and what must hold whatever happens to it on the way."""

import itertools
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from tests.support.files import FaultyDisk, chain, hits, path_of, put, temps
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import STAMP_GRAIN_NS
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    POOLS,
    blank_page,
    label,
    listing,
    sealed_page,
)

KEPT = range(4)
"""Pages in the store before the history begins."""
PAGES = range(12)
OF_OTHER_POOL = label(0, POOLS[1])


class StoreHistory:
    """Calls of one process to a store, and the promises it was given."""

    def __init__(
        self, kind: StoreKind, root: Path, disk: Disk, bytes_max: int | None, *, is_full: bool = False
    ) -> None:
        """``is_full`` says that the disk may have no room, so that pages are evicted as for a cap."""
        self.kind = kind
        self.root = root
        self.disk = disk
        self.bytes_max = bytes_max
        self.evicts = is_full or bytes_max is not None
        self.faults: list[StorageError] = []
        self._log = root.with_suffix(".log")
        self._log.touch()

    def play(self) -> None:
        """Do every step, going on after one that fails; nothing but a storage error may come out of any."""
        clock = itertools.count(2 * STAMP_GRAIN_NS, 2 * STAMP_GRAIN_NS).__next__
        try:
            storage = self.kind.open(self.root, bytes_max=self.bytes_max, clock=clock, disk=self.disk)
        except StorageError as error:
            self.faults.append(error)
            return
        intrusions: list[Callable[[DirectoryStorage], object]] = [
            lambda storage: self._intrude(storage, 5, Path.touch),
            lambda storage: self._intrude(storage, 4, Path.mkdir),
        ]
        steps: list[Callable[[DirectoryStorage], object]] = [
            lambda storage: storage.register(manifest_of(MODEL, LAYOUT), {}),
            lambda storage: self._put(storage, [3, 4, 5], Level.CACHED),
            lambda storage: self._put(storage, [4, 6, 7, 6], Level.DURABLE),
            lambda storage: hits(storage, range(8)),
            *(intrusions if self.kind is StoreKind.FILE else []),
            lambda storage: storage.exists([label(number) for number in PAGES]),
            lambda storage: self._remove(storage, [3, 9]),
            lambda storage: storage.scan(label(0).identity),
            lambda storage: self._put(storage, [8, 9, 10, 4], Level.DURABLE),
            lambda storage: hits(storage, PAGES),
            # What the store makes for the first page of its kind, and needs no more.
            lambda storage: storage.put([sealed_page(OF_OTHER_POOL)], Level.CACHED),
            lambda storage: storage.remove([OF_OTHER_POOL]),
            lambda storage: self._remove(storage, [7]),
            lambda storage: storage.bytes_used,
        ]
        for step in steps:
            try:
                step(storage)
            except StorageError as error:
                self.faults.append(error)
        storage.close()

    @property
    def durable(self) -> set[int]:
        """Pages acknowledged as durable and not removed since."""
        durable = set(KEPT)
        for line in self._log.read_text().splitlines():
            (durable.add if line[0] == "+" else durable.discard)(int(line[1:]))
        return durable

    def note(self, sign: str, numbers: list[int]) -> None:
        """Write down what was acknowledged, or is to be removed, where the end of this process does not reach it."""
        with self._log.open("a") as log:
            log.writelines(f"{sign}{number}\n" for number in numbers)

    def _put(self, storage: DirectoryStorage, numbers: list[int], level: Level) -> None:
        stored = storage.put(chain(numbers, sealed_page), level)
        if level is Level.DURABLE:
            self.note("+", [number for number, answer in zip(numbers, stored, strict=True) if answer])

    def _intrude(self, storage: DirectoryStorage, number: int, make: Callable[[Path], None]) -> None:
        self.note("-", [number])
        path = path_of(self.root, label(number))
        with suppress(FileNotFoundError):
            path.unlink()
            make(path)
        storage.get([blank_page(label(number))])

    def _remove(self, storage: DirectoryStorage, numbers: list[int]) -> None:
        self.note("-", numbers)
        storage.remove([label(number) for number in numbers])


def prepare(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root, disk=FaultyDisk())) as storage:
        storage.register(manifest_of(MODEL, LAYOUT), {})
        put(storage, KEPT, Level.DURABLE)
    # A writer that died: what it left is swept by the next to open.
    (root / "tmp" / "dead").mkdir()
    (root / "tmp" / "dead" / "lock").touch()
    (root / "tmp" / "dead" / "0").write_bytes(b"half a page")


def check_service(root: Path, history: StoreHistory) -> None:
    """Check that with the fault gone nothing wrong, nothing half-written and nothing else is left of it."""
    with closing(history.kind.open(root, bytes_max=history.bytes_max, disk=FaultyDisk())) as storage:
        assert temps(root) == []
        assert history.bytes_max is None or storage.bytes_used <= history.bytes_max
        found = hits(storage, PAGES)
        if not history.evicts:
            assert [number for number in history.durable if not found[number]] == []
            assert put(storage, PAGES, Level.DURABLE) == [True] * len(PAGES)
            assert hits(storage, PAGES) == [True] * len(PAGES)
        assert storage.put([sealed_page(label(99))], Level.CACHED) == [Answer.STORED]
        assert storage.get([blank_page(label(99))]) == [Answer.HIT]
        bytes_used = storage.bytes_used
        assert len(list(listing(storage, label(0).identity))) == bytes_used // history.kind.taken_bytes()
    history.kind.check_room(root, bytes_used)
