"""Plan of a replay: the pools and the configuration of its caches, their store, and the true sizes of its pages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from unified_cache.components import Full
from unified_cache.components.layouts import SizedLayout
from unified_cache.core.config import CacheConfig, Retention, WritePolicy
from unified_cache.core.errors import ConfigError, without_secrets
from unified_cache.core.pool import Component, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.sizes import SizedTiers, available_bytes, bytes_text
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest

DEVICE_PAGES = 2_000
HOST_PAGES = 20_000
"""Pages of the tiers where no model is named and nothing else is said."""

PAGE_BYTES = 4096 - HEADER_BYTES
"""Payload of a page where no model is named: with its header one block of most file systems."""

DEVICE_BYTES = 64 * 2**30
HOST_BYTES = 256 * 2**30
"""True bytes of a model's tiers where nothing is said: the free memory of one large GPU and its share of a host."""

SCALE = 1 / 1024
"""Share of a model's bytes that is moved: pools of terabytes fit into the memory of a laptop."""

POOL_BYTES_MIN = 64
"""Smallest payload that a page is scaled down to: enough to distinguish any two pages."""

SLOT_BYTES = 9
"""Memory of the cache for each slot, used or not: free list, state and scratch of ``SlotAllocator``."""

SEAL_BYTES = 192
"""Most that a page in host memory takes beyond its payload: header, and padding to a cache line."""

