"""Replay a trace against a cache as one engine would that serves a request at a time.

Closed loop: before a request, every transfer has settled, so a run is a function of trace and settings. Nothing
is dropped for being late.
"""

import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from unified_cache import storage_backends
from unified_cache.cache import UnifiedCache
from unified_cache.components import Full
from unified_cache.config import CacheConfig
from unified_cache.controller import InlineWorkers, Leg, Operation
from unified_cache.errors import ConfigError
from unified_cache.memory import NoBytes
from unified_cache.pool import Identity, ModelLayout, PoolSpec
from unified_cache.replay.engine import Engine, NoEngine, OracleEngine
from unified_cache.replay.result import Hits, ReplayResult, Window
from unified_cache.replay.settings import ReplaySettings, bytes_text, memory_bytes
from unified_cache.replay.trace import TraceRequest
from unified_cache.seal import HEADER_BYTES
from unified_cache.storage_backends.keys_only import KeysOnlyStorage
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.url import open_storage

__all__ = ["Replay", "Watch", "replay"]

POOL_NAME = "kv"

SETTLE_TIMEOUT_S = 600.0
"""Longest wait for the transfers of one request: gigabytes on a slow disk, and still an end."""

WINDOWS_MAX = 120
"""Points of the time series: as many as a picture can show."""

Watch = Callable[[int, float], None]
"""Told after every request how many are served, and what part of their blocks was handed back."""


class Replay:
    """A cache, the engine over it, and what has been counted so far. Use it in a ``with`` block."""

    def __init__(self, settings: ReplaySettings, cache: UnifiedCache, engine: Engine) -> None:
        """Take parts that fit each other; ``Replay.open`` puts them together."""
        self.settings = settings
        self.cache = cache
        self._engine = engine
        self._pending: Operation | None = None
        self._seen: set[int] = set()
        self.wrong_pages = 0
        self.pages_verified = 0

    @classmethod
    def open(cls, settings: ReplaySettings) -> Self:
        """Allocate the tiers and open the store.

        Raises:
            ConfigError: memory does not suffice, or the storage URL names nothing.
            StorageError: the store cannot be opened.

        """
        spec = PoolSpec(POOL_NAME, settings.page_bytes)
        layout = ModelLayout(settings.page_size, (Full((spec,)),))
        config = CacheConfig((settings.device_pages,), (settings.host_pages,))
        identity = Identity("unified-cache replay", dtype="uint8")
        if not settings.with_bytes:
            store = _keys_only(settings)
            return cls(
                settings,
                UnifiedCache.assemble(layout, config, NoBytes(), InlineWorkers(), identity, store),
                NoEngine(),
            )
        engine = OracleEngine.allocate(spec, settings.device_pages)
        storage = None if settings.storage is None else open_storage(settings.storage, bytes_max=settings.storage_bytes)
        try:
            cache = UnifiedCache.open(layout, config, [engine.pool], identity=identity, storage=storage)
        except BaseException:
            if storage is not None:
                storage.close()
            raise
        return cls(settings, cache, engine)

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
        prompt = cache.prompt(request.tokens()).head(self.settings.device_pages)
        if self._engine.verifies:
            _ = prompt.keys  # digested while the last request's pages are still on their way to storage
        self.settle()
        found = cache.match(prompt)
        device_end = found.device_end
        host_end = storage_end = found.any_end
        if self.settings.storage is not None and host_end < prompt.pages_count:
            self.settle(cache.prefetch(prompt))
            found = cache.match(prompt)
            storage_end = found.any_end
        if found.any_end > found.device_end:
            self.settle(cache.load(prompt))
            found = cache.match(prompt)
        ends = cache.resume_ends(found)
        lock = cache.lock(found)
        # [0, locked_end)            handed back: pinned on the device, and now compared with the oracle
        # [locked_end, pages_count)  computed here, then handed to the cache
        locked_end = lock.end
        if locked_end and self._engine.verifies:
            self.wrong_pages += self._engine.count_wrong(prompt.keys[:locked_end], cache.slots(lock))
            self.pages_verified += locked_end
        if locked_end < prompt.pages_count:
            slots = cache.allocate(cache.needed(locked_end, prompt.pages_count, ends))
            assert slots is not None, "nothing but this request's own pages is pinned"
            if self._engine.verifies:
                self._engine.compute(prompt.keys[locked_end:], slots[0])
            lock = cache.insert(prompt, slots, lock)
        if self.settings.host_pages:
            self._pending = cache.backup(prompt)
        cache.release(lock)
        device = min(device_end, locked_end)
        memory = min(host_end, locked_end)
        return Hits(device, memory - device, min(storage_end, locked_end) - memory)

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


