"""Objects that a store holds of one identity: counted, grouped by page, read and verified; a few at a time."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from unified_cache.core.errors import LayoutError, StorageError
from unified_cache.core.page import PageKey
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Flaw, Label, is_sealed, may_be_coded, verify_buffers
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.storage_backends.protocol import (
    BATCH_BYTES,
    BATCH_OBJECTS,
    Answer,
    Contents,
    PageIO,
    Store,
    StoredObject,
    UsedBetween,
    scans,
)
from unified_cache.storage_backends.wrappers.layer import summed

POOLS_MAX = 62
"""Pools whose bits fit one int64; published models have at most eight."""

FINDINGS_MAX = 10_000
"""Flawed objects of an identity that are named, in 10 MB; the rest are counted."""


Watch = Callable[[int, int], None]
"""Called after each batch: how many objects and bytes it had."""


def unwatched(objects_count: int, object_bytes: int) -> None:
    """Report to nobody."""


@dataclass(slots=True)
class ObjectCount:
    """Number of objects and their bytes, headers included."""

    objects_count: int = 0
    object_bytes: int = 0

    def add(self, object_bytes: int, objects_count: int = 1) -> None:
        """Count objects of a length."""
        self.objects_count += objects_count
        self.object_bytes += objects_count * object_bytes

    def add_all(self, other: "ObjectCount") -> None:
        """Count what another one has."""
        self.objects_count += other.objects_count
        self.object_bytes += other.object_bytes


class ObjectPools:
    """The pools of a layout that have objects, in the order of every transfer, and a bit for each.

    A page is the set of its objects: an int whose bit ``i`` stands for the object of ``specs[i]``.
    """

    def __init__(self, identity: bytes, layout: ModelLayout) -> None:
        self._identity = identity
        with_bytes = [(component, pool) for component, pool in layout.transfer_order if pool.page_bytes]
        if len(with_bytes) > POOLS_MAX:
            raise LayoutError(f"a page has objects in at most {POOLS_MAX} pools here, found {len(with_bytes)}")
        self.specs: tuple[PoolSpec, ...] = tuple(pool for _, pool in with_bytes)
        self._bits = {pool.name: bit for bit, pool in enumerate(self.specs)}
        self._needed = [0] * len(layout.components)
        for bit, (component, _) in enumerate(with_bytes):
            self._needed[component] |= 1 << bit
        # Only the engine knows what it needs of pages whose span is not known. Pages of another size have keys of
        # their own, so Full's page is another object's; and without Full at the front there is no such rule.
        known = [component.span != SPAN_UNKNOWN for component in layout.components]
        sizes = [layout.page_size_of(component) for component in layout.components]
        has_full = layout.components[0].span == SPAN_ALL
        self._whole_only = [needed for needed, is_known in zip(self._needed, known, strict=True) if is_known]
        self._on_full = 0
        if has_full:
            for needed, is_known, size in zip(self._needed, known, sizes, strict=True):
                self._on_full |= needed if is_known and size == sizes[0] else 0

    def label(self, key: PageKey, bit: int) -> Label:
        """Name one object of a page."""
        return Label(self._identity, key, self.specs[bit].name)

    def bit_of(self, pool: str) -> int | None:
        """Return the bit of a pool, None where the layout has no such pool."""
        return self._bits.get(pool)

    def object_bytes(self, bit: int) -> int:
        """Return the length of an object: header and payload."""
        return HEADER_BYTES + self.specs[bit].page_bytes

    def component_bits(self, component: int) -> int:
        """Return the bits of one component's pools; 0 for a component without bytes."""
        return self._needed[component]

    def misfit(self, found: StoredObject) -> str | None:
        """Return why an object can never be a hit; None where its pool and its length are right."""
        bit = self._bits.get(found.label.pool)
        if bit is None:
            return "its layout has no such pool"
        if not self.may_fit(bit, found.object_bytes):
            return f"it has {found.object_bytes} bytes, not {self.object_bytes(bit)}"
        return None

    def may_fit(self, bit: int, object_bytes: int) -> bool:
        """Return whether an object of that length may be a page of a pool, as it is, compressed or encrypted."""
        return object_bytes == self.object_bytes(bit) or may_be_coded(self.specs[bit].page_bytes, object_bytes)

    def useless(self, present: int) -> int:
        """Return the objects of a page that no engine can use as long as its other objects are missing.

        A component's page counts only with all of its pools, and only on Full's page; of a component whose span is not
        known, any object may count.
        """
        useless = present & self._on_full if self._needed[0] & ~present else 0
        for needed in self._whole_only:
            if needed & ~present:
                useless |= present & needed
        return useless


class ListedPage(NamedTuple):
    """One page of a listing."""

    key: PageKey
    present: int
    """The set of its objects, see ``ObjectPools``."""
    misfits: Sequence[StoredObject]
    """Objects that no engine of this identity asks for, or could use."""


def listed(storage: Store, identity: bytes, cursor: str = "", watch: Watch = unwatched) -> Iterator[list[StoredObject]]:
    """Yield the objects of an identity, a bounded number at a time."""
    for found in scans(storage, identity, cursor):
        watch(len(found.objects), sum(each.object_bytes for each in found.objects))
        yield found.objects


