"""Replay a trace against a cache as one engine would that serves a request at a time.

Closed loop: before a request, every transfer has settled, so a run is a function of trace and settings. Nothing
is dropped for being late.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from types import TracebackType
from typing import Self

import numpy as np
import torch

from unified_cache import storage_backends
from unified_cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers, Leg, Operation
from unified_cache.errors import ConfigError
from unified_cache.memory import NoBytes
from unified_cache.page import Prompt
from unified_cache.pool import Identity, Tier
from unified_cache.replay.engine import Engine, NoEngine, OracleEngine
from unified_cache.replay.machine import bytes_text, cpu_name, memory_bytes, own_version
from unified_cache.replay.plan import Plan, Settings, component_bytes
from unified_cache.replay.result import ComponentUse, Hits, ReplayResult, Window
from unified_cache.replay.trace import TraceRequest
from unified_cache.storage_backends.keys_only import KeysOnlyStorage
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.url import open_storage
from unified_cache.tree import Lock
from unified_cache.window import window

__all__ = ["Replay", "Watch", "replay"]

SETTLE_TIMEOUT_S = 600.0
"""Longest wait for the transfers of one request: gigabytes on a slow disk, and still an end."""

WINDOWS_MAX = 120
"""Points of the time series: as many as a picture can show."""

Watch = Callable[[int, float], None]
"""Told after every request how many are served, and what part of their blocks was handed back."""


class Replay:
    """A cache, the engine over it, and what has been counted so far. Use it in a ``with`` block."""

    def __init__(self, plan: Plan, cache: UnifiedCache, engine: Engine) -> None:
        """Take parts that fit each other; ``Replay.open`` puts them together."""
        self.plan = plan
        self.cache = cache
        self._engine = engine
        self._pending: Operation | None = None
        self._seen: set[int] = set()
        self.wrong_pages = 0
        self.pages_verified = 0
        self.component_hits = [Hits() for _ in plan.layout.components]
        """By component: pages handed back, by the tier they came from."""

    @classmethod
    def open(cls, plan: Plan) -> Self:
        """Allocate the tiers and open the store.

        Raises:
            ConfigError: memory does not suffice, or the storage URL names nothing.
            StorageError: the store cannot be opened.

        """
        layout, config = plan.layout, plan.config
        identity = Identity(plan.subject, dtype="uint8")
        if not plan.with_bytes:
            store = _keys_only(plan)
            cache = UnifiedCache.assemble(layout, config, NoBytes(), InlineWorkers(), identity, store)
            return cls(plan, cache, NoEngine())
        engine = OracleEngine.allocate(layout, plan.device_pages)
        storage = None if plan.storage is None else open_storage(plan.storage, bytes_max=plan.storage_bytes)
        try:
            cache = UnifiedCache.open(layout, config, engine.pools, identity=identity, storage=storage)
        except BaseException:
            if storage is not None:
                storage.close()
            raise
        return cls(plan, cache, engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cache.close()

    def serve(self, request: TraceRequest) -> Hits:
        """Serve one request; return the pages handed back, by the tier they came from.

        The backup that it ends with settles before the next request, or in ``settle``. A request longer than the
        device pool is served and kept as far as it fits.

        Raises:
            StorageError, CopyError: a transfer failed.

        """
        cache = self.cache
        prompt = self._prompt(request)
        if self._engine.verifies:
            _ = prompt.keys  # digested while the last request's pages are still on their way to storage
        self.settle()
        found = cache.match(prompt)
        device_end = found.device_end
        host_end = storage_end = found.any_end
        arrived: tuple[list[int], ...] = ()
        if self.plan.storage is not None and host_end < prompt.pages_count:
            arrived = self._moved()
            self.settle(cache.prefetch(prompt))
            found = cache.match(prompt)
            storage_end = found.any_end
        if found.any_end > found.device_end:
            arrived = arrived or self._moved()
            self.settle(cache.load(prompt))
            found = cache.match(prompt)
        ends = cache.resume_ends(found)
        lock = cache.lock(found)
        self._count(lock, prompt, arrived)
        # [0, locked_end)            handed back: pinned on the device, and now compared with the oracle
        # [locked_end, pages_count)  computed here, then handed to the cache
        locked_end = lock.end
        if locked_end < prompt.pages_count:
            slots = cache.allocate(cache.needed(locked_end, prompt.pages_count, ends))
            assert slots is not None, "nothing but this request's own pages is pinned"
            if self._engine.verifies:
                for component, given in enumerate(slots):
                    computed = np.flatnonzero(given >= 0)
                    keys = [prompt.keys[locked_end + page] for page in computed.tolist()]
                    self._engine.compute(component, keys, given[computed])
            lock = cache.insert(prompt, slots, lock)
        if self.plan.has_host:
            self._pending = cache.backup(prompt)
        cache.release(lock)
        device = min(device_end, locked_end)
        memory = min(host_end, locked_end)
        return Hits(device, memory - device, min(storage_end, locked_end) - memory)

    def _prompt(self, request: TraceRequest) -> Prompt:
        """Return a request's prompt, as far as the device can hold it."""
        tokens = request.tokens()
        if not self.plan.padded:
            tokens = tokens[: request.input_length]
        return self.cache.prompt(tokens).head(self.plan.device_pages[0])

    def _moved(self) -> tuple[list[int], ...]:
        """Return by component the pages that have come from storage, and to the device, so far."""
        traffic = self.cache.traffic()
        return traffic[Leg.PREFETCH].component_pages, traffic[Leg.LOAD].component_pages

    def _count(self, lock: Lock, prompt: Prompt, before: tuple[list[int], ...]) -> None:
        """Book what a lock hands back of each component, and compare it with the oracle.

        ``before`` is what had moved when the request came, empty if nothing has moved for it.
        """
        now = self._moved() if before else ()
        for number, component in enumerate(self.plan.layout.components):
            start = window(lock.end, component.span)
            count = lock.end - start
            storage, loaded = (
                (after[number] - then[number] for after, then in zip(now, before, strict=True)) if now else (0, 0)
            )
            loaded = min(loaded, count)
            storage = min(storage, loaded)
            self.component_hits[number] += Hits(count - loaded, loaded - storage, storage)
            if count and self._engine.verifies:
                slots = self.cache.slots(lock, number)
                self.wrong_pages += self._engine.count_wrong(number, prompt.keys[start : lock.end], slots)
                self.pages_verified += count

    def seen_before(self, request: TraceRequest) -> int:
        """Return how many blocks of the prompt begin it as another began before; remember all of them."""
        seen = self._seen
        count = next((i for i, block in enumerate(request.hash_ids) if block not in seen), len(request.hash_ids))
        seen.update(request.hash_ids[count:])
        return count

    def settle(self, started: Operation | None = None) -> None:
        """Wait until every transfer is over.

        Raises:
            StorageError, CopyError: one failed, ``started`` or another.
            SettleTimeoutError: one does not end.

        """
        ended = self.cache.settle(SETTLE_TIMEOUT_S)
        for operation in (started, self._pending, *ended):
            if operation is not None and operation.error is not None:
                raise operation.error
        self._pending = None


