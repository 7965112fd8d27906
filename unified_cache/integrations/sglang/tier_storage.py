"""Pages between the linker's host tier and a store, beside the engine: nobody but a look-up that asks for it waits.

    fetch    look up ──> reserve, read and verify, publish ──> the next ``FETCH_PAGES`` ...
    store    pin ──> put ──> unpin ──> the next pages that wait ...

A fetch brings a request's pages that the host tier lacks and the store has. What the engine has offloaded is stored one
prompt after the other, or dropped where too much waits. Each arrow is the end of a call of ``EngineStore``, whose
threads they run on.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf
from threading import Event, Lock

from unified_cache.core.page import PageKey
from unified_cache.core.pool import Slots
from unified_cache.core.window import window
from unified_cache.integrations.engine_store import EngineStore
from unified_cache.integrations.engine_store.pools import BundlePages, EnginePools, PoolNeed
from unified_cache.integrations.sglang.linker_tier import ComponentKeys, LinkerHostTier

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


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch under way."""

    end: Event
    rest: deque[tuple[str, Sequence[str]]]
    """Components and keys of the pages that are still to be read, ``FETCH_PAGES`` at a time."""


@dataclass(frozen=True, slots=True)
class _Read:
    """Pages that a fetch reads: of one component, into reserved slots of the host tier."""

    component: str
    keys: Sequence[str]
    slots: Slots
    clears_count: int


