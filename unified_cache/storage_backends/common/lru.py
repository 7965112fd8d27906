"""LRU order and byte count of stored objects, which of them needs which page, and the choice of those to evict."""

import heapq
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from unified_cache.errors import ConfigError
from unified_cache.page import PageKey
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Answer, Scan, StoredObject
from unified_cache.window import SPAN_ALL, SPAN_UNTOLD

__all__ = ["SCAN_OBJECTS_MAX", "Chains", "Link", "LinkedPage", "SizedPage", "StoreLru", "page_bytes"]

CHAIN_PAGES_MAX = 1 << 16
"""Pages of the longest chain followed: a prompt of a million tokens in pages of sixteen."""

Link = tuple[bytes, PageKey]
"""Identity and key of a page that something needs."""


class LinkedPage(Protocol):
    """A page that knows the one before it."""

    @property
    def label(self) -> Label:
        """Name of the page."""
        ...

    @property
    def parent(self) -> PageKey | None:
        """Key of the page before it in its chain; None for a first page, or where it is not known."""
        ...


class Chains:
    """Dependencies between objects, as far as the pages that were put and read have shown them.

    An object of a pool that needs every page of a prefix needs the page before its own; one of a windowed pool needs
    its own page in the other pools, and nobody needs it. A pool of which no manifest told a span needs every page.
    Bookkeeping only, not thread-safe.
    """

    __slots__ = ("_needed_count", "_needs", "_windowed")

    def __init__(self) -> None:
        self._needs: dict[Label, Link] = {}
        self._needed_count: dict[Link, int] = {}
        self._windowed: set[tuple[bytes, str]] = set()

    def learn(self, manifest: Manifest) -> None:
        """Note which pools of an identity need the last pages of a prefix alone."""
        for component in manifest.components:
            if component.span not in (SPAN_ALL, SPAN_UNTOLD):
                self._windowed.update((manifest.identity, pool.name) for pool in component.pools)

    def link(self, page: LinkedPage) -> None:
        """Note what a page needs, until ``unlink``."""
        label = page.label
        if label in self._needs:
            return
        key = label.key if (label.identity, label.pool) in self._windowed else page.parent
        if key is None or (key == label.key and key == page.parent):
            return
        link = (label.identity, key)
        self._needs[label] = link
        self._needed_count[link] = self._needed_count.get(link, 0) + 1

    def unlink(self, label: Label) -> None:
        """Note that an object is gone."""
        link = self._needs.pop(label, None)
        if link is None:
            return
        count = self._needed_count.pop(link) - 1
        if count:
            self._needed_count[link] = count

    def need_of(self, label: Label) -> Link | None:
        """Return the page that an object needs, None where that is not known."""
        return self._needs.get(label)

    def before(self, label: Label) -> Iterator[Label]:
        """Walk from an object to the first one of its chain in the same pool, as far as links are known."""
        for _ in range(CHAIN_PAGES_MAX):
            link = self._needs.get(label)
            if link is None or link[1] == label.key:
                return
            label = Label(label.identity, link[1], label.pool)
            yield label

    def is_needed(self, label: Label, gone_count: Mapping[Link, int]) -> bool:
        """Tell whether any object needs this one, those in ``gone_count``, by the page they need, left out."""
        link = (label.identity, label.key)
        count = self._needed_count.get(link, 0)
        return count > gone_count.get(link, 0) and (label.identity, label.pool) not in self._windowed


_NBYTES = attrgetter("nbytes")

SCAN_OBJECTS_MAX = 1000
"""Objects in one answer of a scan; a listing of that size fits one message of any transport."""


class SizedPage(LinkedPage, Protocol):
    """A page that lies in memory, its header included."""

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """Memory of the page, in order."""
        ...


