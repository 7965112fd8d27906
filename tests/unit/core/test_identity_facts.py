"""Generation and facts of an identity, unknown spans, pages of other sizes: named by the digest, in the manifest."""

from dataclasses import replace

import pytest

from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.core.errors import InputError, LayoutError, StorageError
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, facts_of
from unified_cache.core.shards import Extent, Shard, TokenRuns
from unified_cache.core.window import SPAN_UNKNOWN
from unified_cache.storage_backends.manifest import described_by, manifest_of
from unified_cache.testing.storage_contract import LAYOUT, MODEL

KV, SWA = PoolSpec("kv", 64), PoolSpec("swa", 32)

FACTS = facts_of(
    {"weights": "sha256:77", "attention": {"backend": "triton", "mla": False}, "kv_bytes": 2, "draft": None}
)


def test_facts_are_sorted_text_and_leave_out_what_is_not_known() -> None:
    assert FACTS == (
        ("attention", '{"backend":"triton","mla":false}'),
        ("kv_bytes", "2"),
        ("weights", "sha256:77"),
    )


@pytest.mark.parametrize("value", [object(), {1, 2}, float, b"bytes", "\ud800"])
def test_a_fact_that_is_no_text_and_not_json_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="fact"):
        Identity("m", facts=facts_of({"kind": value}))


@pytest.mark.parametrize(
    "facts",
    [(("b", "1"), ("a", "2")), (("a", "1"), ("a", "2")), (("", "1"),), (("a",),), [("a", "1")], ("ab",), (("a", 1),)],
)
def test_facts_that_are_not_sorted_pairs_of_text_are_refused(facts: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(InputError, match="fact"):
        Identity("m", facts=facts)


def test_generation_0_without_facts_has_the_digest_of_stores_that_knew_neither() -> None:
    assert MODEL.digest(LAYOUT).hex() == "696b40624d9b23a425b56027d3e34b76b914b12d100c5ddc2df3ba8f731a3765"
    assert manifest_of(MODEL, LAYOUT) == manifest_of(replace(MODEL, facts=(), generation=0), LAYOUT)


def test_identities_that_differ_in_a_fact_or_the_generation_share_no_page_and_their_manifests_say_both() -> None:
    told = [(), FACTS, FACTS[1:], (*FACTS[:-1], ("weights", "sha256:78")), (("weights", "sha256:77"),)]
    identities = [replace(MODEL, facts=facts, generation=number) for facts in told for number in (0, 1, 2, 10)]
    assert len({each.digest(LAYOUT) for each in identities}) == len(identities)
    for each in identities:
        assert described_by(manifest_of(each, LAYOUT)).identity == each


def test_whatever_differs_in_an_identity_or_its_layout_no_page_is_shared() -> None:
    shard = Shard(Extent(0, 4, 8), Extent(0, 16, 32))
    identity, full, window = Identity("model", "r1", "bf16", shard), Full((KV,)), SlidingWindow(8, 4, (SWA,))
    shards = (
        replace(shard, heads=Extent(4, 8, 8)),
        replace(shard, layers=Extent(16, 32, 32)),
        replace(shard, tokens=TokenRuns(0, 2)),
    )
    named = [replace(identity, model="other"), replace(identity, revision="r2"), replace(identity, dtype="fp8")]
    layouts = (
        ModelLayout(8, (full, SlidingWindow(16, 8, (SWA,)))),
        ModelLayout(4, (full,)),
        ModelLayout(4, (full, RecurrentState((SWA,)))),
        ModelLayout(4, (full, SlidingWindow(12, 4, (SWA,)))),
        ModelLayout(4, (Full((KV, PoolSpec("index", 9))), window)),
        ModelLayout(4, (Full((PoolSpec("kv", 65),)), window)),
    )
    digests = [identity.digest(layout) for layout in (ModelLayout(4, (full, window)), *layouts)]
    others = (*named, *(replace(identity, shard=each) for each in shards))
    digests += [each.digest(ModelLayout(4, (full, window))) for each in others]
    assert len(set(digests)) == len(digests)


def test_facts_are_no_components_with_other_names() -> None:
    # Both are pairs of text in a row: only the number of facts tells where components end.
    state = Component("a", 1, (PoolSpec("b", 1), PoolSpec("c", 2)))
    two = ModelLayout(64, (Full((KV,)), state))
    one = ModelLayout(64, (Full((KV,)),))
    facts = (("a", "1"), ("b=1", "c=2"))
    assert Identity("m", facts=facts).digest(one) != Identity("m").digest(two)
    assert Identity("m", facts=facts).digest(one) != Identity("m").digest(one)


def test_every_part_of_a_sharded_identity_keeps_the_facts() -> None:
    shard = Shard.of_rank(0, 2, 8, Extent.whole(4))
    layout = ModelLayout(64, (Full((PoolSpec("latent", 8, replicated=True),)), RecurrentState((PoolSpec("state", 8),))))
    parts = Identity("m", shard=shard, facts=FACTS).parts(layout)
    assert len(parts) == 2
    assert all(part.identity.facts == FACTS for part in parts)


def test_a_manifest_with_a_fact_changed_does_not_have_its_digest() -> None:
    manifest = manifest_of(replace(MODEL, facts=FACTS), LAYOUT)
    manifest.facts[0].value = "another"
    with pytest.raises(StorageError, match="must have that digest"):
        described_by(manifest)


def test_a_layout_of_stored_pages_says_spans_that_are_unknown_and_pages_of_other_sizes() -> None:
    layouts = [
        ModelLayout(64, (Full((KV,)), Component("swa", 2, (SWA,)))),
        ModelLayout(64, (Full((KV,)), Component("swa", SPAN_UNKNOWN, (SWA,)))),
        ModelLayout(64, (Full((KV,)), Component("swa", 2, (SWA,), page_size=16))),
        ModelLayout(64, (Component("swa", SPAN_UNKNOWN, (SWA,)), Full((KV,)))),
        ModelLayout(64, (Component("swa", SPAN_UNKNOWN, (SWA,), page_size=16),)),
    ]
    assert len({MODEL.digest(layout) for layout in layouts}) == len(layouts)
    for layout in layouts:
        assert described_by(manifest_of(MODEL, layout)).layout == layout
    assert layouts[1].components[1].hit_policy is None
    assert layouts[2].page_size_of(layouts[2].components[1]) == 16


def test_a_window_counted_in_the_layout_s_own_pages_changes_no_digest() -> None:
    counted = SlidingWindow(128, 64, (SWA,))
    told = Component("swa", counted.span, (SWA,))
    assert MODEL.digest(ModelLayout(64, (Full((KV,)), counted))) == MODEL.digest(ModelLayout(64, (Full((KV,)), told)))


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (Component("swa", SPAN_UNKNOWN, (SWA,)), "swa must say which pages a resume needs"),
        (Component("swa", 2, (SWA,), page_size=16), "swa: a window counted in pages of 16 tokens, found 64"),
    ],
)
def test_no_cache_resumes_from_what_only_a_store_can_keep(component: Component, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ModelLayout(64, (Full((KV,)), component)).check_resumable()


@pytest.mark.parametrize("page_size", [0, -1, 1.5])
def test_pages_of_a_component_have_a_whole_number_of_tokens(page_size: int) -> None:
    with pytest.raises(LayoutError, match="page_size of swa"):
        Component("swa", 2, (SWA,), page_size=page_size)
