"""Pools of an engine over one engine's store: how long a prefix it can restore, and their pages there and back.

Pools may be added at any time. Pools whose pages always move together are a **bundle**, and one page of a bundle is one
object; each bundle has an identity of its own, so that a pool that is added later, such as a draft model's, leaves what
is stored of the others as it is.

A page of a pool is views of the engine's memory. An engine says where the pages of a pool lie when it is asked, which
costs it more than reading a small page costs us. Most pools lie where ``base + slot * stride`` says, for each of a
page's buffers: that is learnt once, and checked.

    buffer 0    base 0 [ slot 0 | slot 1 | slot 2 | ... ]      such as the keys of all layers
    buffer 1    base 1 [ slot 0 | slot 1 | slot 2 | ... ]      such as the values of all layers
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_ubyte
from itertools import chain
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import InputError
from unified_cache.core.page import PageKey
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL, restorable_ends
from unified_cache.integrations.engine_store.interface import EnginePage
from unified_cache.integrations.engine_store.store import EngineStore
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

Rows = tuple[memoryview, ...]
"""Bytes of one page in the engine's memory, in the order in which they are stored."""

Locate = Callable[[Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""Returns where the pages in these slots lie: addresses and sizes of all their buffers, page by page."""

PROBES_COUNT = 16
"""Slots that the rule of a pool's addresses is checked on, first and last among them."""


class PageRows(ABC):
    """Pages of one pool in an engine's memory, by slot, which are page numbers within the pool.

    A pool whose memory is not its pages' bytes hands out copies instead: it overrides all three methods.
    """

    buffers_bytes: tuple[int, ...]
    """Bytes of each buffer of a page, in order."""

    @abstractmethod
    def rows_to_store(self, slots: Sequence[int]) -> list[Rows]:
        """Return the bytes of the pages in these slots, to be read until the call that they are stored by has ended.

        Raises:
            InputError: the pool has no such slot.
        """

    def rows_to_fill(self, slots: Sequence[int]) -> list[Rows]:
        """Return writable memory for the pages of these slots: the pages themselves, unless the pool says otherwise.

        Raises:
            InputError: the pool has no such slot.
        """
        return self.rows_to_store(slots)

    def publish(self, slots: Sequence[int], rows: Sequence[Rows], filled: Sequence[bool]) -> None:
        """Make what was filled the pages of these slots; the others are as they were, or hold anything."""
        return


class AffineRows(PageRows):
    """Pages at ``base + slot * stride`` in each of their buffers. Views of memory that the caller keeps alive."""

    def __init__(self, bases: Sequence[int], strides: Sequence[int], sizes: Sequence[int], slots_count: int) -> None:
        """Take what ``learn`` found."""
        self._cuts = tuple(
            (_memory(base, (slots_count - 1) * stride + size), stride, size)
            for base, stride, size in zip(bases, strides, sizes, strict=True)
        )
        self._slots_count = slots_count
        self.buffers_bytes = tuple(sizes)

    @classmethod
    def learn(cls, locate: Locate, slots_count: int) -> "AffineRows | None":
        """Ask where some pages lie, find the rule, and check it on the others; None where they follow none."""
        if slots_count < 1:
            return None
        step = max(1, (slots_count - 1) // (PROBES_COUNT - 2))
        slots = sorted({0, min(1, slots_count - 1), *range(0, slots_count, step), slots_count - 1})
        addresses, sizes = locate(slots)
        count, rest = divmod(len(addresses), len(slots))
        if rest or not count or len(sizes) != len(addresses):
            return None
        bases, widths = addresses[:count], sizes[:count]
        strides = [after - base for base, after in zip(bases, addresses[count : 2 * count] or bases, strict=True)]
        for number, slot in enumerate(slots):
            part = slice(number * count, (number + 1) * count)
            expected = [base + slot * stride for base, stride in zip(bases, strides, strict=True)]
            if list(addresses[part]) != expected or list(sizes[part]) != list(widths):
                return None
        if min(widths) < 1 or (slots_count > 1 and any(s < w for s, w in zip(strides, widths, strict=True))):
            return None
        return cls(bases, strides, widths, slots_count)

    def rows_to_store(self, slots: Sequence[int]) -> list[Rows]:
        """Return the pages themselves; nothing is copied."""
        check_slots(slots, self._slots_count)
        if len(self._cuts) == 1:
            view, stride, size = self._cuts[0]
            return [(view[slot * stride : slot * stride + size],) for slot in slots]
        return [
            tuple([view[slot * stride : slot * stride + size] for view, stride, size in self._cuts]) for slot in slots
        ]


class AskedRows(PageRows):
    """Pages of a pool whose addresses follow no rule, or move: the engine is asked at every call."""

    def __init__(self, locate: Locate, buffers_bytes: Sequence[int], slots_count: int) -> None:
        self._locate = locate
        self._slots_count = slots_count
        self.buffers_bytes = tuple(buffers_bytes)

    def rows_to_store(self, slots: Sequence[int]) -> list[Rows]:
        """Return the pages themselves, where they lie now.

        Raises:
            InputError: the engine names other buffers for them than a page of the pool has.
        """
        check_slots(slots, self._slots_count)
        addresses, sizes = self._locate(slots) if slots else ((), ())
        if list(sizes) != [*self.buffers_bytes] * len(slots) or len(addresses) != len(sizes):
            raise InputError(
                f"expected buffers of {self.buffers_bytes} bytes for each of {len(slots)} pages, "
                f"found {len(addresses)}, of {sizes}"
            )
        views = [_memory(address, size) for address, size in zip(addresses, sizes, strict=True)]
        count = len(self.buffers_bytes)
        return [tuple(views[start : start + count]) for start in range(0, len(views), count)]


def check_slots(slots: Sequence[int], count: int) -> None:
    """Raise InputError for slots that a pool of ``count`` pages does not have."""
    if slots and not (min(slots) >= 0 and max(slots) < count):
        raise InputError(f"expected slots in [0, {count}), found {min(slots)} to {max(slots)}")


def _memory(address: int, size_bytes: int) -> memoryview:
    """View memory that somebody else owns."""
    return memoryview((c_ubyte * size_bytes).from_address(address)).cast("B")


PROBE_PAGES = 64
"""Pages of the first look at a chain; each further look is four times as long."""

PROBE_PAGES_MAX = 4096
"""Pages of the longest look."""


class BundleName(NamedTuple):
    """Identity and layout that the pages of a bundle are stored under."""

    identity: Identity
    layout: ModelLayout
    """One component of one pool: the bundle."""


class PoolNeed(NamedTuple):
    """Pages of a bundle that a resume needs."""

    pools: tuple[str, ...]
    span: int
    """Pages before the end; ``SPAN_ALL`` for all of them."""


class BundlePages(NamedTuple):
    """Pages of a bundle that one call moves; all its pools have them in the same slots."""

    pools: tuple[str, ...]
    keys: Sequence[PageKey]
    """Of pages that follow each other in a chain."""
    slots: Sequence[int]


class Restorable(NamedTuple):
    """Prefixes of a chain that a store can restore."""

    ends: list[int]
    """Every number of pages after which a resume is possible, ascending."""
    reach: dict[str, int]
    """By pool the longest prefix, in pages, that the pool alone can restore, as far as it was looked at."""

    @property
    def longest(self) -> int:
        """Pages of the longest of these prefixes; 0 if there is none."""
        return self.ends[-1] if self.ends else 0


class _Bundle(NamedTuple):
    digest: bytes
    pool: str
    sources: tuple[PageRows, ...]


class EnginePools:
    """Pools over a store. Thread-safe; no method raises on what the store does."""

    def __init__(self, store: EngineStore, name_bundle: Callable[[tuple[str, ...], Sequence[int]], BundleName]) -> None:
        """``name_bundle`` names a bundle by its pools and the bytes of a page in each; equal calls give equal names."""
        self._store = store
        self._name_bundle = name_bundle
        self._pools: dict[str, PageRows | None] = {}
        self._bundles: dict[tuple[str, ...], _Bundle] = {}
        self._guard = Lock()

    def add(self, pool: str, pages: PageRows | None) -> None:
        """Add a pool, or replace it; None for one without bytes, which is stored nowhere and always there."""
        with self._guard:
            self._pools[pool] = pages
            for pools in [pools for pools in self._bundles if pool in pools]:
                del self._bundles[pools]

    def restorable(self, keys: Sequence[PageKey], needs: Sequence[PoolNeed], held: int = 0) -> Restorable:
        """Ask the store which prefixes of the chain it can restore, up to where all pages are there.

        A chain that is not there at all costs one short look, however long it is. Of bundles that need all pages the
        caller has the first ``held`` itself; the store is not asked for these.
        """
        wanted = [(need, self._bundle(need.pools)) for need in needs if self._stored(need.pools)]
        if any(bundle is None for _, bundle in wanted) or not wanted or not keys:
            return Restorable([], {})
        due_s = self._store.due_s()
        bundles = [(need, bundle) for need, bundle in wanted if bundle is not None]
        whole = [(need, bundle) for need, bundle in bundles if need.span >= SPAN_ALL]
        tails = [(need, bundle) for need, bundle in bundles if need.span < SPAN_ALL]
        if held:
            prefixes = [held + pages for pages in self._prefixes(keys[held:], [bundle for _, bundle in whole], due_s)]
            present = self._present(keys[: min(prefixes, default=0)], [bundle for _, bundle in tails], due_s)
        else:
            prefixes, present = self._looked_up(
                keys, [bundle for _, bundle in whole], [bundle for _, bundle in tails], due_s
            )
        reach: dict[str, int] = {}
        for (need, _), pages in zip(whole, prefixes, strict=True):
            reach.update(dict.fromkeys(need.pools, pages))
        count = min(prefixes, default=len(keys))
        if not count:
            return Restorable([], reach)
        ok: npt.NDArray[np.bool_] = np.ones(count, np.bool_)
        for (need, _), row in zip(tails, present, strict=True):
            ends = restorable_ends([need.span], [~row], count)
            reach.update(dict.fromkeys(need.pools, _last(ends)))
            ok &= ends
        return Restorable((np.flatnonzero(ok) + 1).tolist(), reach)

    def get(self, batch: Sequence[BundlePages]) -> list[list[bool]]:
        """Fill the pages of each bundle by one call; return for each page whether it is what its key names."""
        move = self._move(batch, is_read=True)
        return move.results(self._store.get(move.pages))

    def put(self, batch: Sequence[BundlePages]) -> list[list[bool]]:
        """Store the pages of each bundle by one call; return for each page whether the store has it now."""
        move = self._move(batch, is_read=False)
        return move.results(self._store.put(move.pages))

    def start_get(self, batch: Sequence[BundlePages], on_end: Callable[[list[list[bool]]], None]) -> None:
        """Begin what ``get`` does, and hand its result on; slots are the caller's again then."""
        move = self._move(batch, is_read=True)
        self._store.start(Method.GET, move.pages, lambda found: on_end(move.results(found)))

    def start_put(self, batch: Sequence[BundlePages], on_end: Callable[[list[list[bool]]], None]) -> None:
        """Begin what ``put`` does, and hand its result on; slots are the caller's again then."""
        move = self._move(batch, is_read=False)
        self._store.start(Method.PUT, move.pages, lambda found: on_end(move.results(found)))

    def clear(self) -> bool:
        """Remove all pages of every bundle that was named so far; return whether all are gone."""
        with self._guard:
            digests = {bundle.digest for bundle in self._bundles.values()}
        due_s, late_s = math.inf, self._store.due_s()
        is_cleared = True
        for digest in digests:
            if not self._store.clear(digest, due_s):
                is_cleared, due_s = False, late_s
        return is_cleared

    def close(self) -> None:
        """Release all pools; their pages are not found from now on. The store is the caller's to close."""
        with self._guard:
            self._pools.clear()
            self._bundles.clear()

    def _stored(self, pools: Iterable[str]) -> tuple[str, ...]:
        """Return those of the pools that are stored, or not known, in one order."""
        return tuple(sorted(pool for pool in pools if pool not in self._pools or self._pools[pool] is not None))

    def _bundle(self, pools: Iterable[str]) -> _Bundle | None:
        """Return how pages of these pools are stored; None where one is not known."""
        stored = self._stored(pools)
        known = self._bundles.get(stored)
        if known is not None:
            return known
        with self._guard:
            sources = [self._pools.get(pool) for pool in stored]
        pages = tuple(source for source in sources if source is not None)
        if len(pages) < len(stored):
            return None
        identity, layout = self._name_bundle(stored, [sum(source.buffers_bytes) for source in pages])
        self._store.remember(identity, layout)
        bundle = _Bundle(identity.digest(layout), layout.pools[0].name, pages)
        with self._guard:
            if all(self._pools.get(pool) is source for pool, source in zip(stored, sources, strict=True)):
                self._bundles[stored] = bundle
        return bundle

    def _looked_up(
        self, keys: Sequence[PageKey], whole: Sequence[_Bundle], tails: Sequence[_Bundle], due_s: float
    ) -> tuple[list[int], list[npt.NDArray[np.bool_]]]:
        """Return how many pages each bundle of ``whole`` has from the start, and which of them each of ``tails`` has.

        ``tails`` are looked at as far as all of ``whole`` have pages. The first pages of all are asked for by one call,
        which is all that most chains need: calls that wait for a disk or a service cost much more than pages.
        """
        if not whole:
            return [], self._present(keys, tails, due_s)
        first, rest = keys[:PROBE_PAGES], keys[PROBE_PAGES:]
        rows = self._present(first, [*whole, *tails], due_s)
        prefixes, present = [_run(row) for row in rows[: len(whole)]], rows[len(whole) :]
        if rest and min(prefixes) == len(first):
            further = self._prefixes(rest, whole, due_s)
            prefixes = [len(first) + run for run in further]
            beyond = self._present(rest[: min(further)], tails, due_s)
            present = [np.concatenate(pair) for pair in zip(present, beyond, strict=True)]
        count = min(prefixes)
        return prefixes, [row[:count] for row in present]

    def _prefixes(self, keys: Sequence[PageKey], bundles: Sequence[_Bundle], due_s: float) -> list[int]:
        """Return how many pages each bundle has from the start, up to where the first of them lacks one."""
        start, pages = 0, 4 * PROBE_PAGES
        while start < len(keys):
            part = keys[start : start + pages]
            found = [_run(row) for row in self._present(part, bundles, due_s)]
            if min(found) < len(part):
                return [start + run for run in found]
            start += len(part)
            pages = min(4 * pages, PROBE_PAGES_MAX)
        return [len(keys)] * len(bundles)

    def _present(
        self, keys: Sequence[PageKey], bundles: Sequence[_Bundle], due_s: float
    ) -> list[npt.NDArray[np.bool_]]:
        """Ask of every page of every bundle whether it is there, in one call for each batch of pages."""
        if not bundles or not keys:
            return [np.zeros(0, np.bool_)] * len(bundles)
        labels = [Label(bundle.digest, key, bundle.pool) for bundle in bundles for key in keys]
        found = np.fromiter(map(bool, self._store.exists(labels, due_s)), np.bool_, len(labels))
        return list(found.reshape(len(bundles), len(keys)))

    def _move(self, batch: Sequence[BundlePages], *, is_read: bool) -> "_Move":
        """Name the pages that have bytes; of what has none every page is there, and of an unknown pool none."""
        move = _Move(is_read=is_read)
        for part in batch:
            stored = self._stored(part.pools)
            bundle = self._bundle(stored) if stored and part.keys else None
            if bundle is None or len(part.slots) != len(part.keys):
                move.leave_out(part, is_there=not stored)
            else:
                move.add(part, bundle)
        return move


class _Move:
    """Pages of several bundles that are moved by one call of the store."""

    def __init__(self, *, is_read: bool) -> None:
        self.pages: list[EnginePage] = []
        self._is_read = is_read
        self._parts: list[tuple[BundlePages, Sequence[PageRows], Sequence[Sequence[Rows]], bool]] = []
        """By part of the batch: its pools and their rows, or whether pages that are not moved are there."""

    def add(self, part: BundlePages, bundle: _Bundle) -> None:
        """Move the pages of a bundle."""
        rows = [
            source.rows_to_fill(part.slots) if self._is_read else source.rows_to_store(part.slots)
            for source in bundle.sources
        ]
        whole = zip(*rows, strict=True)
        of_pages = rows[0] if len(rows) == 1 else [tuple(chain.from_iterable(of_page)) for of_page in whole]
        self.pages += [
            EnginePage(Label(bundle.digest, key, bundle.pool), of_page)
            for key, of_page in zip(part.keys, of_pages, strict=True)
        ]
        self._parts.append((part, bundle.sources, rows, False))

    def leave_out(self, part: BundlePages, *, is_there: bool) -> None:
        """Move nothing of a bundle."""
        self._parts.append((part, (), (), is_there))

    def results(self, answers: Sequence[Answer]) -> list[list[bool]]:
        """Publish the pages that were read; return by part which of its pages were moved."""
        rest = iter(answers)
        results: list[list[bool]] = []
        for part, sources, rows, is_there in self._parts:
            moved = [bool(next(rest)) if sources else is_there for _ in part.keys]
            for source, filled in zip(sources, rows if self._is_read else (), strict=False):
                source.publish(part.slots, filled, moved)
            results.append(moved)
        return results


def _run(row: npt.NDArray[np.bool_]) -> int:
    """Return how many entries from the start are True."""
    return len(row) if row.all() else int(row.argmin())


def _last(ends: npt.NDArray[np.bool_]) -> int:
    """Return the longest end that is possible, 0 if none is."""
    possible = np.flatnonzero(ends)
    return int(possible[-1]) + 1 if len(possible) else 0