def count_objects(storage: Store, identity: bytes, watch: Watch = unwatched) -> Contents:
    """Count the objects of an identity; one scan where the store cannot. No reads."""
    known = storage.contents(identity)
    if known is not None:
        total = total_of([known])
        watch(total.objects_count, total.object_bytes)
        return known
    counts: Counter[tuple[str, int]] = Counter()
    used: UsedBetween | None = None
    for found in scans(storage, identity):
        watch(len(found.objects), sum(each.object_bytes for each in found.objects))
        counts.update((each.label.pool, each.object_bytes) for each in found.objects)
        if found.is_timed and found.used:
            times = (*found.used, *(used or ()))
            used = UsedBetween(min(times), max(times))
    return Contents(counts, used)


def pools_of(contents: Contents) -> dict[str, ObjectCount]:
    """Add up the objects of each pool, in the order of their names."""
    pools: defaultdict[str, ObjectCount] = defaultdict(ObjectCount)
    for (pool, object_bytes), objects_count in contents.counts.items():
        pools[pool].add(object_bytes, objects_count)
    return dict(sorted(pools.items()))


def total_of(found: Iterable[Contents], taken_bytes: Callable[[int], int] = int) -> ObjectCount:
    """Add up the objects of several identities, and their bytes, or what those take."""
    total = ObjectCount()
    for contents in found:
        for (_, object_bytes), objects_count in contents.counts.items():
            total.add(taken_bytes(object_bytes), objects_count)
    return total


def pages_of(storage: Store, identity: bytes, pools: ObjectPools, watch: Watch = unwatched) -> Iterator[ListedPage]:
    """Yield the pages of an identity in the order of their keys. One scan, no reads.

    Raises:
        StorageError: the store does not list in the order of names, so that nobody knows what a page has.
    """
    objects = (each for some in listed(storage, identity, watch=watch) for each in some)
    last = b""
    for key, of_page in groupby(objects, key=attrgetter("label.key")):
        if key <= last:
            name = storage.capability().name
            raise StorageError(
                f"a scan of {name} must list in the order of names, found {key.hex()} after {last.hex()}",
                retryable=False,
            )
        last = key
        present = 0
        misfits: list[StoredObject] = []
        for found in of_page:
            bit = pools.bit_of(found.label.pool)
            if bit is None or not pools.may_fit(bit, found.object_bytes):
                misfits.append(found)
            else:
                present |= 1 << bit
        yield ListedPage(key, present, misfits)


def batches(objects: Iterable[StoredObject]) -> Iterator[list[StoredObject]]:
    """Cut a run of objects so that each batch is bounded in number and in bytes."""
    batch: list[StoredObject] = []
    batch_bytes = 0
    for found in objects:
        if batch and (len(batch) == BATCH_OBJECTS or batch_bytes + found.object_bytes > BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(found)
        batch_bytes += found.object_bytes
    if batch:
        yield batch


class ReadObject(NamedTuple):
    """One object that was read. The page's buffers hold it if it is sound; otherwise their content is undefined."""

    page: PageIO
    object_bytes: int
    outcome: Answer
    """HIT where its seal and checksum hold for the page that its name says; MISS where it was removed meanwhile.

    FLAWED where they do not hold, or it has a wrong pool or length; UNAVAILABLE where the store cannot read it.
    """
    reason: str = ""
    """Its flaw in words; empty if it is sound."""


class FlawedObject(NamedTuple):
    """An object that is flawed or cannot be read."""

    label: Label
    outcome: Answer
    reason: str


@dataclass(slots=True)
class Findings:
    """Objects that are flawed or cannot be read: all are counted, the first ``FINDINGS_MAX`` named."""

    named: dict[Label, FlawedObject] = field(default_factory=dict)
    """In the order in which they were found."""
    counts: Counter[Answer] = field(default_factory=Counter)

    def add(self, label: Label, outcome: Answer, reason: str) -> None:
        """Count an object, once as long as it is named."""
        if label not in self.named:
            self.counts[outcome] += 1
            if len(self.named) < FINDINGS_MAX:
                self.named[label] = FlawedObject(label, outcome, reason)

    @property
    def total(self) -> int:
        """Number of objects."""
        return self.counts.total()


def empty_page(found: StoredObject) -> PageIO:
    """Allocate a buffer to read an object into."""
    return PageIO(found.label, (memoryview(bytearray(found.object_bytes)),))


def read_verified(storage: Store, pages: Sequence[PageIO]) -> list[ReadObject]:
    """Read one batch and verify every page of it; nothing is removed.

    Where the batch fails for good, its pages are read one by one, so that one bad sector costs one page. Raises
    StorageError where asking again later may succeed.
    """
    asked = summed(pages)
    try:
        answers = storage.get(asked)
    except StorageError as error:
        if error.retryable:
            raise
        if len(pages) == 1:
            return [_reading(pages[0], Answer.UNAVAILABLE, str(error))]
        return [read_verified(storage, [page])[0] for page in pages]
    return [_verified(page, answer) for page, answer in zip(asked, answers, strict=True)]


def _verified(page: PageIO, answer: Answer) -> ReadObject:
    if answer is Answer.FLAWED:
        return _reading(page, Answer.FLAWED, "the store has something else in its place")
    if answer is Answer.UNAVAILABLE:
        return _reading(page, Answer.UNAVAILABLE, "the store did not give it")
    if not answer:
        return _reading(page, Answer.MISS)
    flaw = verify_buffers(page.buffers, page.label, page.checksum)
    if flaw is Flaw.FORMAT and len(page.buffers) == 1 and is_sealed(page.buffers[0], page.label):
        flaw = None
    return _reading(page, Answer.HIT) if flaw is None else _reading(page, Answer.FLAWED, flaw.value)


def _reading(page: PageIO, outcome: Answer, reason: str = "") -> ReadObject:
    return ReadObject(page, sum(buffer.nbytes for buffer in page.buffers), outcome, reason)
