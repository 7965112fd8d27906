"""A cache with real bytes and an oracle: what every page must hold, whoever brings it."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from tests.support.components import toy_components
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers, ThreadWorkers, Workers
from unified_cache.controller.copies.gpu import ComputeStreams
from unified_cache.controller.memory import DevicePool, TieredMemory
from unified_cache.controller.ranks.group import LocalRanks, RankGroup
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.page import DEFAULT_NAMESPACE, MediaItem, Namespace, PageKey, Prompt, TokensLike
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec, Slots, Tier
from unified_cache.core.window import window
from unified_cache.storage_backends.protocol import Store
from unified_cache.tree import Lock

IDENTITY = Identity("toy")


def toy_layout(spans: tuple[int, ...], page_size: int) -> ModelLayout:
    """Make a layout of toy components."""
    return with_toy_tensors(ModelLayout(page_size, toy_components(spans)))


def with_toy_tensors(layout: ModelLayout) -> ModelLayout:
    """Return a layout with what a ``ToyEngine``'s tensors hold of a page."""
    sizes = {pool.name: pool.page_bytes for pool in layout.pools if pool.page_bytes}
    return layout.with_tensors(
        {name: f"1 x uint8[{size - 16}], 1 x int16[4], 1 x uint8[2, 4]" for name, size in sizes.items()}
    )


def payload(key: PageKey, pool: PoolSpec, share: str = "") -> bytes:
    """Return the only right payload of the page of that key, of a rank's share of the model."""
    return hashlib.shake_128(key + f"{pool.name}{share}".encode()).digest(pool.page_bytes)


def oracle(prompt: Prompt, page: int, pool: PoolSpec, share: str = "") -> bytes:
    """Return the only right payload of a page of a prompt, of a rank's share of the model."""
    return payload(prompt.keys[page], pool, share)


class WholePromptCache(UnifiedCache):
    """A cache whose prompts are whole unless a test says otherwise: what it asks and counts are pages, not tokens."""

    def prompt(
        self,
        tokens: TokensLike,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        media: Sequence[MediaItem] = (),
        whole: bool = True,
    ) -> Prompt:
        return super().prompt(tokens, namespace, media=media, whole=whole)


