"""LRU order and byte count of stored objects, and the choice of those to evict."""

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial

from unified_cache.core.errors import ConfigError
from unified_cache.core.seal import Label
from unified_cache.storage_backends.protocol import NAMES_MAX, Scan, StoredObject

SCANS_MAX = 4
"""Scans under way that go on without a listing: a service counts its tenants' pages while a client lists its own."""


class StoreLru:
    """LRU order of objects with their sizes, under a cap. Bookkeeping only; not thread-safe."""

    def __init__(self, bytes_max: int | None, taken_bytes: Callable[[int], int] = int) -> None:
        """``taken_bytes`` says what an object of a length takes of the cap: its length, or more where a disk has it."""
        if bytes_max is not None and bytes_max < 0:
            raise ConfigError(f"bytes_max must not be negative, found {bytes_max}")
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self.taken_bytes = taken_bytes
        self._objects: OrderedDict[Label, int] = OrderedDict()
        self._scans = ScansUnderWay()

    def __contains__(self, label: Label) -> bool:
        return label in self._objects

    def __len__(self) -> int:
        return len(self._objects)

    def size_of(self, label: Label) -> int | None:
        """Return the bytes of an object, None if it is not known."""
        return self._objects.get(label)

    def add(self, label: Label, object_bytes: int) -> None:
        """Make an object the most recent one, with this size from now on."""
        self.forget(label)
        self._objects[label] = object_bytes
        self.bytes_used += self.taken_bytes(object_bytes)

    def add_oldest(self, label: Label, object_bytes: int) -> None:
        """Add an object that is not known as the least recent one."""
        self.bytes_used += self.taken_bytes(object_bytes)
        self._objects[label] = object_bytes
        self._objects.move_to_end(label, last=False)

    def touch(self, labels: Iterable[Label]) -> list[Label]:
        """Make objects the most recent ones, the last label most of all; return the unknown ones."""
        move_to_end = self._objects.move_to_end
        unknown: list[Label] = []
        for label in labels:
            try:
                move_to_end(label)
            except KeyError:
                unknown.append(label)
        return unknown

    def forget(self, label: Label) -> int:
        """Drop an object; return the bytes it had, 0 if it was not known."""
        object_bytes = self._objects.pop(label, None)
        if object_bytes is None:
            return 0
        self.bytes_used -= self.taken_bytes(object_bytes)
        return object_bytes

    def victims(self, needed_bytes: int, keep: Container[Label]) -> tuple[list[StoredObject], int]:
        """Name the ``least_recent`` that make room for ``needed_bytes``, and the bytes still short after that."""
        if self.bytes_max is None:
            return [], 0
        short_bytes = self.bytes_used + needed_bytes - self.bytes_max
        if short_bytes <= 0:
            return [], 0
        if needed_bytes > self.bytes_max:
            return [], needed_bytes - self.bytes_max
        return self.least_recent(short_bytes, keep)

    def least_recent(
        self, short_bytes: int, keep: Container[Label], count_min: int = 0
    ) -> tuple[list[StoredObject], int]:
        """Name the least recent objects that come to ``short_bytes``, ``count_min`` at least, none in ``keep``.

        Return what is short after all, too.
        """
        named: list[StoredObject] = []
        for label, object_bytes in self._objects.items():
            if short_bytes <= 0 and len(named) >= count_min:
                break
            if label not in keep:
                named.append(StoredObject(label, object_bytes))
                short_bytes -= self.taken_bytes(object_bytes)
        return named, max(short_bytes, 0)

    def store(
        self, labels: Sequence[Label], sizes: Sequence[int], also: Collection[Label] = ()
    ) -> tuple[list[bool], list[Label]]:
        """Add a batch under the cap; return for each whether it is known now, and all that were evicted for it.

        No object of the batch, or in ``also``, is evicted for another: of a chain longer than the cap the first pages
        stay. An object known at another size is added again.
        """
        objects = self._objects
        size_of = objects.get
        bytes_max = self.bytes_max
        stored: list[bool] = []
        evicted: list[Label] = []
        keep: set[Label] = set()
        unfit_bytes = math.inf  # so large a page found no room: none is sought for it again in all that is kept
        for label, object_bytes in zip(labels, sizes, strict=True):
            known = size_of(label)
            if known == object_bytes:
                stored.append(True)
                continue
            if known is not None:
                self.forget(label)
                unfit_bytes = math.inf
            taken_bytes = self.taken_bytes(object_bytes)
            if bytes_max is not None and self.bytes_used + taken_bytes > bytes_max:
                if not keep:
                    keep = {*labels, *also}
                    self.touch(reversed((*also, *labels)))  # so that those which may go are found first
                victims, short_bytes = self.victims(taken_bytes, keep) if taken_bytes < unfit_bytes else ([], 1)
                if short_bytes:
                    unfit_bytes = min(unfit_bytes, taken_bytes)
                    stored.append(False)
                    continue
                for victim, _ in victims:
                    self.forget(victim)
                    evicted.append(victim)
            objects[label] = object_bytes
            self.bytes_used += taken_bytes
            stored.append(True)
        self.touch(reversed(labels))
        return stored, evicted

    def labels_of(self, identity: bytes) -> list[Label]:
        """List the objects of one identity, the least recently used first. Linear in all objects."""
        return [label for label in self._objects if label.identity == identity]

    def scan(self, identity: bytes, cursor: str) -> Scan:
        """List objects of one identity in the order of their names, after the name in ``cursor``.

        The first call, and one that does not go on with the last, is linear in all objects; what is added meanwhile is
        not listed.
        """
        some, end = self._scans.take(identity, cursor, partial(self._parts_of, identity))
        there = [(StoredObject(label, self._objects[label]), used) for used, label in some if label in self._objects]
        return Scan([found for found, _ in there], end, [used for _, used in there])

    def _parts_of(self, identity: bytes) -> list[list[tuple[int, Label]]]:
        parts: defaultdict[bytes, list[tuple[int, Label]]] = defaultdict(list)
        for used, label in enumerate(self._objects):
            if label.identity == identity:
                parts[label.key[:1]].append((used, label))
        return [parts[first] for first in sorted(parts, reverse=True)]