class TierStorage:
    """Fetches and writes of one rank. ``fetch`` and ``store`` return at once; any thread may call."""

    def __init__(
        self,
        tier: LinkerHostTier,
        store: EngineStore,
        pools: EnginePools,
        components: Mapping[str, ComponentBundles],
        pages_max: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pages_max`` is the number of pages of the host tier, by component."""
        self._tier = tier
        self._engine_store = store
        self._pools = pools
        self._components = components
        self._backlog_max = sum(pages_max.values())
        self._backlog: deque[ComponentKeys] = deque()
        """Pages that wait to be stored; the first are under way where ``_is_storing``."""
        self._backlog_pages = 0
        self._is_storing = False
        self._asked: OrderedDict[str, _PromptAsks] = OrderedDict()
        """By request."""
        self._fetches_count = 0
        self._arriving: set[tuple[str, str]] = set()
        """Component and key of pages that a fetch is reading."""
        self._counts = TierStorageCounts()
        self._clock = clock
        self._guard = Lock()

    def fetch(self, rid: str, keys: Sequence[str], spans: Mapping[str, int], held_end: int) -> Event | None:
        """Begin to fetch what would let the request resume later than at ``held_end``.

        Returned to be waited for is the end of the first fetch of each prompt of a request. While the request is looked
        up again, the store is asked again, ``ASKS_MAX`` times with a pause between, and nobody waits.
        """
        self._engine_store.give_up_late()
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
        fetch = _Fetch(Event(), deque())
        look_up = partial(self._look_up, fetch, list(keys), dict(spans), held_end)
        self._engine_store.run(look_up, partial(self._read_on, fetch))
        return None if asked.count else fetch.end

    def store(self, keys: ComponentKeys) -> None:
        """Store pages of the host tier, those of each component in the order of their chain, as far as they stay there.

        They are pinned when it is their turn, so that those who wait keep no other page out.
        """
        written = {name: of for name, of in keys.items() if self._components[name].written}
        pages_count = sum(map(len, written.values()))
        with self._guard:
            is_taken = self._backlog_pages + pages_count <= self._backlog_max
            if is_taken and written:
                self._backlog_pages += pages_count
                self._backlog.append(written)
            elif written:
                self._counts.dropped += pages_count
        self._engine_store.give_up_late()
        self._store_on()

    @property
    def backlog(self) -> int:
        """Pages that wait to be stored, but for those that the store is late with."""
        self._engine_store.give_up_late()
        return self._backlog_pages

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
        self._engine_store.wait_until(lambda: not self._backlog_pages and not self._fetches_count, timeout_s)
        with self._guard:
            self._backlog_pages -= sum(self._pages_count(keys) for keys in self._backlog)
            self._backlog.clear()

    def _look_up(self, fetch: _Fetch, keys: Sequence[str], spans: Mapping[str, int], held_end: int) -> None:
        """Find out what a fetch reads."""
        names = list(map(bytes.fromhex, keys))
        needs = [PoolNeed(pools, span) for name, span in spans.items() for pools in self._components[name].bundles]
        end = self._pools.restorable(names, needs, self._tier.held_prefix(keys, spans)).longest
        for name, span in spans.items() if end > held_end else ():
            needed = keys[window(end, span) : end]
            fetch.rest += [(name, needed[at : at + FETCH_PAGES]) for at in range(0, len(needed), FETCH_PAGES)]

    def _read_on(self, fetch: _Fetch) -> None:
        """Read the next pages that are neither held nor on their way; end the fetch where there are none."""
        while fetch.rest:
            component, keys = fetch.rest.popleft()
            clears_count = self._tier.clears_count
            lacking = self._tier.lacking(component, keys)
            with self._guard:
                mine = [key for key in lacking if (component, key) not in self._arriving]
                self._arriving.update((component, key) for key in mine)
            if not mine:
                continue
            reserved = self._tier.reserve({component: len(mine)})
            if reserved is None:
                self._end_read(component, mine, 0)
                break
            read = _Read(component, mine, reserved[component], clears_count)
            batch = self._batch(self._components[component].bundles, mine, read.slots)
            self._pools.start_get(batch, partial(self._end_pages, fetch, read))
            return
        with self._guard:
            self._fetches_count -= 1
        fetch.end.set()

    def _end_pages(self, fetch: _Fetch, read: _Read, answers: list[list[bool]]) -> None:
        """Publish the pages that are there in all pools; go on unless one of them could not be had."""
        is_whole = [all(of_page) for of_page in zip(*answers, strict=True)]
        whole = [number for number, is_there in enumerate(is_whole) if is_there]
        torn = [number for number, is_there in enumerate(is_whole) if not is_there]
        name = read.component
        self._tier.free({name: read.slots[torn]})
        keys = {name: [read.keys[number] for number in whole]}
        self._tier.publish(keys, {name: read.slots[whole]}, read.clears_count)
        self._end_read(name, read.keys, len(whole))
        if torn:
            fetch.rest.clear()
        self._read_on(fetch)

    def _end_read(self, component: str, keys: Sequence[str], read_count: int) -> None:
        with self._guard:
            self._arriving.difference_update((component, key) for key in keys)
            self._counts.fetched += read_count
            self._counts.not_fetched += len(keys) - read_count

    def _store_on(self) -> None:
        """Store the pages that have waited longest, unless others are under way.

        What is still held of all their components goes by one call, which waits once for a store that is frozen.
        """
        with self._guard:
            if self._is_storing or not self._backlog:
                return
            self._is_storing = True
            keys = self._backlog.popleft()
        held = {name: self._tier.pin_held(name, of) for name, of in keys.items()}
        batches = [self._batch(self._components[name].written, *pages) for name, pages in held.items()]
        self._pools.start_put(list(chain.from_iterable(batches)), partial(self._end_store, keys, held))

    def _end_store(
        self, keys: ComponentKeys, held: Mapping[str, tuple[list[str], Slots]], answers: list[list[bool]]
    ) -> None:
        self._tier.unpin({name: slots for name, (_, slots) in held.items()})
        rest = iter(answers)
        with self._guard:
            for name, (found, _) in held.items():
                of_bundles = islice(rest, len(self._components[name].written))
                stored = sum(all(of_page) for of_page in zip(*of_bundles, strict=True))
                self._counts.stored += stored
                self._counts.not_stored += len(found) - stored
                self._counts.dropped += len(keys[name]) - len(found)
            self._backlog_pages -= self._pages_count(keys)
            self._is_storing = False
        self._store_on()

    @staticmethod
    def _pages_count(keys: ComponentKeys) -> int:
        return sum(map(len, keys.values()))

    @staticmethod
    def _batch(bundles: Sequence[tuple[str, ...]], keys: Sequence[str], slots: Slots) -> list[BundlePages]:
        names: list[PageKey] = list(map(bytes.fromhex, keys))
        return [BundlePages(pools, names, slots.tolist()) for pools in bundles]