PAGES_MAX = 2**31 - 2
"""Slots are int32, and slot 0 is the padding sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """Everything that determines a run: two runs of equal plans and traces give equal results."""

    model: str | None
    """Name of the model; None for one pool of full attention."""
    layout: ModelLayout
    """Pools of this run, with payloads scaled down or not."""
    true_layout: ModelLayout
    """The same pools with the bytes that they stand for."""
    config: CacheConfig
    """That of each engine's cache. A store's trouble is the run's trouble: no guard is between them."""
    storage: str | None
    """URL of the store; None for no storage tier."""
    storage_bytes: int | None
    """Cap on the store, in bytes of this run; None for what its place has."""
    true_storage_bytes: int | None
    """True bytes that the cap stands for, headers included."""
    padded: bool
    """Whether a prompt's last block counts as a whole one, as in block-level figures, or at its true length."""
    with_bytes: bool = True
    """Whether payloads move and are verified; if not, the same code runs on names and slots alone."""
    engines: int = 1
    """Engines that are dealt the requests in turn, each with tiers of its own of these sizes, over one store."""
    explains: bool = False
    """Whether every missed token is counted by reason."""

    def __post_init__(self) -> None:
        if self.engines < 1:
            raise ConfigError(f"engines must be at least 1, found {self.engines}")
        most = max(*self.config.device_pages, *self.config.host_pages)
        if most > PAGES_MAX:
            raise ConfigError(f"a tier holds at most {PAGES_MAX} pages, found {most}")
        if self.storage_bytes is not None and self.storage_bytes < 1:
            raise ConfigError(f"storage bytes must be at least 1, found {self.storage_bytes}")
        if self.storage is None and self.storage_bytes is not None:
            raise ConfigError(f"storage bytes cap a store, found {self.storage_bytes} and no store")
        if self.storage is not None and not self.has_host:
            raise ConfigError("storage is reached through host memory, found host pages 0")

    @classmethod
    def of_pages(
        cls,
        page_size: int = BLOCK_TOKENS,
        device_pages: int = DEVICE_PAGES,
        host_pages: int = HOST_PAGES,
        storage: str | None = None,
        storage_bytes: int | None = None,
        page_bytes: int = PAGE_BYTES,
    ) -> "ReplayPlan":
        """Return the plan of one pool of full attention, its prompts padded to whole blocks as published figures are.

        Pages have ``page_size`` tokens, whatever the trace's blocks are; 0 host pages are no host tier.
        """
        layout = ModelLayout(page_size, (Full((PoolSpec("kv", page_bytes),)),))
        return cls(
            model=None,
            layout=layout,
            true_layout=layout,
            config=_config((device_pages,), (host_pages,), Retention()),
            storage=storage,
            storage_bytes=storage_bytes,
            true_storage_bytes=storage_bytes,
            padded=True,
        )

    @classmethod
    def of_model(
        cls,
        name: str,
        sized: SizedLayout,
        retention: Retention,
        device_bytes: int = DEVICE_BYTES,
        host_bytes: int = HOST_BYTES,
        storage: str | None = None,
        storage_bytes: int | None = None,
    ) -> "ReplayPlan":
        """Return the plan of a model: prompts at their true length, pages scaled, tiers split between components.

        Sizes are true bytes, those of host memory and the store with headers; 0 host bytes are no host tier.

        Raises:
            ConfigError: a tier holds too few prompts to serve any.
        """
        true = sized.layout
        run = ModelLayout(true.page_size, tuple(map(_scaled, true.components)))
        sizes = SizedTiers.of(true, retention, sized.window_tokens, name)
        no_host = (0,) * len(true.components)
        config = _config(
            sizes.device_pages(device_bytes), sizes.host_pages(host_bytes) if host_bytes else no_host, retention
        )
        run_storage_bytes = None
        if storage_bytes is not None:
            prompts = sizes.prompts("storage", storage_bytes, sealed=True)
            run_storage_bytes = int(prompts * run.prompt_bytes(sizes.typical_pages, sealed=True))
        return cls(
            model=name,
            layout=run,
            true_layout=true,
            config=config,
            storage=storage,
            storage_bytes=run_storage_bytes,
            true_storage_bytes=storage_bytes,
            padded=False,
        )

    @property
    def has_host(self) -> bool:
        """Whether there is a host tier."""
        return any(self.config.host_pages)

    def blocks_of(self, pages: int) -> float:
        """Return how many blocks of 512 tokens, in which traces are published, so many pages are."""
        return pages * self.layout.page_size / BLOCK_TOKENS

    def whole_pages(self, tokens: int) -> int:
        """Return how many whole pages so many tokens are, from the beginning of a prompt."""
        return tokens // self.layout.page_size

    def pages_of(self, request: TraceRequest) -> int:
        """Return the pages that a request asks for."""
        return self.whole_pages(len(request.hash_ids) * request.block_tokens if self.padded else request.input_length)

    def objects(self) -> dict[str, int]:
        """Return the bytes of one stored object of each pool that has bytes, header included."""
        return {pool.name: pool.page_bytes + HEADER_BYTES for pool in self.layout.pools if pool.page_bytes}

    def stored_bytes(self) -> tuple[int, ...]:
        """Return by component the bytes of one page's objects, headers included."""
        objects = self.objects()
        return tuple(sum(objects.get(pool.name, 0) for pool in each.pools) for each in self.layout.components)

    def check_memory(self) -> None:
        """Raise a ConfigError where this machine has not the memory that the tiers of a run need."""
        device_pages, host_pages = self.config.device_pages, self.config.host_pages
        engine = (sum(device_pages) + sum(host_pages)) * SLOT_BYTES
        store = 0
        if self.with_bytes:
            sizes = zip(self.layout.components, device_pages, host_pages, strict=True)
            engine += sum(_payload_bytes(component.pools, device, host) for component, device, host in sizes)
            if self.storage is not None and self.storage.startswith("memory:"):
                store = self.storage_bytes or 0
        need, have = self.engines * engine + store, available_bytes()
        if need > have:
            less = "; --no-bytes needs far less, with the same hits" if self.with_bytes else ""
            raise ConfigError(f"the tiers need {bytes_text(need)} of memory, found {bytes_text(have)} available{less}")

    def as_json(self) -> dict[str, object]:
        """Return the plan for JSON: pages by component, the bytes of the store as they were asked for."""
        names = [component.name for component in self.layout.components]
        return {
            "model": self.model,
            "page_size": self.layout.page_size,
            "device_pages": dict(zip(names, self.config.device_pages, strict=True)),
            "host_pages": dict(zip(names, self.config.host_pages, strict=True)),
            "storage": None if self.storage is None else without_secrets(self.storage),
            "storage_bytes": self.true_storage_bytes,
            "retention": asdict(self.config.retention),
            "with_bytes": self.with_bytes,
            "engines": self.engines,
            "explains": self.explains,
        }


def _config(device_pages: tuple[int, ...], host_pages: tuple[int, ...], retention: Retention) -> CacheConfig:
    """Return the configuration of a cache whose engine backs up every prompt that it has served."""
    return CacheConfig(device_pages, host_pages, retention=retention, write=WritePolicy.ON_CALL, guard=None)


def _scaled(component: Component) -> Component:
    """Return the component with smaller pages; a logical pool stays one."""
    pools = tuple(
        PoolSpec(pool.name, max(POOL_BYTES_MIN, round(pool.page_bytes * SCALE)) if pool.page_bytes else 0)
        for pool in component.pools
    )
    return replace(component, pools=pools)


def _payload_bytes(pools: Sequence[PoolSpec], device_pages: int, host_pages: int) -> int:
    on_device = (device_pages + 1) * sum(pool.page_bytes for pool in pools)
    return on_device + (host_pages + 1) * sum(pool.page_bytes + SEAL_BYTES for pool in pools if pool.page_bytes)
