from dataclasses import replace

import pytest

from tests.support.vllm_tier import FACTS, ROW, offload_key
from unified_cache.core.errors import ConfigError
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.integrations.vllm.chunks import ChunkNames, is_stable_key
from unified_cache.integrations.vllm.facts import GroupFacts, RowShape
from unified_cache.storage_backends.manifest import described_by, manifest_of

NAMES = ChunkNames.of(FACTS, ROW)
FULL, WINDOW = FACTS.groups

OTHERS = [
    replace(FACTS, model="org/another"),
    replace(FACTS, revision="commit 2"),
    replace(FACTS, dtype="float16"),
    replace(FACTS, groups=(FULL,)),
    replace(FACTS, groups=(FULL, replace(WINDOW, span=8))),
    replace(FACTS, groups=(FULL, replace(WINDOW, tokens_per_chunk=32))),
    replace(FACTS, groups=(replace(FULL, kind="MLAAttentionSpec"), WINDOW)),
    replace(FACTS, others={**FACTS.others, "quantization": "fp8"}),
    replace(FACTS, others={**FACTS.others, "attention backend": "triton"}),
]


def test_a_group_is_a_pool_and_the_hash_the_page_key() -> None:
    full, window = NAMES.label(offload_key(7, 0)), NAMES.label(offload_key(7, 1))
    assert (full.pool, window.pool) == ("g0", "g1")
    assert full.key == window.key == offload_key(7)[:32]
    assert [NAMES.offload_key(label) for label in (full, window)] == [offload_key(7, 0), offload_key(7, 1)]


@pytest.mark.parametrize(
    "other",
    [
        *(ChunkNames.of(facts, ROW) for facts in OTHERS),
        ChunkNames.of(FACTS, replace(ROW, payload_bytes=ROW.payload_bytes - 8)),
        NAMES.renewed(7),
    ],
)
def test_engines_that_differ_in_any_fact_or_generation_share_no_page(other: ChunkNames) -> None:
    assert other.label(offload_key(1)) != NAMES.label(offload_key(1))
    assert NAMES.offload_key(other.label(offload_key(1))) is None


def test_engines_with_equal_facts_share_their_pages() -> None:
    sorted_facts = replace(FACTS, others=dict(sorted(FACTS.others.items())))
    for equal in (ChunkNames.of(sorted_facts, ROW), NAMES.renewed(7).renewed(0)):
        assert equal.label(offload_key(1)) == NAMES.label(offload_key(1))


def test_a_manifest_says_every_fact_and_every_window() -> None:
    described = described_by(manifest_of(NAMES.identity, NAMES.layout))
    assert dict(described.identity.facts)["group 1"] == "SlidingWindowSpec"
    assert dict(described.identity.facts)["hash"] == "sha256"
    assert [component.span for component in described.layout.components] == [SPAN_ALL, 4]
    assert {pool.page_bytes for pool in described.layout.pools} == {ROW.payload_bytes}


def test_a_tier_without_windows_says_so() -> None:
    names = ChunkNames.of(replace(FACTS, groups=(GroupFacts(3, 16, SPAN_UNKNOWN, "layers"),)), ROW)
    assert names.layout.components[0].hit_policy is None
    assert names.label(offload_key(1, 3)).pool == "g3"


def test_what_cannot_be_named_is_refused() -> None:
    with pytest.raises(ConfigError, match="revision of org/model's weights"):
        ChunkNames.of(replace(FACTS, revision=""), ROW)
    with pytest.raises(ConfigError, match="groups of layers"):
        ChunkNames.of(replace(FACTS, groups=()), ROW)
    with pytest.raises(ConfigError, match="a row of 4096 bytes"):
        RowShape(4096, 4097)
    assert is_stable_key(offload_key(1))
    assert not is_stable_key(offload_key(1)[16:])
