"""Pages between the linker's host tier and a store, beside the engine: nobody but a look-up that asks for it waits.

fetch    a request's pages that the host tier lacks and the store has: look up, reserve, read and verify, publish
store    pages that the engine has offloaded: put as soon as a thread is free, or dropped where too many wait
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf
from threading import Lock

from unified_cache.core.page import PageKey
from unified_cache.core.pool import Slots
from unified_cache.core.window import window
from unified_cache.integrations.engine_store.pools import BundlePages, EnginePools, PoolNeed
from unified_cache.integrations.sglang.linker_tier import ComponentKeys, LinkerHostTier
from unified_cache.storage_backends.common.bounded_call import BoundedCall
from unified_cache.storage_backends.common.call_threads import CallThreads

THREADS_MAX = 3
"""Of them one at most stores, so that a fetch finds a thread."""

FETCHES_MAX = 64
"""Fetches that wait or run; a request that finds as many asks again with its next look-up."""

FETCH_PAGES = 64
"""Pages of a component that are read and published together."""

ASKED_MAX = 4096
"""Requests of which it is remembered that the store was asked."""

ASK_AGAIN_S = 1.0
"""Time after which a request that still waits asks again: the store may be back, or another engine have stored."""

ASKS_MAX = 3
"""Times that a request asks the store for one prompt."""


@dataclass(frozen=True, slots=True)
class ComponentBundles:
    """Pools of one component, by how they are stored."""

    bundles: tuple[tuple[str, ...], ...]
    """Pools that are stored together, in the order in which they are written."""
    written: tuple[tuple[str, ...], ...]
    """Those of them that this rank writes: of pages that all ranks have alike, one rank writes."""


@dataclass(slots=True)
class TierStorageCounts:
    """Pages, over all components, since the start."""

    fetched: int = 0
    not_fetched: int = 0
    """That the store had by its own word, and did not give, or that there was no room for."""
    stored: int = 0
    not_stored: int = 0
    """That the store did not take."""
    dropped: int = 0
    """That were not given to the store: too many waited, or they went for others' pages before it was their turn."""


@dataclass(frozen=True, slots=True)
class _PromptAsks:
    """Times that the store was asked for one prompt of a request."""

    key: str
    """Of the last page of the prompt."""
    count: int = 0
    last_s: float = -inf


