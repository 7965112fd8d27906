"""Facts of an engine as identities: pages that another model, format or rank would misread are never found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, dtype_name, facts_of
from unified_cache.core.shards import NamedShard
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.integrations.engine_store.pools import BundleName
from unified_cache.integrations.sglang.settings import StoreSettings

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import (  # pyright: ignore[reportMissingImports]
        HiCacheStorageConfig,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host.base import HostKVCache  # pyright: ignore[reportMissingImports]

ANCHOR_POOL = "kv"
"""Pool whose pages are of tokens, others may count them otherwise; as PoolName.KV in SGLang 0.5.23."""

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
DECIDING = frozenset({ALL_PAGES, TRAILING_PAGES})
"""Hit policies that decide; as PoolHitPolicy in SGLang 0.5.23. Pools of another one, as block groups, do not."""

BUNDLE_NAME_MAX = 20
"""Letters of its first pool's name that a bundle's name begins with."""

PAGE_HASH = "sha256 of the page's tokens after the hash before, SGLang 0.5.23"
"""How the engine names a page."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that all pools of an engine have in common."""

    model: str
    weights: str
    """Digest of the checkpoint, or a revision that stands for it."""
    generation: int
    settings: tuple[tuple[str, str], ...]
    """Arguments of the server that change what pages hold, by name."""
    stage: str
    """Pipeline stage and context-parallel rank; empty for a whole model."""
    rank: str
    """The tensor-parallel rank on top of that."""

    @classmethod
    def of(
        cls,
        config: "HiCacheStorageConfig",
        settings: StoreSettings,
        model: str,
        arguments: Mapping[str, str],
        weights: str,
    ) -> "EngineFacts":
        """Take what the engine says of itself."""
        parts = [
            f"{name}{rank}of{size}"
            for name, rank, size in (
                ("pp", config.pp_rank, config.pp_size),
                ("cp", config.attn_cp_rank, config.attn_cp_size),
            )
            if size > 1
        ]
        tensor = [f"tp{config.tp_rank}of{config.tp_size}"] if config.tp_size > 1 else []
        return cls(
            model=model,
            weights=weights,
            generation=settings.generation,
            settings=tuple(sorted(arguments.items())),
            stage=".".join(parts),
            rank=".".join([*parts, *tensor]),
        )


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """Facts by which a pool's pages differ from those of another format."""

    kind: str
    """Class of the host pool."""
    layout: str
    dtype: str
    page_size: int
    buffers_bytes: tuple[int, ...]
    is_rank_own: bool
    """Whether each tensor-parallel rank has pages of its own, and not all the same."""

    @classmethod
    def of(cls, pool: "HostKVCache", buffers_bytes: tuple[int, ...], *, is_rank_own: bool) -> "PoolFacts":
        """Look at a host pool whose pages have buffers of these sizes, none for one without bytes."""
        dtype = str(pool.dtype).removeprefix("torch.")
        return cls(type(pool).__name__, pool.layout, dtype, pool.page_size, buffers_bytes, is_rank_own)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 for a pool without."""
        return sum(self.buffers_bytes)

    @property
    def bundled_by(self) -> tuple[int, bool]:
        """The same for pools that are stored together where they share keys and places."""
        return self.page_size, self.is_rank_own

    @property
    def text(self) -> str:
        """All of it, for people and for the digest."""
        sizes = dict.fromkeys(self.buffers_bytes)
        buffers = f"{len(self.buffers_bytes)} x {next(iter(sizes))}" if len(sizes) == 1 else str(self.buffers_bytes)
        return f"{self.kind} {self.layout} {self.dtype}, {self.page_size} indices, {buffers} bytes"


def span_of(transfer: "PoolTransfer") -> int:
    """Return how many pages before an end a look-up asks a pool for."""
    return SPAN_ALL if transfer.hit_policy == ALL_PAGES else max(1, len(transfer.keys or ()))


def name_bundle(engine: EngineFacts, pools: Mapping[str, PoolFacts], bundle: tuple[str, ...]) -> BundleName:
    """Name the bundle of some of an engine's pools, by facts that are the same after a restart."""
    facts = {**dict(engine.settings), "page_hash": PAGE_HASH}
    facts |= {f"pool {pool}": pools[pool].text for pool in bundle}
    identity = Identity(
        engine.model,
        revision=engine.weights,
        dtype=dtype_name(pools[bundle[0]].dtype),
        shard=NamedShard(engine.rank if any(pools[pool].is_rank_own for pool in bundle) else engine.stage),
        generation=engine.generation,
        facts=facts_of(facts),
    )
    name = _bundle_name(bundle)
    span = SPAN_ALL if bundle == (ANCHOR_POOL,) else SPAN_UNKNOWN
    component = Component(name, span, (PoolSpec(name, sum(pools[pool].page_bytes for pool in bundle)),))
    page_tokens = pools.get(ANCHOR_POOL, pools[bundle[0]]).page_size
    return BundleName(identity, ModelLayout(page_tokens, (component,)))


def _bundle_name(pools: tuple[str, ...]) -> str:
    """Return a name of letters that stores allow; which pools it is of stands in the facts."""
    # The shortest name is that of the pool that the others follow, or says most of what they have in common.
    pool = min(pools, key=lambda name: (len(name), name))
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in pool.lower())
    first = letters.strip("_") or "pool"
    return first[:32] if len(pools) == 1 else f"{first[:BUNDLE_NAME_MAX]}_and_{len(pools) - 1}_more"