class StoreLru:
    """LRU order of objects with their sizes, under a cap; an object that needs a page is evicted before that page.

    Bookkeeping only: it removes nothing by itself and it is not thread-safe; the store that owns it guards it.
    """

    __slots__ = ("_objects", "bytes_max", "bytes_used", "chains")

    def __init__(self, bytes_max: int | None) -> None:
        if bytes_max is not None and bytes_max < 0:
            raise ConfigError(f"bytes_max must not be negative, found {bytes_max}")
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self.chains = Chains()
        self._objects: OrderedDict[Label, int] = OrderedDict()

    def __contains__(self, label: Label) -> bool:
        return label in self._objects

    def __len__(self) -> int:
        return len(self._objects)

    def size_of(self, label: Label) -> int | None:
        """Return the bytes of an object, None if it is not known."""
        return self._objects.get(label)

    def add(self, label: Label, object_bytes: int) -> None:
        """Make an object the most recent one, with this size from now on."""
        self.bytes_used += object_bytes - self._objects.pop(label, 0)
        self._objects[label] = object_bytes

    def touch(self, labels: Iterable[Label]) -> list[Label]:
        """Make objects the most recent ones, the last label most of all; return the unknown ones.

        Stores touch a batch in reverse order: the first pages of a chain become the most recent, so that
        prefixes age from their tail.
        """
        move_to_end = self._objects.move_to_end
        unknown: list[Label] = []
        for label in labels:
            try:
                move_to_end(label)
            except KeyError:
                unknown.append(label)
        return unknown

    def link(self, pages: Iterable[LinkedPage]) -> None:
        """Note what pages need, until they are forgotten."""
        for page in pages:
            self.chains.link(page)

    def oldest(self, count: int) -> list[Label]:
        """Return the least recently used objects, whatever needs them."""
        return list(itertools.islice(self._objects, count))

    def use(self, pages: Sequence[LinkedPage]) -> None:
        """Make known objects the most recent ones, the first page most of all, and what stands before them."""
        labels = [page.label for page in pages]
        self.touch(reversed(labels))
        if self.bytes_max is not None:
            self.link(page for page in pages if page.label in self._objects)
            self.touch_before(labels)

    def touch_before(self, labels: Sequence[Label]) -> None:
        """Make what stands before pages recent too: a caller who has the head elsewhere asks for the tail alone."""
        keys = {label.key for label in labels}
        for label in labels:
            need = self.chains.need_of(label)
            if need is not None and need[1] not in keys:
                self.touch(self.chains.before(label))

    def forget(self, label: Label) -> int:
        """Drop an object; return the bytes it had, 0 if it was not known."""
        object_bytes = self._objects.pop(label, 0)
        self.bytes_used -= object_bytes
        self.chains.unlink(label)
        return object_bytes

    def replace(self, objects: Iterable[StoredObject]) -> None:
        """Know these objects from now on and no others, the last one as the most recent."""
        former = self._objects
        self._objects = OrderedDict(objects)
        self.bytes_used = sum(self._objects.values())
        for label in former:
            if label not in self._objects:
                self.chains.unlink(label)

    def victims(self, needed_bytes: int, keep: Container[Label]) -> tuple[list[StoredObject], int]:
        """Name objects whose removal makes room for ``needed_bytes``, and the bytes still short after that.

        They are the ``least_recent`` ones.
        """
        if self.bytes_max is None:
            return [], 0
        short_bytes = self.bytes_used + needed_bytes - self.bytes_max
        if short_bytes <= 0:
            return [], 0
        if needed_bytes > self.bytes_max:
            return [], needed_bytes - self.bytes_max
        return self.least_recent(short_bytes, keep)

    def least_recent(self, short_bytes: int, keep: Container[Label]) -> tuple[list[StoredObject], int]:
        """Name objects that come to ``short_bytes``, and what is missing of that after all that may be named.

        The least recent ones, none in ``keep``, none that another object needs and that is not named before it.
        Those passed over for being needed become recent. Linear in what is named and passed over.
        """
        return self._choose(short_bytes, keep, self._objects.__getitem__)

    def least_recent_count(self, count: int, keep: Container[Label]) -> list[StoredObject]:
        """Name so many objects, or all that may be named, by the rules of ``least_recent``."""
        return self._choose(count, keep, lambda _: 1)[0]

    def _choose(
        self, short: int, keep: Container[Label], worth_of: Callable[[Label], int]
    ) -> tuple[list[StoredObject], int]:
        """Name objects until they are worth ``short``; return with them what is short after all."""
        named: list[StoredObject] = []
        gone_count: defaultdict[Link, int] = defaultdict(int)
        waiting = (label for label in self._objects if label not in keep)
        while True:
            needed: list[Label] = []
            named_before = len(named)
            for label in waiting:
                if self.chains.is_needed(label, gone_count):
                    needed.append(label)
                    continue
                named.append(StoredObject(label, self._objects[label]))
                short -= worth_of(label)
                if short <= 0:
                    break
                link = self.chains.need_of(label)
                if link is not None:
                    gone_count[link] += 1
            if short <= 0 or len(named) == named_before:
                break
            # Whoever was needed by those alone may go now, and a chain goes from its tail.
            waiting = (label for label in reversed(needed))
        self.touch(needed)
        return named, max(short, 0)

    def find(self, labels: Sequence[Label], sizes: Sequence[int]) -> list[Answer]:
        """Tell which objects are known at these sizes and make them recent; those of another size are forgotten."""
        size_of = self._objects.get
        hits: list[Answer] = []
        for label, object_bytes in zip(labels, sizes, strict=True):
            known = size_of(label)
            if known == object_bytes:
                hits.append(Answer.HIT)
            elif known is None:
                hits.append(Answer.MISS)
            else:
                hits.append(Answer.FLAWED)
                self.forget(label)
        self.touch(reversed(labels))
        return hits

    def store(self, labels: Sequence[Label], sizes: Sequence[int]) -> tuple[list[bool], list[Label]]:
        """Add a batch under the cap; return for each whether it is known now, and all that were evicted for it.

        No object of the batch is evicted for another: of a chain longer than the cap the first pages stay. An
        object known at another size is added anew.
        """
        objects = self._objects
        size_of = objects.get
        bytes_max = self.bytes_max
        stored: list[bool] = []
        evicted: list[Label] = []
        keep: set[Label] | None = None
        for label, object_bytes in zip(labels, sizes, strict=True):
            known = size_of(label)
            if known == object_bytes:
                stored.append(True)
                continue
            if known is not None:
                self.forget(label)
            if bytes_max is not None and self.bytes_used + object_bytes > bytes_max:
                keep = keep or set(labels)
                victims, short_bytes = self.victims(object_bytes, keep)
                if short_bytes:
                    stored.append(False)
                    continue
                for victim, _ in victims:
                    self.forget(victim)
                    evicted.append(victim)
            objects[label] = object_bytes
            self.bytes_used += object_bytes
            stored.append(True)
        self.touch(reversed(labels))
        return stored, evicted

    def labels_of(self, identity: bytes) -> list[Label]:
        """List the objects of one identity, the least recently used first. Linear in all objects."""
        return [label for label in self._objects if label.identity == identity]

    def scan(self, identity: bytes, cursor: str) -> Scan:
        """List objects of one identity in the order of their names, after the name in ``cursor``."""
        names = ((label.page_name, label) for label in self._objects if label.identity == identity)
        first = heapq.nsmallest(SCAN_OBJECTS_MAX, (pair for pair in names if pair[0] > cursor))
        objects = [StoredObject(label, self._objects[label]) for _, label in first]
        return Scan(objects, first[-1][0] if len(first) == SCAN_OBJECTS_MAX else "")


def page_bytes(page: SizedPage) -> int:
    """Sum up the buffers of a page."""
    buffers = page.buffers
    return buffers[0].nbytes if len(buffers) == 1 else sum(map(_NBYTES, buffers))