class TierStorage:
    """Fetches and writes of one rank. ``fetch`` and ``store`` return at once; any thread may call."""

    def __init__(
        self,
        tier: LinkerHostTier,
        pools: EnginePools,
        components: Mapping[str, ComponentBundles],
        pages_max: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pages_max`` is the number of pages of the host tier, by component."""
        self._tier = tier
        self._pools = pools
        self._components = components
        self._backlog_max = sum(pages_max.values())
        self._backlog = 0
        """Pages that wait to be stored."""
        self._asked: OrderedDict[str, _PromptAsks] = OrderedDict()
        """By request."""
        self._fetches_count = 0
        self._arriving: set[tuple[str, str]] = set()
        """Component and key of pages that a fetch is reading."""
        self._counts = TierStorageCounts()
        self._clock = clock
        self._guard = Lock()
        self._threads = CallThreads("unified-cache-linker-storage", THREADS_MAX, deferrable_max=1)

    def fetch(
        self, rid: str, keys: Sequence[str], spans: Mapping[str, int], held_end: int
    ) -> "BoundedCall[None] | None":
        """Begin to fetch what would let the request resume later than at ``held_end``.

        Returned to be waited for is the first fetch of each prompt of a request. While the request is looked up again,
        the store is asked again, ``ASKS_MAX`` times with a pause between, and nobody waits.
        """
        now_s = self._clock()
        with self._guard:
            asked = self._asked.get(rid)
            if asked is None or asked.key != keys[-1]:
                asked = _PromptAsks(keys[-1])
            is_early = now_s < asked.last_s + ASK_AGAIN_S
            if is_early or asked.count >= ASKS_MAX or self._fetches_count >= FETCHES_MAX:
                return None
            self._asked[rid] = _PromptAsks(asked.key, asked.count + 1, now_s)
            self._asked.move_to_end(rid)
            if len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
            self._fetches_count += 1
        fetch = self._threads.submit(partial(self._fetch, keys, spans, held_end), self._end_fetch)
        return None if asked.count else fetch

    def store(self, keys: ComponentKeys) -> None:
        """Store pages of the host tier, those of each component in the order of their chain, as far as they stay there.

        They are pinned when it is their turn, so that those who wait keep no other page out.
        """
        written = {name: of for name, of in keys.items() if self._components[name].written}
        pages_count = sum(map(len, written.values()))
        with self._guard:
            is_taken = self._backlog + pages_count <= self._backlog_max
            if is_taken:
                self._backlog += pages_count
            else:
                self._counts.dropped += pages_count
        if is_taken and written:
            self._threads.submit(partial(self._store, written), partial(self._end_store, pages_count), is_urgent=False)

    @property
    def backlog(self) -> int:
        """Pages that wait to be stored."""
        return self._backlog

    def forget(self) -> None:
        """Forget which requests the store was asked for, since the host tier holds nothing of what it gave."""
        with self._guard:
            self._asked.clear()

    def counts(self) -> TierStorageCounts:
        """Return what was counted so far."""
        with self._guard:
            return replace(self._counts)

    def close(self, timeout_s: float) -> None:
        """Store what waits for ``timeout_s`` at most, and begin nothing more; the store's own close ends the rest."""
        self._threads.close(timeout_s)
        self._threads.withdraw_waiting()

    def _fetch(self, keys: Sequence[str], spans: Mapping[str, int], held_end: int) -> None:
        names = list(map(bytes.fromhex, keys))
        needs = [PoolNeed(pools, span) for name, span in spans.items() for pools in self._components[name].bundles]
        end = self._pools.restorable(names, needs, self._tier.held_prefix(keys, spans)).longest
        if end <= held_end:
            return
        for name, span in spans.items():
            needed = keys[window(end, span) : end]
            for start in range(0, len(needed), FETCH_PAGES):
                if not self._fetch_pages(name, needed[start : start + FETCH_PAGES]):
                    return

    def _fetch_pages(self, component: str, keys: Sequence[str]) -> bool:
        """Read the pages that are neither held nor on their way; False if one of them could not be had."""
        clears_count = self._tier.clears_count
        lacking = self._tier.lacking(component, keys)
        with self._guard:
            mine = [key for key in lacking if (component, key) not in self._arriving]
            self._arriving.update((component, key) for key in mine)
        try:
            done = self._read(component, mine, clears_count) if mine else 0
        finally:
            with self._guard:
                self._arriving.difference_update((component, key) for key in mine)
        with self._guard:
            self._counts.fetched += done
            self._counts.not_fetched += len(mine) - done
        return done == len(mine)

    def _read(self, component: str, keys: Sequence[str], clears_count: int) -> int:
        """Read pages and publish those that are there in all pools; return how many."""
        reserved = self._tier.reserve({component: len(keys)})
        if reserved is None:
            return 0
        slots = reserved[component]
        try:
            answers = self._pools.get(self._batch(self._components[component].bundles, keys, slots))
        except BaseException:
            self._tier.free(reserved)
            raise
        is_whole = [all(of_page) for of_page in zip(*answers, strict=True)]
        whole = [number for number, is_there in enumerate(is_whole) if is_there]
        torn = [number for number, is_there in enumerate(is_whole) if not is_there]
        self._tier.free({component: slots[torn]})
        self._tier.publish({component: [keys[number] for number in whole]}, {component: slots[whole]}, clears_count)
        return len(whole)

    def _store(self, keys: ComponentKeys) -> None:
        """Store what is still held of all components by one call, which waits once for a store that is frozen."""
        held = {name: self._tier.pin_held(name, of) for name, of in keys.items()}
        batches = [self._batch(self._components[name].written, *pages) for name, pages in held.items()]
        try:
            answers = iter(self._pools.put(list(chain.from_iterable(batches))))
        finally:
            self._tier.unpin({name: slots for name, (_, slots) in held.items()})
        for (name, (found, _)), batch in zip(held.items(), batches, strict=True):
            stored = sum(all(of_page) for of_page in zip(*islice(answers, len(batch)), strict=True))
            with self._guard:
                self._counts.stored += stored
                self._counts.not_stored += len(found) - stored
                self._counts.dropped += len(keys[name]) - len(found)

    @staticmethod
    def _batch(bundles: Sequence[tuple[str, ...]], keys: Sequence[str], slots: Slots) -> list[BundlePages]:
        names: list[PageKey] = list(map(bytes.fromhex, keys))
        return [BundlePages(pools, names, slots.tolist()) for pools in bundles]

    def _end_fetch(self, call: BoundedCall[None]) -> None:
        with self._guard:
            self._fetches_count -= 1

    def _end_store(self, pages_count: int, call: BoundedCall[None]) -> None:
        with self._guard:
            self._backlog -= pages_count
