"""Contract suite of storage backends: one test for each Behavior bullet of ``Store``.

Subclass and give a fixture called ``storage`` that makes an empty backend for each test::

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self) -> Iterator[Store]:
            backend = MyStorage(...)
            yield backend
            backend.close()

The backend needs room for 256 KiB. Where it has a cap, keep that under ``ROOM_BYTES_MAX``, so that a page
beyond it can be tried. A backend that keeps names but no bytes subclasses ``KeysOnlyContract``.
"""

import hashlib
import random
import unittest
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import ClassVar

from unified_cache.components import Full
from unified_cache.core.errors import ClosedError, InputError, NotOfferedError, StorageError
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded, seal_buffers
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store, StoredObject
from unified_cache.storage_backends.wrappers.layer import StorageLayer

__all__ = ["ROOM_BYTES_MAX", "KeysOnlyContract", "StorageContract", "blank_page", "sealed_page"]

ROOM_BYTES_MAX = 1 << 20
"""Largest cap of a backend under test; one page beyond it must be declined."""

PAGE_BYTES = HEADER_BYTES + 1000
"""Not a power of two, not a multiple of a word, more than one cache line."""

POOLS = ("kv", "kv_index")

NUMBERS_MAX = 100
"""More than the pages of a pool that a store is given which does not list what it has."""

LAYOUT = ModelLayout(
    page_size=64,
    components=(Full(tuple(PoolSpec(name, PAGE_BYTES - HEADER_BYTES) for name in POOLS)),),
)
DEFAULTS = {Store.capability, Store.register, Store.touch, Store.clear, Store.scan}
"""Methods of a store that has no others: close releases nothing of theirs."""

MODEL = Identity("contract/model")
OTHER_MODEL = Identity("contract/other")


def label(number: int, pool: str = POOLS[0], model: Identity = MODEL) -> Label:
    """Name the page of that number."""
    return Label(model.digest(LAYOUT), hashlib.sha256(b"page %d" % number).digest(), pool)


def sealed_page(named: Label, page_bytes: int = PAGE_BYTES, cuts: Sequence[int] = (), salt: int = 0) -> PageIO:
    """Make a sealed page with bytes that follow from its label and ``salt``, cut into buffers at these offsets."""
    content = random.Random(repr((named, salt))).randbytes(page_bytes)  # noqa: S311 -- reproducible, not secret
    page = blank_page(named, page_bytes, cuts)
    start = 0
    for buffer in page.buffers:
        buffer[:] = content[start : start + len(buffer)]
        start += len(buffer)
    seal_buffers(page.buffers, named)
    return page


def blank_page(named: Label, page_bytes: int = PAGE_BYTES, cuts: Sequence[int] = ()) -> PageIO:
    """Make buffers of zeros to read a page into."""
    edges = [0, *cuts, page_bytes]
    sizes = [end - start for start, end in pairwise(edges)]
    return PageIO(named, tuple(memoryview(bytearray(size)) for size in sizes))


def bytes_of(page: PageIO) -> bytes:
    """Join a page's buffers, to compare."""
    return b"".join(page.buffers)


def listing(storage: Store, identity: bytes) -> Iterator[StoredObject]:
    """Scan one identity to the end; a scan that never ends fails."""
    cursor = ""
    for _ in range(10_000):
        found = storage.scan(identity, cursor)
        yield from found.objects
        cursor = found.cursor
        if not cursor:
            return
    raise AssertionError("the scan did not end")


def lists(storage: Store) -> bool:
    """Return whether a store lists what it has; it need not."""
    try:
        storage.scan(label(0).identity)
    except NotOfferedError:
        return False
    return True


def needs_listing(storage: Store) -> None:
    """Skip a promise about listings where the store has none."""
    if not lists(storage):
        raise unittest.SkipTest("the store does not list what it has")


def open_for_contract(storage: Store) -> Store:
    """Register the identities that the contract uses."""
    for model in (MODEL, OTHER_MODEL):
        storage.register(manifest_of(model, LAYOUT), {})
    return storage


def remove_all(storage: Store) -> None:
    """Remove what an earlier run has stored; from a store that does not list what it has, by name."""
    for model in (MODEL, OTHER_MODEL):
        if lists(storage):
            storage.remove([found.label for found in listing(storage, model.digest(LAYOUT))])
        else:
            storage.remove([label(number, pool, model) for number in range(NUMBERS_MAX) for pool in POOLS])


