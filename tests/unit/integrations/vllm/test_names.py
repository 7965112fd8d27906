from dataclasses import replace

import pytest

from tests.support.vllm_tier import FACTS, ROW, offload_key
from unified_cache.core.errors import ConfigError
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.integrations.vllm.chunks import ChunkNames, is_stable_key
from unified_cache.integrations.vllm.facts import GroupFacts, RowShape, VllmFacts
from unified_cache.storage_backends.manifest import described_by, manifest_of


def label_of(facts: VllmFacts, row: RowShape = ROW) -> bytes:
    return ChunkNames.of(facts, row).label(offload_key(1)).identity


def test_a_group_is_a_pool_and_the_hash_the_page_key() -> None:
    names = ChunkNames.of(FACTS, ROW)
    full, window = names.label(offload_key(7, 0)), names.label(offload_key(7, 1))
    assert (full.pool, window.pool) == ("g0", "g1")
    assert full.key == window.key == offload_key(7)[:32]


def test_a_label_of_this_engine_names_its_chunk_and_no_other_s_does() -> None:
    names = ChunkNames.of(FACTS, ROW)
    for group in (0, 1):
        assert names.offload_key(names.label(offload_key(7, group))) == offload_key(7, group)
    for other in (names.renewed(7), ChunkNames.of(replace(FACTS, revision="commit 2"), ROW)):
        assert names.offload_key(other.label(offload_key(7))) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(FACTS, model="org/another"),
        replace(FACTS, revision="commit 2"),
        replace(FACTS, dtype="float16"),
        replace(FACTS, groups=FACTS.groups[:1]),
        replace(FACTS, groups=(FACTS.groups[0], GroupFacts(1, 16, 8, "SlidingWindowSpec"))),
        replace(FACTS, groups=(FACTS.groups[0], GroupFacts(1, 32, 4, "SlidingWindowSpec"))),
        replace(FACTS, groups=(GroupFacts(0, 16, SPAN_ALL, "MLAAttentionSpec"), FACTS.groups[1])),
        replace(FACTS, others={**FACTS.others, "quantization": "fp8"}),
        replace(FACTS, others={**FACTS.others, "attention backend": "triton"}),
    ],
)
def test_engines_that_differ_in_any_fact_share_no_page(other: VllmFacts) -> None:
    assert label_of(other) != label_of(FACTS)


def test_engines_whose_rows_differ_share_no_page() -> None:
    assert label_of(FACTS, RowShape(ROW.stride_bytes, ROW.payload_bytes - 8)) != label_of(FACTS)


def test_engines_with_equal_facts_share_their_pages() -> None:
    assert label_of(replace(FACTS, others=dict(sorted(FACTS.others.items())))) == label_of(FACTS)


def test_another_generation_finds_no_page_of_this_one() -> None:
    names = ChunkNames.of(FACTS, ROW)
    renewed = names.renewed(7)
    assert renewed.identity.generation == 7
    assert renewed.label(offload_key(1)) != names.label(offload_key(1))
    assert renewed.renewed(0).label(offload_key(1)) == names.label(offload_key(1))


def test_a_manifest_says_every_fact_and_every_window() -> None:
    names = ChunkNames.of(FACTS, ROW)
    described = described_by(manifest_of(names.identity, names.layout))
    assert dict(described.identity.facts)["group 1"] == "SlidingWindowSpec"
    assert dict(described.identity.facts)["hash"] == "sha256"
    assert [component.span for component in described.layout.components] == [SPAN_ALL, 4]
    assert {pool.page_bytes for pool in described.layout.pools} == {ROW.payload_bytes}


def test_a_tier_without_windows_says_so() -> None:
    names = ChunkNames.of(replace(FACTS, groups=(GroupFacts(3, 16, SPAN_UNKNOWN, "layers"),)), ROW)
    assert names.layout.components[0].hit_policy is None
    assert names.label(offload_key(1, 3)).pool == "g3"


def test_weights_without_a_revision_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="revision of org/model's weights"):
        ChunkNames.of(replace(FACTS, revision=""), ROW)


def test_a_key_of_xxhash_is_not_stable() -> None:
    assert is_stable_key(offload_key(1))
    assert not is_stable_key(offload_key(1)[16:])


def test_a_row_must_hold_the_chunk() -> None:
    with pytest.raises(ConfigError, match="a row of 4096 bytes"):
        RowShape(4096, 4097)