def replay(trace: str, requests: Sequence[TraceRequest], settings: ReplaySettings, watch: Watch) -> ReplayResult:
    """Serve ``requests`` in their order by a cache of these sizes; ``trace`` is what the result calls them.

    Raises:
        ConfigError: memory does not suffice, or the storage URL names nothing.
        StorageError: the store cannot be opened, or failed on the way.

    """
    per_block = settings.pages_per_block
    hits: list[Hits] = []
    seen_pages: list[int] = []
    asked = handed = hit_tokens = 0
    with Replay.open(settings) as player:
        started_s = time.perf_counter()
        for request in requests:
            hit = player.serve(request)
            hits.append(hit)
            seen_pages.append(player.seen_before(request) * per_block)
            asked += len(request.hash_ids) * per_block
            handed += hit.total
            hit_tokens += min(hit.total * settings.page_size, request.input_length)
            watch(len(hits), handed / asked if asked else 0.0)
        player.settle()
        seconds = time.perf_counter() - started_s
        if settings.with_bytes:
            player.cache.check()
        stats = player.cache.stats()
        return ReplayResult(
            trace=trace,
            settings=settings,
            requests=len(requests),
            pages=asked,
            seen_pages=sum(seen_pages),
            hits=_sum(hits),
            input_tokens=sum(request.input_length for request in requests),
            hit_tokens=hit_tokens,
            pages_verified=player.pages_verified,
            wrong_pages=player.wrong_pages,
            leaked_slots=sum(occupancy.out for occupancy in stats.occupancy),
            flawed_pages=stats.flawed_pages,
            bytes_moved={leg.value: stats.traffic[leg].payload_bytes for leg in Leg},
            seconds=seconds,
            series=_series(requests, hits, seen_pages, per_block),
            environment=_environment(),
        )


def _sum(hits: Sequence[Hits]) -> Hits:
    return Hits(sum(hit.device for hit in hits), sum(hit.host for hit in hits), sum(hit.storage for hit in hits))


def _series(
    requests: Sequence[TraceRequest], hits: Sequence[Hits], seen_pages: Sequence[int], pages_per_block: int
) -> tuple[Window, ...]:
    """Sum up at most ``WINDOWS_MAX`` windows of equally many requests."""
    step = max(1, -(-len(requests) // WINDOWS_MAX))
    windows: list[Window] = []
    for start in range(0, len(requests), step):
        end = min(start + step, len(requests))
        pages = sum(len(request.hash_ids) for request in requests[start:end]) * pages_per_block
        last = requests[end - 1].timestamp
        windows.append(Window(start, end, last, pages, sum(seen_pages[start:end]), _sum(hits[start:end])))
    return tuple(windows)


def _keys_only(settings: ReplaySettings) -> StorageBackend | None:
    """Return a store of the same cap that remembers names only; the URL must be one that could be opened.

    Raises:
        ConfigError: it could not.

    """
    if settings.storage is None:
        return None
    scheme, colon, _ = settings.storage.partition(":")
    if "." not in scheme:
        try:
            known = "open_url" in vars(import_module(f"{storage_backends.__name__}.{scheme or ' '}"))
        except ImportError:
            known = False
        if not known or not colon:
            raise ConfigError(f"storage must be a URL like memory: or file:DIR, found {settings.storage!r}")
    return KeysOnlyStorage(settings.storage_bytes, {POOL_NAME: settings.page_bytes + HEADER_BYTES})


def _environment() -> dict[str, str]:
    """Say which versions ran on which machine."""
    return {
        "unified_cache": _own_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "cpu": f"{os.cpu_count()} x {_cpu_name()}",
        "memory": bytes_text(memory_bytes()),
    }


def _own_version() -> str:
    try:
        return version("unified-cache")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def _cpu_name() -> str:
    """Return what the CPU calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