def replay(trace: str, requests: Sequence[TraceRequest], settings: Settings, watch: Watch) -> ReplayResult:
    """Serve ``requests`` in their order by a cache of these sizes; ``trace`` is what the result calls them.

    Raises:
        ConfigError: memory does not suffice, or the storage URL names nothing.
        StorageError: the store cannot be opened, or failed on the way.

    """
    plan = settings.plan
    hits: list[Hits] = []
    seen_pages: list[int] = []
    pages: list[int] = []
    asked = handed = hit_tokens = 0
    with Replay.open(plan) as player:
        started_s = time.perf_counter()
        for request in requests:
            hit = player.serve(request)
            hits.append(hit)
            pages.append(plan.pages_of(request))
            seen_pages.append(min(player.seen_before(request) * plan.pages_per_block, pages[-1]))
            asked += pages[-1]
            handed += hit.total
            hit_tokens += min(hit.total * plan.layout.page_size, request.input_length)
            watch(len(hits), handed / asked if asked else 0.0)
        player.settle()
        seconds = time.perf_counter() - started_s
        if plan.with_bytes:
            player.cache.check()
        stats = player.cache.stats()
        return ReplayResult(
            trace=trace,
            settings=settings,
            requests=len(requests),
            pages=asked,
            seen_pages=sum(seen_pages),
            hits=sum(hits, Hits()),
            components=_components(player),
            input_tokens=sum(request.input_length for request in requests),
            hit_tokens=hit_tokens,
            pages_verified=player.pages_verified,
            wrong_pages=player.wrong_pages,
            leaked_slots=sum(occupancy.out for occupancy in stats.occupancy),
            flawed_pages=stats.flawed_pages,
            seconds=seconds,
            series=_series(requests, hits, seen_pages, pages),
            environment=_environment(),
        )


def _components(player: Replay) -> tuple[ComponentUse, ...]:
    """Sum up what each component held, handed back and moved."""
    plan, traffic = player.plan, player.cache.traffic()
    return tuple(
        ComponentUse(
            name=component.name,
            page_bytes=component_bytes(component),
            capacity_pages={
                Tier.DEVICE.name.lower(): plan.device_pages[number],
                Tier.HOST.name.lower(): plan.host_pages[number],
            },
            hits=player.component_hits[number],
            moved_pages={leg.value: moved.component_pages[number] for leg, moved in traffic.items()},
        )
        for number, component in enumerate(plan.true_layout.components)
    )


def _series(
    requests: Sequence[TraceRequest], hits: Sequence[Hits], seen_pages: Sequence[int], pages: Sequence[int]
) -> tuple[Window, ...]:
    """Sum up at most ``WINDOWS_MAX`` windows of equally many requests."""
    step = max(1, -(-len(requests) // WINDOWS_MAX))
    windows: list[Window] = []
    for start in range(0, len(requests), step):
        end = min(start + step, len(requests))
        last = requests[end - 1].timestamp
        asked, seen = sum(pages[start:end]), sum(seen_pages[start:end])
        windows.append(Window(start, end, last, asked, seen, sum(hits[start:end], Hits())))
    return tuple(windows)


def _keys_only(plan: Plan) -> StorageBackend | None:
    """Return a store of the same cap that remembers names only; the URL must be one that could be opened.

    Raises:
        ConfigError: it could not.

    """
    if plan.storage is None:
        return None
    scheme, colon, _ = plan.storage.partition(":")
    if "." not in scheme:
        try:
            known = "open_url" in vars(import_module(f"{storage_backends.__name__}.{scheme or ' '}"))
        except ImportError:
            known = False
        if not known or not colon:
            raise ConfigError(f"storage must be a URL like memory: or file:DIR, found {plan.storage!r}")
    return KeysOnlyStorage(plan.storage_bytes, plan.objects())


def _environment() -> dict[str, str]:
    """Say which versions ran on which machine."""
    return {
        "unified_cache": own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "cpu": f"{os.cpu_count()} x {cpu_name()}",
        "memory": bytes_text(memory_bytes()),
    }