class KeysOnlyContract:
    """Tests of the promises about which pages are stored, not about their bytes."""

    def test_a_page_that_was_never_put_is_a_miss_and_its_buffers_may_hold_anything_afterwards(
        self, storage: Store
    ) -> None:
        """Ask before and after something else was put."""
        open_for_contract(storage)
        assert storage.exists([label(1)]) == [Answer.MISS]
        assert storage.get([blank_page(label(1))]) == [Answer.MISS]
        assert storage.put([sealed_page(label(2))], Level.CACHED) == [Answer.STORED]
        assert storage.exists([label(1)]) == [Answer.MISS]
        assert storage.get([blank_page(label(1))]) == [Answer.MISS]

    def test_an_object_whose_length_differs_from_the_buffers_is_a_miss_and_does_not_block_a_later_put_of_that_page(
        self, storage: Store
    ) -> None:
        """Put a page one byte short or long, ask for it twice, then put it as it should be."""
        open_for_contract(storage)
        for number, page_bytes in enumerate((PAGE_BYTES - 1, PAGE_BYTES + 1, HEADER_BYTES)):
            # A backend that knows the layout may refuse such a page.
            with suppress(StorageError):
                assert storage.put([sealed_page(label(number), page_bytes)], Level.CACHED) == [Answer.STORED]
            assert {Answer.FLAWED, Answer.MISS}.issuperset(storage.get([blank_page(label(number)) for _ in range(2)]))
            assert storage.put([sealed_page(label(number))], Level.CACHED) == [Answer.STORED]
            assert storage.get([blank_page(label(number))]) == [Answer.HIT]

    def test_a_put_that_returns_false_or_raises_has_left_nothing_half_written(self, storage: Store) -> None:
        """Put what must be declined: a page beyond the cap, a level that the backend does not honour."""
        open_for_contract(storage)
        capability = storage.capability()
        is_capped = capability.bytes_max is not None and capability.bytes_max <= ROOM_BYTES_MAX
        if not is_capped and capability.durable:
            raise unittest.SkipTest("nothing that this backend must decline, or too much to try")
        if capability.bytes_max is not None and is_capped:
            large_bytes = capability.bytes_max + 1
            assert storage.put([sealed_page(label(1), large_bytes)], Level.CACHED) == [Answer.DECLINED]
            assert storage.get([blank_page(label(1), large_bytes)]) == [Answer.MISS]
        if not capability.durable:
            try:
                storage.put([sealed_page(label(1))], Level.DURABLE)
            except StorageError:
                pass
            else:
                raise AssertionError("a put at a level that the backend does not honour must raise")
        assert storage.exists([label(1)]) == [Answer.MISS]
        assert storage.get([blank_page(label(1))]) == [Answer.MISS]
        assert not lists(storage) or list(listing(storage, label(1).identity)) == []

    def test_results_stand_in_the_order_of_the_pages_asked_for_one_for_each(self, storage: Store) -> None:
        """Ask for stored and absent pages mixed, and for one page twice."""
        open_for_contract(storage)
        stored = [label(number) for number in (5, 1, 3)]
        assert storage.put([sealed_page(named) for named in stored], Level.CACHED) == [Answer.STORED] * 3
        asked = [label(number) for number in (0, 1, 2, 3, 4, 5, 5, 6)]
        expected = Answer.of_reads(named in stored for named in asked)
        assert storage.exists(asked) == expected
        assert storage.get([blank_page(named) for named in asked]) == expected

    def test_an_empty_batch_is_no_work(self, storage: Store) -> None:
        """Call every batched method with nothing."""
        open_for_contract(storage)
        assert storage.exists([]) == []
        assert storage.get([]) == []
        assert storage.put([], Level.CACHED) == []
        storage.touch([])
        assert storage.remove([]) == 0

    def test_touch_makes_pages_as_recent_as_a_get_of_them_would_and_tolerates_absent_pages(
        self, storage: Store
    ) -> None:
        """Touch one of the oldest pages and an absent one; under a cap, put until an untouched one has to go."""
        open_for_contract(storage)
        for number in range(3):
            assert storage.put([sealed_page(label(number))], Level.CACHED) == [Answer.STORED]
        storage.touch([label(0), label(9_999)])
        assert storage.exists([label(0), label(1), label(9_999)]) == [Answer.HIT, Answer.HIT, Answer.MISS]
        assert storage.get([blank_page(label(9_999))]) == [Answer.MISS]
        bytes_max = storage.capability().bytes_max
        if bytes_max is None or bytes_max > ROOM_BYTES_MAX or not lists(storage):
            return
        object_bytes = next(listing(storage, label(0).identity)).object_bytes
        for number in range(3, bytes_max // storage.capability().taken_bytes(object_bytes) + 1):
            assert storage.put([sealed_page(label(number))], Level.CACHED) == [Answer.STORED]
        assert storage.exists([label(0), label(1)]) == [Answer.HIT, Answer.MISS], "an untouched page goes first"

    def test_remove_makes_a_page_a_miss_and_tolerates_absent_pages(self, storage: Store) -> None:
        """Remove present and absent pages together, twice."""
        open_for_contract(storage)
        storage.put([sealed_page(label(number)) for number in range(3)], Level.CACHED)
        assert storage.remove([label(0), label(7), label(2)]) == 2
        assert storage.remove([label(0), label(7), label(2)]) == 0
        assert storage.exists([label(number) for number in range(3)]) == [Answer.MISS, Answer.HIT, Answer.MISS]
        assert storage.get([blank_page(label(number)) for number in range(3)]) == [Answer.MISS, Answer.HIT, Answer.MISS]

    def test_clear_makes_every_page_of_one_identity_a_miss_and_no_page_of_another(self, storage: Store) -> None:
        """Clear twice among two identities, then put again."""
        needs_listing(open_for_contract(storage))
        mine = [label(number, pool) for number in range(20) for pool in POOLS]
        others = [label(number, model=OTHER_MODEL) for number in range(20)]
        assert all(storage.put([sealed_page(named) for named in mine + others], Level.CACHED))
        assert all(storage.get([blank_page(named) for named in mine + others]))
        assert storage.clear(mine[0].identity) >= len(mine), "one that lies in two places may count twice"
        assert storage.clear(mine[0].identity) == 0
        assert storage.exists(mine) == storage.get([blank_page(named) for named in mine]) == [Answer.MISS] * len(mine)
        assert list(listing(storage, mine[0].identity)) == []
        assert storage.exists(others) == [Answer.HIT] * len(others)
        assert storage.put([sealed_page(mine[0])], Level.CACHED) == [Answer.STORED]
        assert storage.get([blank_page(mine[0])]) == [Answer.HIT]

    def test_a_scan_lists_every_object_of_one_identity_and_of_no_other(self, storage: Store) -> None:
        """Compare two identities and two pools with what was put, sizes included: the page's, or of a coded page.

        In the order of their names, by which tools list two stores side by side.
        """
        needs_listing(open_for_contract(storage))
        mine = [label(number, pool) for number in range(20) for pool in POOLS]
        others = [label(number, model=OTHER_MODEL) for number in range(10, 30)]
        storage.put([sealed_page(named) for named in mine + others], Level.CACHED)
        storage.remove([mine[0]])
        found = list(listing(storage, mine[0].identity))
        (object_bytes,) = {each.object_bytes for each in found}
        assert object_bytes == PAGE_BYTES or may_be_coded(PAGE_BYTES - HEADER_BYTES, object_bytes)
        assert found == [StoredObject(named, object_bytes) for named in sorted(mine[1:])]
        assert len(list(listing(storage, others[0].identity))) == len(others)
        with suppress(InputError):  # of a store that needs an identity registered first
            assert list(listing(storage, hashlib.sha256(b"nobody").digest())) == []

    def test_after_close_every_method_that_a_store_has_of_its_own_raises_closed_error_and_close_twice_is_close_once(
        self, storage: Store
    ) -> None:
        """Close, close again, then try what it has of its own."""
        open_for_contract(storage)
        page = sealed_page(label(1))
        storage.put([page], Level.CACHED)
        storage.close()
        storage.close()
        bare: Store = storage
        while isinstance(bare, StorageLayer):
            bare = bare.backend
        kind = type(bare)
        if kind.close is Store.close:
            raise unittest.SkipTest("the store has nothing to let go of")
        calls: dict[object, Callable[[], object]] = {
            kind.capability: storage.capability,
            kind.register: lambda: storage.register(manifest_of(MODEL, LAYOUT), {}),
            kind.exists: lambda: storage.exists([page.label]),
            kind.get: lambda: storage.get([page]),
            kind.put: lambda: storage.put([page], Level.CACHED),
            kind.touch: lambda: storage.touch([page.label]),
            kind.remove: lambda: storage.remove([page.label]),
            kind.clear: lambda: storage.clear(page.label.identity),
            kind.scan: lambda: storage.scan(page.label.identity),
        }
        for method, call in calls.items():
            if method not in DEFAULTS:
                try:
                    call()
                except ClosedError:
                    continue
                raise AssertionError("a closed store must raise ClosedError")


class StorageContract(KeysOnlyContract):
    """Tests of every promise of the protocol."""

    rounds_of_each_thread: ClassVar[int] = 40
    """Rounds of five calls that each of eight threads makes; fewer do where a call is slow."""

    def test_a_page_that_was_put_is_got_back_byte_by_byte_whatever_the_number_of_buffers_at_either_end(
        self, storage: Store
    ) -> None:
        """Put in one, two, many and empty buffers; get in others."""
        open_for_contract(storage)
        cuttings = ((), (HEADER_BYTES,), (1, 2, 3), (64, 64, 500), tuple(range(0, PAGE_BYTES, 7)))
        levels = [Level.CACHED] + [Level.DURABLE] * storage.capability().durable
        number = 0
        for level in levels:
            for put_cuts in cuttings:
                for get_cuts in cuttings:
                    number += 1
                    page = sealed_page(label(number), cuts=put_cuts)
                    found = blank_page(label(number), cuts=get_cuts)
                    assert storage.put([page], level) == [Answer.STORED]
                    assert storage.get([found]) == [Answer.HIT]
                    assert bytes_of(found) == bytes_of(page)

    def test_a_put_of_a_page_that_exists_changes_nothing_and_counts_as_stored(self, storage: Store) -> None:
        """Put other bytes of equal length under the same label, and a label twice in a batch, at each level."""
        open_for_contract(storage)
        first = sealed_page(label(1))
        assert storage.put([first], Level.CACHED) == [Answer.STORED]
        for level in [Level.CACHED] + [Level.DURABLE] * storage.capability().durable:
            others = [sealed_page(label(1), salt=1), sealed_page(label(1), salt=2)]
            assert storage.put(others, level) == [Answer.STORED, Answer.STORED]
            found = blank_page(label(1))
            assert storage.get([found]) == [Answer.HIT]
            assert bytes_of(found) == bytes_of(first)
            assert not lists(storage) or len(list(listing(storage, label(1).identity))) == 1

    def test_pages_of_different_identities_keys_or_pools_never_mix(self, storage: Store) -> None:
        """Store all but one of a cube of labels, and read them all back."""
        open_for_contract(storage)
        labels = [label(n, pool, model) for n in range(3) for pool in POOLS for model in (MODEL, OTHER_MODEL)]
        for absent in labels:
            pages = [sealed_page(named) for named in labels if named != absent]
            assert all(storage.put(pages, Level.CACHED))
            assert storage.get([blank_page(absent)]) == [Answer.MISS]
            found = [blank_page(page.label) for page in pages]
            assert all(storage.get(found))
            assert [bytes_of(page) for page in found] == [bytes_of(page) for page in pages]
            assert storage.remove(labels) == len(pages)

    def test_methods_may_be_called_from_several_threads_at_a_time(self, storage: Store) -> None:
        """Put, get and remove the same few pages from eight threads; every hit is right."""
        open_for_contract(storage)
        pages = [sealed_page(label(number)) for number in range(8)]
        is_listed = lists(storage)

        def use(seed: int) -> int:
            choice = random.Random(seed)  # noqa: S311 -- reproducible, not secret
            hits_count = 0
            for _ in range(self.rounds_of_each_thread):
                batch = choice.sample(pages, 3)
                storage.put(batch, Level.CACHED)
                found = [blank_page(page.label) for page in batch]
                for page, read, hit in zip(batch, found, storage.get(found), strict=True):
                    hits_count += bool(hit)
                    assert not hit or bytes_of(read) == bytes_of(page)
                storage.remove([choice.choice(pages).label])
                storage.touch([page.label for page in batch])
                storage.exists([page.label for page in pages])
                if is_listed:
                    storage.scan(pages[0].label.identity)
            return hits_count

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(use, range(8))) > 0