@dataclass
class ToyEngine:
    """Owns device tensors, writes pages as a forward pass would, and reads them back."""

    layout: ModelLayout
    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    storage: Store | str | None
    workers: Workers | None
    identity: Identity = IDENTITY
    shares: Mapping[str, str] = field(default_factory=dict)
    """By pool: name of what this rank computes of the model, where ranks compute different shares."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    after: ComputeStreams | None = None
    """Streams that it computes on, where they are not the current one."""
    ranks: RankGroup = field(default_factory=LocalRanks)
    clock: Callable[[], float] | None = None
    """What times transfers, where it is not the machine's."""
    memory: type[TieredMemory] = TieredMemory
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields of the cache's configuration that are not as usual."""
    pools: dict[str, DevicePool] = field(init=False)
    cache: UnifiedCache = field(init=False)
    digest: bytes = field(init=False)
    """Whose pages these are."""

    def __post_init__(self) -> None:
        self.pools = {}
        for component, pages in zip(self.layout.components, self.device_pages, strict=True):
            for pool in component.pools:
                if not pool.page_bytes:
                    continue  # a logical pool: slots without bytes
                shapes = ((pages + 1, pool.page_bytes - 16), (pages + 1, 8), (pages + 1, 2, 4))
                layers = [torch.full(shape, 0xDB, dtype=torch.uint8, device=self.device) for shape in shapes]
                layers[1] = layers[1].view(torch.int16)
                self.pools[pool.name] = DevicePool(pool, layers)
        self.layout = self.layout.with_tensors({name: pool.tensors for name, pool in self.pools.items()})
        self.digest = self.identity.digest(self.layout)
        self._open(self.storage, self.workers)

    def reopen(
        self, storage: Store | str | None = None, workers: Workers | None = None, **fields: object
    ) -> UnifiedCache:
        """Put another cache over the same tensors, with fields of its configuration changed; its jobs run at once."""
        self.fields = {**self.fields, **fields}
        self._open(storage, InlineWorkers() if workers is None else workers)
        return self.cache

    def _open(self, storage: Store | str | None, workers: Workers | None) -> None:
        usual = CacheConfig(self.device_pages, self.host_pages, write=WritePolicy.ON_CALL, guard=None)
        config = replace(usual, **self.fields)  # type: ignore[arg-type]  # fields of CacheConfig by name
        pools = list(self.pools.values())
        if self.clock is None and self.memory is TieredMemory:
            self.cache = WholePromptCache.open(
                self.layout,
                config,
                pools,
                identity=self.identity,
                storage=storage,
                workers=workers,
                ranks=self.ranks,
                after=self.after,
            )
            return
        memory, clock = self.memory.fitting(self.layout, config, pools), self.clock or time.monotonic
        workers = ThreadWorkers.start() if workers is None else workers
        self.cache = WholePromptCache(self.layout, config, memory, workers, self.identity, self.ranks, clock)
        if storage is not None:
            self.cache.attach(storage)

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def spans(self) -> list[int]:
        return [component.span for component in self.layout.components]

    def byte_pools(self, component: int) -> list[PoolSpec]:
        """Return the pools of a component that hold bytes."""
        return [pool for pool in self.layout.components[component].pools if pool.page_bytes]

    def computed(self, prompt: Prompt, page: int, pool: PoolSpec) -> bytes:
        """Return the payload that this rank's forward computes for a page."""
        return oracle(prompt, page, pool, self.shares.get(pool.name, ""))

    def write(self, component: int, slot: int, prompt: Prompt, page: int) -> None:
        """Fill a device page with what a forward pass would compute; on a GPU the call returns before."""
        for pool in self.byte_pools(component):
            computed = torch.frombuffer(bytearray(self.computed(prompt, page, pool)), dtype=torch.uint8)
            device = self.pools[pool.name]
            for layer, part in zip(device.layers, computed.tensor_split(device.offsets[1:-1]), strict=True):
                layer[slot].copy_(part.pin_memory() if layer.is_cuda else part, non_blocking=True)

    def write_pages(self, component: int, slots: Slots, prompt: Prompt, start: int) -> None:
        """Fill the device slots of pages from ``start`` on; -1 for those not computed."""
        for page, slot in enumerate(slots.tolist(), start):
            if slot > 0:
                self.write(component, slot, prompt, page)

    def rows(self, pool: PoolSpec, slots: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the payloads of device pages, shape (pages, page_bytes)."""
        return np.concatenate([layer[list(slots)].cpu().numpy() for layer in self.pools[pool.name].layers], axis=1)

    def read(self, component: int, slot: int) -> list[bytes]:
        """Return the payload of a device page in every pool of a component."""
        return [self.rows(pool, [slot]).tobytes() for pool in self.byte_pools(component)]

    def verify(self, prompt: Prompt, lock: Lock) -> int:
        """Compare every page a lock makes resumable with the oracle; return how many there were."""
        count = 0
        for component in range(len(self.spans)):
            start = window(lock.end, self.spans[component])
            slots = self.cache.slots(lock, component)
            assert len(slots) == lock.end - start
            for page, slot in enumerate(slots.tolist(), start):
                if slot < 0:
                    continue
                expected = [self.computed(prompt, page, pool) for pool in self.byte_pools(component)]
                assert self.read(component, slot) == expected, "wrong bytes"
                count += 1
        return count

    def serve(self, prompt: Prompt) -> Lock | None:
        """Run a request: reuse what is on the device, compute the rest, insert it; None if there is no room."""
        cache = self.cache
        found = cache.match(prompt)
        ends = cache.checkpoint_ends(found)
        lock = cache.lock(found)
        self.verify(prompt, lock)
        fresh = cache.allocate(cache.pages_to_allocate(lock.end, prompt.pages_count, ends))
        if fresh is None:
            cache.release(lock)
            return None
        for component, slots in enumerate(fresh):
            self.write_pages(component, slots, prompt, lock.end)
        return cache.insert(prompt, fresh, lock)

    def run(self, prompt: Prompt) -> Prompt:
        """Run a request to its end: serve it and release its lock; return its prompt."""
        lock = self.serve(prompt)
        assert lock is not None
        self.cache.release(lock)
        return prompt

    def read_back(self, prompt: Prompt) -> int:
        """Compare every byte that the device can resume of a prompt with the oracle; return how many pages."""
        lock = self.cache.lock(self.cache.match(prompt))
        assert self.verify(prompt, lock) == sum(lock.end - window(lock.end, span) for span in self.spans)
        self.cache.release(lock)
        self.cache.check()
        return lock.end

    def forget(self, *tiers: Tier, components: Sequence[int] | None = None) -> None:
        """Have tiers lose all that nothing pins of components, as when others need the room.

        The device, if no tier is named, and all components, if none is.
        """
        ledger = self.cache._ledger
        for tier in tiers or (Tier.DEVICE,):
            for component in range(len(self.layout.components)) if components is None else components:
                slots = ledger.allocate(tier, component, ledger.available_pages(tier, component))
                assert slots is not None
                ledger.free(tier, component, slots)
