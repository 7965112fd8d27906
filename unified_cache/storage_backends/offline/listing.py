"""Objects that a store holds of one identity: counted, grouped by page, read and verified."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unified_cache.core.errors import LayoutError, StorageError
from unified_cache.core.page import PageKey
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Flaw, Label, is_sealed, may_be_coded, verify_buffers
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.storage_backends.protocol import BATCH_BYTES, BATCH_OBJECTS, Answer, PageIO, Store, StoredObject
from unified_cache.storage_backends.wrappers.layer import summed

POOLS_MAX = 62
"""Pools whose bits fit one int64; published models have at most eight."""


Watch = Callable[[int, int], None]
"""Called after each batch: how many objects and bytes it had."""


def unwatched(objects_count: int, object_bytes: int) -> None:
    """Report to nobody."""


@dataclass(slots=True)
class ObjectCount:
    """Number of objects and their bytes, headers included."""

    objects_count: int = 0
    object_bytes: int = 0

    def add(self, object_bytes: int) -> None:
        """Count one object."""
        self.objects_count += 1
        self.object_bytes += object_bytes


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


@dataclass(slots=True)
class Inventory:
    """The pages of one identity, by key, each as the set of its objects. About 200 bytes of memory a page."""

    pools: ObjectPools
    pages: dict[PageKey, int] = field(default_factory=dict)
    misfits: list[StoredObject] = field(default_factory=list)
    """Objects that no engine of this identity asks for, or could use."""


def listed(storage: Store, identity: bytes) -> Iterator[list[StoredObject]]:
    """Yield the objects of an identity, a bounded number at a time."""
    cursor = ""
    while True:
        found = storage.scan(identity, cursor)
        yield found.objects
        if not found.cursor:
            return
        if found.cursor == cursor:
            raise StorageError(f"a scan must advance, {storage.capability().name} stays at {cursor!r}", retryable=False)
        cursor = found.cursor


def count_objects(
    storage: Store, identity: bytes, watch: Watch = unwatched, taken_bytes: Callable[[int], int] = int
) -> dict[str, ObjectCount]:
    """Count the objects of an identity by their pool, and their bytes, or what those take. One scan, no reads."""
    counts: dict[str, ObjectCount] = defaultdict(ObjectCount)
    for objects in listed(storage, identity):
        watch(len(objects), sum(found.object_bytes for found in objects))
        for found in objects:
            counts[found.label.pool].add(taken_bytes(found.object_bytes))
    return dict(counts)


def total_of(counts: Iterable[Mapping[str, ObjectCount]]) -> ObjectCount:
    """Add up what several identities have in all pools."""
    total = ObjectCount()
    for by_pool in counts:
        for count in by_pool.values():
            total.objects_count += count.objects_count
            total.object_bytes += count.object_bytes
    return total


def take_inventory(storage: Store, identity: bytes, layout: ModelLayout, watch: Watch = unwatched) -> Inventory:
    """Sort the objects of an identity by page. One scan, no reads."""
    pools = ObjectPools(identity, layout)
    inventory = Inventory(pools)
    pages = inventory.pages
    for objects in listed(storage, identity):
        watch(len(objects), sum(found.object_bytes for found in objects))
        for found in objects:
            bit = pools.bit_of(found.label.pool)
            if bit is None or not pools.may_fit(bit, found.object_bytes):
                inventory.misfits.append(found)
            else:
                key = found.label.key
                pages[key] = pages.get(key, 0) | 1 << bit
    return inventory


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
