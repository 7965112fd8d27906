"""Prefixes of real models' layouts in a cluster of three nodes that has lost an object, and tools without an engine."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from tests.support.mooncake import LocalCluster, open_mooncake
from tests.support.mooncake_needed import needs_mooncake
from tests.support.offline import back_up, read_back
from unified_cache.components.layouts import layout
from unified_cache.core.page import Prompt
from unified_cache.core.pool import PoolSpec
from unified_cache.core.seal import Label
from unified_cache.core.window import window
from unified_cache.storage_backends.catalog import catalog_of
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, StorageBackend
from unified_cache.storage_backends.url import open_storage

pytestmark = needs_mooncake

HEAD_PAGES, PROMPT_PAGES = 2, 4
"""Ends at which a prefix is written with all it takes to resume there: an earlier turn, and the whole prompt."""
POOL_PAGES = PROMPT_PAGES + 1

MODELS = {
    "llama-3.1-8b": 16,
    "gpt-oss-20b": 64,
    "nemotron-3-nano-30b-a3b": 64,
    "deepseek-v4-flash": 256,
}
"""Page sizes of one model for each kind: Full, Full and SWA, Full and Mamba, DeepSeek-V4's pools."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster.running(nodes=3, segment_bytes=256 << 20) as cluster:
        yield cluster


def engine_over(preset: str, storage: StorageBackend) -> ToyEngine:
    model = layout(preset, page_size=MODELS[preset])
    sizes = tuple(POOL_PAGES for _ in model.components)
    return ToyEngine(model, sizes, sizes, storage, None)


def prompt_of(toy: ToyEngine) -> Prompt:
    return toy.cache.prompt(np.arange(PROMPT_PAGES * toy.page_size, dtype=np.int32))


def back_up_turns(toy: ToyEngine, prompt: Prompt) -> None:
    """Compute a prompt in two turns, each of which is backed up."""
    for turn in (prompt.head(HEAD_PAGES), prompt):
        back_up(toy, turn)


def pages_needed(toy: ToyEngine, end: int) -> int:
    """Count the pages of all components that a resume at ``end`` needs."""
    return sum(end - window(end, span) for span in toy.spans)


def longest_legal(toy: ToyEngine, prompt: Prompt, storage: StorageBackend) -> int:
    """Find by trying every length, the longest first, what can be resumed from: every pool has its whole window."""

    def has(component: int, page: int, pool: PoolSpec) -> bool:
        return storage.exists([Label(toy.digest, prompt.keys[page], pool.name)]) == [Answer.HIT]

    for end in range(prompt.pages_count, 0, -1):
        if all(
            has(component, page, pool)
            for component, span in enumerate(toy.spans)
            for page in range(window(end, span), end)
            for pool in toy.byte_pools(component)
        ):
            return end
    return 0


@pytest.mark.parametrize("preset", MODELS)
def test_a_missing_object_shortens_the_hit_to_the_longest_legal_length(preset: str, cluster: LocalCluster) -> None:
    writer = engine_over(preset, open_mooncake(cluster))
    prompt = prompt_of(writer)
    back_up_turns(writer, prompt)
    assert writer.cache.close() == []
    storage = open_mooncake(cluster)
    for component in reversed(range(len(writer.spans))):
        # The last sidecar of the last page; of a component without sidecars, the page itself.
        sidecar = writer.byte_pools(component)[-1]
        assert storage.remove([Label(writer.digest, prompt.keys[PROMPT_PAGES - 1], sidecar.name)]) == 1
        legal = longest_legal(writer, prompt, storage)
        assert HEAD_PAGES <= legal < PROMPT_PAGES, "a short hit must differ from none, and from a whole one"
        reader = engine_over(preset, open_mooncake(cluster))
        assert read_back(reader, prompt) == (legal, pages_needed(reader, legal))
        assert reader.cache.close() == []
    storage.close()


def test_tools_find_what_the_pages_are_without_an_engine(cluster: LocalCluster) -> None:
    toy = engine_over("gpt-oss-20b", open_mooncake(cluster))
    assert toy.cache.close() == []
    storage = open_storage(cluster.url)
    found = catalog_of(storage).manifests()
    assert [manifest and manifest.model for digest, manifest in found.items() if digest == toy.digest] == ["toy"]
    assert found[toy.digest] == manifest_of(toy.cache.identity, toy.layout)
    assert catalog_of(storage).used_between(toy.digest) is None
    storage.close()
