"""Cells of a grid of tensor-parallel, pipeline-parallel and context-parallel ranks, and what their store must hold."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.support.cache import IDENTITY, ToyEngine, with_toy_tensors
from tests.support.operations import over, prompt_of_pages, serve
from unified_cache.controller import InlineWorkers, OperationState
from unified_cache.controller.ranks.group import RankGroup
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec
from unified_cache.core.shards import Extent, Shard
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.protocol import Store

PAGE = 8
PROMPT_PAGES = 4
KV_HEADS = 2
"""Fewer than the ranks of the widest cell, so that some hold replicas."""
LAYERS = 32

SHARDED = "sharded"
"""Full attention by heads, and a window."""
REPLICATED = "replicated"
"""Latent attention with an index, alike on all ranks of a stage."""
MIXED = "mixed"
"""Latent attention, and recurrent state of which every rank has its own part."""
HYBRID = "hybrid"
"""Full attention by heads, and recurrent state."""
KINDS = (SHARDED, REPLICATED, MIXED, HYBRID)


@dataclass(frozen=True, slots=True)
class GridCell:
    """One shape of a group, and the kind of model that it serves."""

    kind: str
    tensor_size: int
    stages_count: int
    context_size: int = 1
    """Of the tensor-parallel ranks, how many share the tokens of a page."""

    def __str__(self) -> str:
        return f"{self.kind} tp{self.tensor_size} pp{self.stages_count} cp{self.context_size}"

    @property
    def ranks_count(self) -> int:
        return self.tensor_size * self.stages_count

    @property
    def layout(self) -> ModelLayout:
        is_latent = self.kind in (REPLICATED, MIXED)
        full = Component("full", SPAN_ALL, (PoolSpec("kv", 64, is_latent), PoolSpec("index", 40, is_latent)))
        others = {
            SHARDED: (Component("swa", 2, (PoolSpec("swa", 48),), mapped=True),),
            REPLICATED: (),
            MIXED: (Component("state", 1, (PoolSpec("state", 48),)),),
            HYBRID: (Component("state", 1, (PoolSpec("state", 48),)),),
        }
        return with_toy_tensors(ModelLayout(PAGE, (full, *others[self.kind])))

    def shard(self, rank: int) -> Shard:
        """Return the part that a rank holds, ranks of one stage side by side."""
        stage, tensor_rank = divmod(rank, self.tensor_size)
        layers = LAYERS // self.stages_count
        extent = Extent(stage * layers, (stage + 1) * layers, LAYERS)
        heads = 1 if self.kind in (REPLICATED, MIXED) else KV_HEADS
        return Shard.of_rank(tensor_rank, self.tensor_size, heads, extent).interleaved(self.context_size)

    def identity(self, rank: int) -> Identity:
        return replace(IDENTITY, model=str(self), shard=self.shard(rank))

    def shares(self, rank: int) -> dict[str, str]:
        """Return by pool what a rank's forward computes: bytes that differ wherever ranks compute something else."""
        stage, tensor_rank = divmod(rank, self.tensor_size)
        replicas = max(1, self.tensor_size // KV_HEADS)
        tokens = tensor_rank % self.context_size
        by_kind = {
            "latent": f"{stage} {tokens}",
            "heads": f"{stage} {tokens} {tensor_rank // replicas if self.tensor_size > 1 else 'all'}",
            "own": f"{stage} {tensor_rank}",
        }
        attention = "latent" if self.kind in (REPLICATED, MIXED) else "heads"
        return {pool.name: by_kind["own" if pool.name == "state" else attention] for pool in self.layout.pools}

    def engine(self, ranks: RankGroup, storage: Store) -> ToyEngine:
        """Open the cache of one rank, with nothing in memory."""
        room = tuple(12 for _ in self.layout.components)
        identity = self.identity(ranks.rank)
        return ToyEngine(
            self.layout, room, room, storage, InlineWorkers(), identity, self.shares(ranks.rank), ranks=ranks
        )

    def back_up(self, ranks: RankGroup, storage: Store) -> None:
        """Compute a prompt and back it up, on to storage."""
        toy = self.engine(ranks, storage)
        assert over(toy.cache, toy.cache.backup(serve(toy, PROMPT_PAGES))).state is OperationState.DONE

    def resume(self, ranks: RankGroup, storage: Store) -> int:
        """Prefetch and load that prompt, verify every byte of it; return its pages."""
        toy = self.engine(ranks, storage)
        prompt = prompt_of_pages(toy.cache, PROMPT_PAGES)
        over(toy.cache, toy.cache.prefetch(prompt))
        over(toy.cache, toy.cache.load(prompt))
        lock = toy.cache.lock(toy.cache.match(prompt))
        toy.verify(prompt, lock)
        return lock.end

    def clear(self, ranks: RankGroup, storage: Store) -> int:
        """Clear what the group has in storage; return the objects that this rank removed."""
        toy = self.engine(ranks, storage)
        return over(toy.cache, toy.cache.clear_storage()).pages_count

    def objects(self) -> Counter[str]:
        """Count by pool what a store must hold once the group has backed the prompt up: each share once."""
        pages = {"kv": PROMPT_PAGES, "index": PROMPT_PAGES, "swa": 2, "state": 1}
        shares = {share for rank in range(self.ranks_count) for share in self.shares(rank).items()}
        return Counter(pool for pool, _ in shares for _ in range(pages[pool]))


def cells(ranks_count: int) -> Iterator[GridCell]:
    """Yield every cell of a group of so many ranks."""
    for tensor_size in (size for size in range(1, ranks_count + 1) if ranks_count % size == 0):
        for kind in KINDS:
            yield GridCell(kind, tensor_size, ranks_count // tensor_size)
            holders = tensor_size if kind in (REPLICATED, MIXED) else tensor_size // KV_HEADS
            for context_size in (size for size in range(2, holders + 1) if holders % size == 0):
                yield GridCell(kind, tensor_size, ranks_count // tensor_size, context_size)
