"""Write locations never go stale: conversations over a device too small for them, against one that holds them all.

The engine copies what the model leaves to where a forward's metadata says, and nothing reads that but later turns. So
whoever takes a location from an earlier forward, an earlier map or another batch shows in the logits of a later turn.
``scripts.mutants`` does. Locations that are bound or padded after metadata was built are in ``tests/unit/forward``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from examples.continuous_batching import BatchingEngine, PagedWriteLocator, TierSizes, WriteLocator, WriteLocs, opened
from tests.support.exactness import is_equal, kept_by, tokens_of
from tests.support.gpu import needs_gpu
from tests.support.session import Session
from tests.unit.forward.test_graph import captured
from unified_cache.forward import (
    ForwardBatch,
    GraphBucket,
    HybridGraphBuffers,
    LayerKind,
    SwaTranslation,
    write_locs,
)
from unified_cache.integrations.transformers import KeptState
from unified_cache.testing.tiny_models import TINY_MODELS, tiny_model

FAMILIES = ("tiny-gemma3", "tiny-gpt-oss", "tiny-deepseek-v4")
"""Models with sliding windows."""
UNLIKE = ("tiny-gemma3", pytest.param("tiny-deepseek-v4", marks=pytest.mark.long))
"""Two of them that keep least alike: a window beside full attention, and compressed pools with a state each, which
computes twice as long."""
GEMMA = "tiny-gemma3"
USERS, TURNS = 2, 3
ANSWER_TOKENS = 14
"""All but two of a page of most families; each is a forward of its own."""
ROOMY, TIGHT, HOST = 60, 11, 200
"""Pages that hold all conversations, one of them, and all of them again."""
SETTLE_S = 30.0
GRAPH_BUCKETS = [GraphBucket.decode(4, ROOMY), GraphBucket.prefill(4, 256, ROOMY)]

Place = Callable[[SwaTranslation | None], WriteLocator]


@dataclass(frozen=True, eq=False)
class Talk:
    """Results of conversations: the logits of every token, and by turn the tokens reused and those from the host."""

    logits: list[torch.Tensor]
    reused: list[int]
    from_host: list[int]


def talk(place: Place, family: str = GEMMA, device_pages: int = TIGHT, kept: KeptState | None = None) -> Talk:
    """Let users take turns of two pages; the last token of an answer that the model is run on ends one, which is kept.

    Between two turns there is an idle iteration, as of a rank whose peers have work.
    """
    kept = kept or kept_by(family)
    page_size = kept.layout.page_size
    found = Talk([], [], [])

    def choose(logits: torch.Tensor) -> int:
        found.logits.append(logits.cpu())
        return int(logits.argmax())

    with opened(family, kept, TierSizes(device_pages, HOST), place=place, choose=choose) as engine:
        sessions = [Session(list(tokens_of(user, 4 * page_size + 1))) for user in range(USERS)]
        for turn in range(TURNS):
            for user, session in enumerate(sessions):
                question = list(tokens_of(10 * turn + user, 2 * page_size - ANSWER_TOKENS))
                for _ in session.stream(engine, question, ANSWER_TOKENS):
                    pass
                assert session.last is not None
                found.reused.append(session.last.reused.total)
                found.from_host.append(session.last.reused.host)
                wait_all(engine)
    return found


def wait_all(engine: BatchingEngine) -> None:
    engine.step()
    engine.cache.wait_all(SETTLE_S)
    engine.cache.check()
    assert not any(lane.out for lane in engine.cache.stats().occupancy)


@cache
def undisturbed(family: str = GEMMA) -> Talk:
    """Nothing is evicted, and so nothing comes back from the host."""
    found = talk(PagedWriteLocator, family, ROOMY)
    assert not any(found.from_host)
    return found


def is_exact(found: Talk, family: str = GEMMA) -> bool:
    """Compare every logit with the conversations that nothing disturbed; both must have been resumed alike."""
    expected = undisturbed(family)
    return found.reused == expected.reused and is_equal(found.logits, expected.logits)


def hybrid(translation: SwaTranslation | None) -> SwaTranslation:
    assert translation is not None
    return translation


# ---- load-back between the forwards of a conversation ----------------------------------------------------------


def mirrored(translation: SwaTranslation | None) -> WriteLocator:
    given = hybrid(translation)
    return PagedWriteLocator(SwaTranslation(given._map, torch.zeros_like(given._table), given.page_size))


def padded(translation: SwaTranslation | None) -> WriteLocator:
    """Pad to the next eight tokens, as ranks agree on a length, before metadata is built."""
    return PagedWriteLocator(translation, lambda count: -(-count // 8) * 8)


@pytest.mark.parametrize(
    ("family", "place"),
    [
        *((family, place) for family in FAMILIES[:2] for place in (PagedWriteLocator, mirrored, padded)),
        ("tiny-deepseek-v4", padded),
        *(pytest.param("tiny-deepseek-v4", place, marks=pytest.mark.long) for place in (PagedWriteLocator, mirrored)),
    ],
)
def test_conversations_are_exact_when_loads_rebuild_the_map_between_their_forwards(family: str, place: Place) -> None:
    found = talk(place, family)
    assert all(found.from_host[USERS:])
    assert is_exact(found, family)


# ---- graphs ------------------------------------------------------------------------------------------------------


class Graphs:
    """Forwards are replays: a graph, captured where there is CUDA, reads the locations at fixed addresses."""

    def __init__(self, translation: SwaTranslation | None) -> None:
        given = hybrid(translation)
        self._others = PagedWriteLocator(given)
        self._graphs = [CapturedWrites(bucket, given) for bucket in GRAPH_BUCKETS]

    def __call__(self, batch: ForwardBatch) -> WriteLocs:
        for graph in self._graphs:
            if graph.buffers.refill(batch):
                return graph.replayed()
        return self._others(batch)


class CapturedWrites:
    """A graph of the largest size of a bucket: it copies the locations that layers of both kinds write to."""

    def __init__(self, bucket: GraphBucket, translation: SwaTranslation) -> None:
        self.buffers = HybridGraphBuffers(bucket, translation)
        batch, metadata = self.buffers.views(bucket.tokens_max)
        full, swa = (write_locs(kind, batch, metadata, translation) for kind in (LayerKind.FULL, LayerKind.SWA))
        self._read = torch.zeros_like(full), torch.zeros_like(swa)
        self._replay = captured(lambda: self._copy(full, swa), full.device)

    def _copy(self, *locs: torch.Tensor) -> None:
        for read, written in zip(self._read, locs, strict=True):
            read.copy_(written)

    def replayed(self) -> WriteLocs:
        self._replay()
        full, swa = (read.clone() for read in self._read)
        return WriteLocs(full, swa)


@pytest.mark.parametrize("family", UNLIKE)
def test_replayed_graphs_write_where_the_batch_says(family: str) -> None:
    assert is_exact(talk(Graphs, family), family)


@needs_gpu
def test_captured_cuda_graphs_write_where_their_buffers_were_refilled_to() -> None:
    model = tiny_model(GEMMA)
    torch.nn.Module.to(model, "cuda")
    kept = KeptState.of(model, TINY_MODELS[GEMMA].page_size)
    expected = talk(PagedWriteLocator, device_pages=ROOMY, kept=kept)
    found = talk(Graphs, kept=kept)
    assert all(found.from_host[USERS:])
    assert found.reused == expected.reused
    assert is_equal(found.logits, expected.logits)