class ScansUnderWay:
    """Scans that have not ended, the last ``SCANS_MAX``, so that none is listed again for another."""

    def __init__(self) -> None:
        self._scans: deque[tuple[bytes, ScanUnderWay]] = deque(maxlen=SCANS_MAX)
        """By identity; several may stand at one name."""

    def take(
        self, identity: bytes, cursor: str, parts: Callable[[], Sequence[Iterable[tuple[int, Label]]]]
    ) -> tuple[list[tuple[int, Label]], str]:
        """Return the next ``NAMES_MAX`` objects of a scan, each with its place in the order of use, and its cursor.

        ``parts`` are asked for where none has come to ``cursor``: the last has the first names.
        """
        place = next((each for each in self._scans if (each[0], each[1].cursor) == (identity, cursor)), None)
        if place is not None:
            self._scans.remove(place)
        scan = ScanUnderWay(cursor, parts()) if place is None else place[1]
        some = scan.take(NAMES_MAX)
        if scan.cursor:
            self._scans.append((identity, scan))
        return some, scan.cursor


class ScanUnderWay:
    """Objects of one identity, of which a scan returns some at a time, by their names; sorted by parts when reached."""

    def __init__(self, cursor: str, parts: Sequence[Iterable[tuple[int, Label]]]) -> None:
        """The last of ``parts`` has the first names; an object comes with its place in the order of use."""
        self.cursor = cursor
        """Name that was returned last; empty once all are."""
        self._parts = list(parts)
        self._rest: list[tuple[str, int, Label]] = []
        """Sorted, the next one last."""

    def take(self, count: int) -> list[tuple[int, Label]]:
        """Return the next objects, each with its place in the order of use."""
        while len(self._rest) <= count and self._parts:
            part = sorted(((label.page_name, used, label) for used, label in self._parts.pop()), reverse=True)
            self._rest = [each for each in part if each[0] > self.cursor] + self._rest
        some = self._rest[: -count - 1 : -1]
        del self._rest[-count:]
        self.cursor = some[-1][0] if self._rest else ""
        return [(used, label) for _, used, label in some]
