"""A store in one directory, pages side by side in files of equal slots: for one process, and for small pages.

A page is written into a free slot, synced if it must be durable, and only then entered in the table of its file, so a
page is either entered or not there, whatever kills the process. Where the pages are is read from these tables when the
store is opened, and known in memory from then on: a read is one call, a write is one and a share in the entries of its
batch. A loss of power may leave an entry beside bytes that never reached the disk, of a page that was not acknowledged
as durable; wrap the store in ``VerifiedStorage``, which finds that as it finds bytes that rot.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock

from unified_cache.errors import ConfigError, InputError, StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends._calls import Calls
from unified_cache.storage_backends._file_disk import Disk
from unified_cache.storage_backends._file_intruders import UNREADABLE
from unified_cache.storage_backends._file_io import missing_bytes, storage_error
from unified_cache.storage_backends._file_layout import IDENTITY_BYTES, check_label, label_of
from unified_cache.storage_backends._file_manifest import keep_manifest, manifests_in
from unified_cache.storage_backends._file_root import Format, Root, open_root
from unified_cache.storage_backends._packed_file import Entry, PackedFile, Shape, Slot
from unified_cache.storage_backends._packed_places import Kept, Places
from unified_cache.storage_backends._recency import Recency, page_bytes
from unified_cache.storage_backends._stamps import Clock, Stamps
from unified_cache.storage_backends.catalog import UsedBetween
from unified_cache.storage_backends.file_address import FREE_BYTES_MIN, address_of
from unified_cache.storage_backends.protocol import Capability, Level, PageIO, Scan, StoredObject

__all__ = ["PackedCounts", "PackedStorage", "open_url"]

FORMAT = Format("packed store", 1)
"""Of the directory; the files in it are described in ``_packed_file``."""


@dataclass(frozen=True, slots=True)
class PackedCounts:
    """What happened since the store was opened."""

    evicted_count: int
    """Objects that made room."""
    declined_count: int
    """Pages not stored because there was no room under the cap or on the file system."""
    intruders_count: int
    """Links, FIFOs and directories found in the place of a file."""
    unreadable_count: int
    """Objects that were there and could not be read."""


@dataclass(slots=True)
class _Batch:
    """What becomes of the pages of one put."""

    pages: Sequence[PageIO]
    stored: list[bool]
    fresh: dict[Label, int]
    """Pages to write, with their place in the batch."""
    gone: list[Slot]
    """Where pages were that are in the store no more."""
    written: dict[Label, Slot] = field(default_factory=dict)


class PackedStorage:
    """Keep sealed pages in slots under one directory, with an optional cap and the least recently used going first.

    One process at a time: the directory is locked, and a second one is refused. The cap counts lengths of objects;
    beyond it a directory takes the tables, the rest of each slot's last block, and the room that free slots keep, see
    ``IDLE_BYTES_MAX``. A batch never evicts its own pages, nor an object that another one needs before that one.
    Recency survives a restart; a crash forgets when pages were last read, of at most ``PAGES_WAITING_MAX`` of them and
    no further back than ``STAMP_GRAIN_NS``. Local file systems only.

    Thread-safe. Pages are read and written outside the guards.
    """

    def __init__(self, root: Root, places: Places, recency: Recency, stamps: Stamps, free_bytes_min: int) -> None:
        """``places`` are those of ``root``; what was found in them is to be told by ``_fill``."""
        self._root = root
        self._places = places
        self._recency = recency
        self._stamps = stamps
        self._free_bytes_min = free_bytes_min
        self._slots: dict[Label, Slot] = {}
        self._evicted_count = 0
        self._declined_count = 0
        self._unreadable_count = 0
        self._guard = Lock()
        """Guards the recency, the slots and the counts; never held while a file is waited for."""
        self._calls = Calls(f"the packed store in {root.path}")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        bytes_max: int | None = None,
        free_bytes_min: int = FREE_BYTES_MIN,
        clock: Clock = time.time_ns,
        new_writer: Callable[[], str] = partial(secrets.token_hex, 8),
        disk: Disk | None = None,
    ) -> "PackedStorage":
        """Open the store in ``path``, made with mode 0700 if absent; evict what exceeds the cap. Linear in objects.

        A put is declined that would leave less than ``free_bytes_min`` free on the file system. ``clock`` gives
        nanoseconds for times of use, ``new_writer`` a name that no other process uses, ``disk`` the calls of the
        operating system.

        Raises:
            ConfigError: bytes_max or free_bytes_min is negative.
            StorageError: the directory cannot be used, is not ours, or is open already, see its message.
        """
        recency = Recency(bytes_max)
        if free_bytes_min < 0:
            raise ConfigError(f"free_bytes_min must not be negative, found {free_bytes_min}")
        root = open_root(disk or Disk(), Path(path), FORMAT, new_writer)
        places = Places(root)
        try:
            root.disk.flock(root.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = places.find()
        except BlockingIOError as error:
            root.close()
            raise StorageError(
                f"{path} must be open once at a time, found another one who has it; "
                f"name another directory, or let them share a file: store or a service",
                retryable=True,
            ) from error
        except OSError as error:
            places.close()
            root.close()
            raise storage_error(error, f"cannot read the packed store in {path}") from error
        kept.sort(key=lambda each: each.stamp)
        stamps = Stamps(clock, kept[-1].stamp if kept else 0)
        storage = cls(root, places, recency, stamps, free_bytes_min)
        storage._fill(kept)
        return storage

    @property
    def path(self) -> Path:
        """Directory of the store."""
        return self._root.path

    @property
    def bytes_used(self) -> int:
        """Bytes of the objects in the store, and of those that are being written."""
        with self._calls:
            return self._recency.bytes_used

    @property
    def counts(self) -> PackedCounts:
        """What happened since the store was opened; a copy."""
        with self._guard:
            return PackedCounts(
                evicted_count=self._evicted_count,
                declined_count=self._declined_count,
                intruders_count=self._places.intruders_count,
                unreadable_count=self._unreadable_count,
            )

    def capability(self) -> Capability:
        """Say what this backend can do."""
        with self._calls:
            return Capability("packed", durable=True, bytes_max=self._recency.bytes_max)

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Write the manifest beside the pages, durably, unless it is there already. The slabs are not needed.

        Raises:
            InputError: the identity in the manifest is not a digest.
            StorageError: the manifest that is there says something else under the same digest, or a fault.
        """
        with self._calls:
            if len(manifest.identity) != IDENTITY_BYTES:
                raise InputError(f"an identity has {IDENTITY_BYTES} bytes, found {len(manifest.identity)}")
            keep_manifest(self._root, manifest, self._root.new_temp())
            with self._guard:
                self._recency.chains.learn(manifest)

    def exists(self, labels: Sequence[Label]) -> list[bool]:
        """Tell for each label whether it has a slot. No access, no call on the disk."""
        with self._calls:
            return [label in self._slots or _check_absent(label) for label in labels]

    def get(self, pages: Sequence[PageIO]) -> list[bool]:
        """Read each page straight into its buffers; a hit makes it recent. A page of another length is dropped."""
        with self._calls:
            hits = [False] * len(pages)
            lost: dict[Label, Slot] = {}
            for number, slot in enumerate(self._slots_to_read(pages)):
                if slot is None:
                    continue
                label = pages[number].label
                try:
                    is_whole = slot.file.read(slot.number, pages[number].buffers)
                except OSError as error:
                    if error.errno not in UNREADABLE:
                        raise self._cannot("read", label, error) from error
                    is_whole = False
                if not is_whole:
                    lost[label] = slot
                else:
                    # One that went while it was read is a miss: its slot may have become another page's.
                    hits[number] = self._slots.get(label) is slot
            if lost:
                self._lose(lost)
            self._stamp(self._stamps.note(pages, hits))
            return hits

    def put(self, pages: Sequence[PageIO], level: Level) -> list[bool]:
        """Write pages in their order; False for those that have no room under the cap or on the file system.

        DURABLE syncs each file twice a batch: once when the pages are in it, once when their entries are.

        Raises:
            StorageFullError: the file system has no room, or a limit on file sizes was met.
            StorageError: another fault. None of the pages that were not there before is there now.
        """
        with self._calls:
            stamp = self._stamps.new(len(pages))
            batch = self._begin(pages)
            self._let_go(batch.gone)
            self._keep_free(batch)
            try:
                self._write(batch, stamp, durable=level is Level.DURABLE)
            except OSError as error:
                self._abandon(batch)
                raise storage_error(error, f"cannot store pages in {self._root.path}") from error
            self._commit(batch)
            return batch.stored

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; return how many there were. Not synced: a crash may bring them back.

        Raises:
            StorageError: the tables cannot be written; the objects are gone until the store is opened again.
        """
        with self._calls:
            for label in labels:
                if label not in self._slots:
                    check_label(label)
            with self._guard:
                gone = self._take_out(labels)
            try:
                self._places.clear(gone)
            except OSError as error:
                raise storage_error(error, f"cannot remove objects from {self._root.path}") from error
            finally:
                self._places.give(gone)
            return len(gone)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed.

        Raises:
            InputError: the cursor is not one that a scan returned, or the identity is not a digest.
        """
        with self._calls:
            if len(identity) != IDENTITY_BYTES:
                raise InputError(f"an identity has {IDENTITY_BYTES} bytes, found {len(identity)}")
            if cursor and label_of(identity, cursor) is None:
                raise InputError(f"a cursor is what the last scan returned, found {cursor!r}")
            with self._guard:
                found = self._recency.scan(identity, cursor)
                return Scan([each for each in found.objects if each.label in self._slots], found.cursor)

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity, by its digest; None where there is none that can be read.

        Raises:
            StorageError: the directory cannot be listed.
        """
        with self._calls:
            try:
                return manifests_in(self._root)
            except OSError as error:
                raise storage_error(error, f"cannot list the identities in {self._root.path}") from error

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Compare times of use; None without objects. Linear in objects.

        Raises:
            StorageError: a table cannot be read.
        """
        with self._calls:
            self._stamp(self._stamps.take())
            try:
                times = self._places.used_ns(identity)
            except OSError as error:
                raise storage_error(error, f"cannot read the tables in {self._root.path}") from error
            return UsedBetween(min(times), max(times)) if times else None

    def close(self) -> None:
        """Wait for calls in flight, write times of use, give free room back, let go of every descriptor."""
        if self._calls.close():
            self._stamp(self._stamps.take())
            self._places.close()
            self._root.close()

    def _fill(self, kept: Sequence[Kept]) -> None:
        """Take in what was found, the least recent first, and evict what exceeds the cap."""
        gone: list[Slot] = []
        for label, slot, _ in kept:
            former = self._slots.pop(label, None)  # of a put that a crash cut short
            if former is not None:
                gone.append(former)
            self._slots[label] = slot
        self._recency.replace(StoredObject(label, slot.file.object_bytes) for label, slot in self._slots.items())
        victims, _ = self._recency.victims(0, ())
        self._evicted_count += len(victims)
        self._let_go([*gone, *self._take_out([victim.label for victim in victims])])

    def _begin(self, pages: Sequence[PageIO]) -> _Batch:
        """Grant room to pages that are not there, evicting for them; those that are there become recent."""
        labels = [page.label for page in pages]
        sizes = [page_bytes(page) for page in pages]
        for label in labels:
            if label not in self._slots:
                check_label(label)
        with self._guard:
            self._recency.link(pages)
            stored, evicted = self._recency.store(labels, sizes)
            batch = _Batch(pages, stored, {}, self._take_out(evicted))
            for number, label in enumerate(labels):
                slot = self._slots.get(label)
                if slot is not None and slot.file.object_bytes != sizes[number]:
                    batch.gone.append(self._slots.pop(label))
                    slot = None
                if not stored[number]:
                    self._recency.chains.unlink(label)
                elif slot is None:
                    batch.fresh.setdefault(label, number)
            self._evicted_count += len(evicted)
            self._declined_count += stored.count(False)
        return batch

    def _keep_free(self, batch: _Batch) -> None:
        """Decline the last pages where all would leave the file system too little room."""
        if not self._free_bytes_min or not batch.fresh:
            return
        sizes = {label: page_bytes(batch.pages[number]) for label, number in batch.fresh.items()}
        wanted_bytes = sum(sizes.values()) + self._free_bytes_min - self._places.idle_bytes
        short_bytes = missing_bytes(self._root.disk, self._root.fd, wanted_bytes)
        while short_bytes > 0 and batch.fresh:
            label, _ = batch.fresh.popitem()
            short_bytes -= sizes[label]
            self._decline(batch, label)

    def _decline(self, batch: _Batch, label: Label) -> None:
        with self._guard:
            self._recency.forget(label)
            self._declined_count += 1
        for number, page in enumerate(batch.pages):
            if page.label == label:
                batch.stored[number] = False

    def _write(self, batch: _Batch, stamp: int, *, durable: bool) -> None:
        """Write what is not there, then say where it is; the first page has the time ``stamp``, each other one less."""
        shapes: dict[Shape, list[Label]] = {}
        for label, number in batch.fresh.items():
            shape = Shape(label.identity, label.pool, page_bytes(batch.pages[number]))
            shapes.setdefault(shape, []).append(label)
        for shape, labels in shapes.items():
            batch.written.update(zip(labels, self._places.take(shape, len(labels)), strict=True))
        for label, slot in batch.written.items():
            slot.file.write(slot.number, batch.pages[batch.fresh[label]].buffers)
        entries: dict[PackedFile, list[Entry]] = {}
        for label, slot in batch.written.items():
            entry = Entry(slot.number, label.key, stamp - batch.fresh[label])
            entries.setdefault(slot.file, []).append(entry)
        if durable:
            _sync(entries)
        for file, inside in entries.items():
            file.enter(inside)
        if durable:
            # Whoever stored those that were there may have stored them CACHED.
            there = (self._slots.get(page.label) for page in batch.pages if page.label not in batch.written)
            _sync({*entries, *(slot.file for slot in there if slot is not None)})

    def _commit(self, batch: _Batch) -> None:
        """Let others read what was written, unless it was evicted meanwhile or another thread was first."""
        spare: list[Slot] = []
        evicted: list[Label] = []
        with self._guard:
            for label, slot in batch.written.items():
                if label in self._slots:
                    spare.append(slot)
                elif self._recency.size_of(label) != slot.file.object_bytes:
                    spare.append(slot)
                    evicted.append(label)
                else:
                    self._slots[label] = slot
        self._let_go(spare)
        if evicted:
            batch.stored = [
                ok and page.label not in evicted for page, ok in zip(batch.pages, batch.stored, strict=True)
            ]
        if len(batch.fresh) < len(batch.pages):
            there = [ok and page.label not in batch.fresh for page, ok in zip(batch.pages, batch.stored, strict=True)]
            self._stamp(self._stamps.note(batch.pages, there))

    def _abandon(self, batch: _Batch) -> None:
        """Leave nothing of pages that could not be written."""
        with self._guard:
            for label in batch.fresh:
                if label not in self._slots:
                    self._recency.forget(label)
        self._let_go(list(batch.written.values()))

    def _slots_to_read(self, pages: Sequence[PageIO]) -> list[Slot | None]:
        """Look pages up and make those that are there recent."""
        slots: list[Slot | None] = []
        gone: list[Slot] = []
        with self._guard:
            for page in pages:
                slot = self._slots.get(page.label)
                if slot is None:
                    check_label(page.label)
                elif slot.file.object_bytes != page_bytes(page):
                    gone += self._take_out((page.label,))
                    slot = None
                slots.append(slot)
            found = [page for page, slot in zip(pages, slots, strict=True) if slot is not None]
            self._recency.touch([page.label for page in reversed(found)])
            if self._recency.bytes_max is not None:
                self._recency.link(found)
                self._recency.touch_before(found)
        self._let_go(gone)
        return slots

    def _take_out(self, labels: Iterable[Label]) -> list[Slot]:
        """Know objects no more; return the slots that they had. Inside the guard."""
        slots: list[Slot] = []
        for label in labels:
            slot = self._slots.pop(label, None)
            if slot is not None:
                self._recency.forget(label)
                slots.append(slot)
        return slots

    def _let_go(self, slots: Sequence[Slot]) -> None:
        """Free slots. An entry that cannot be cleared is of a page that a crash may bring back, and harms nobody."""
        if slots:
            with suppress(OSError):
                self._places.clear(slots)
            self._places.give(slots)

    def _lose(self, lost: Mapping[Label, Slot]) -> None:
        """Know objects no more that could not be read; nobody gets their slots until the store is opened again."""
        with self._guard:
            for label, slot in lost.items():
                if self._slots.get(label) is slot:
                    self._take_out([label])
                    self._unreadable_count += 1
        with suppress(OSError):
            self._places.clear(lost.values())

    def _stamp(self, stamps: Mapping[Label, int]) -> None:
        """Write when pages were read. A time that cannot be written costs order after a restart, no page."""
        for label, stamp in stamps.items():
            slot = self._slots.get(label)
            if slot is not None:
                with suppress(OSError):
                    slot.file.stamp(slot.number, stamp)

    def _cannot(self, do: str, label: Label, error: OSError) -> StorageError:
        return storage_error(error, f"cannot {do} {self._root.path}/{label.object_name}")


def _check_absent(label: Label) -> bool:
    """Refuse what can be no object; False of what can."""
    check_label(label)
    return False


def _sync(files: Iterable[PackedFile]) -> None:
    for file in files:
        file.sync()


def open_url(rest: str, bytes_max: int | None) -> PackedStorage:
    """Open ``packed:DIR`` or ``packed:DIR?free=SIZE``, see ``file_address``."""
    address = address_of(rest, "packed")
    return PackedStorage.open(address.path, bytes_max=bytes_max, free_bytes_min=address.free_bytes_min)
