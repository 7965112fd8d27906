"""Identities: shards with one writer for what ranks hold alike, and generation and facts in digest and manifest."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from tests.support.cache import IDENTITY, ToyEngine, toy_layout, with_toy_tensors
from tests.support.offline import ListedMemory
from tests.support.operations import engine, over, prompt_of_pages, serve
from tests.support.rank_grid import PROMPT_PAGES, GridCell, cells
from tests.support.ranks import ThreadRanks, in_threads, same
from tests.support.store_calls import ScriptedStorage
from unified_cache.cache.cache import UnifiedCache
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.controller import InlineWorkers, NotStarted, OperationState, TransferKind
from unified_cache.controller.memory import DevicePool
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.errors import ConfigError, InputError, LayoutError, StorageError
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec, facts_of
from unified_cache.core.shards import Extent, HeadReplica, NamedShard, Shard, TokenRuns
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.service.access.registry import TEXT_CHARS_MAX
from unified_cache.storage_backends.manifest import described_by, manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import Method
from unified_cache.testing.storage_contract import LAYOUT, MODEL

PAGE = 4

Result = TypeVar("Result")


def mixed_layout() -> ModelLayout:
    """Make MLA with recurrent state: what attention keeps is alike on all ranks, the state is not."""
    full = Component("full", SPAN_ALL, (PoolSpec("kv", 64, True), PoolSpec("index", 40, True)))
    return ModelLayout(PAGE, (full, Component("state", 1, (PoolSpec("state", 48),))))


def identity_of(rank: int, size: int) -> Identity:
    return replace(IDENTITY, shard=Shard.of_rank(rank, size, 8, Extent.whole(32)))


def one_for_all(model: ModelLayout) -> Callable[[int, int], ModelLayout]:
    return lambda rank, size: model


def on_shared_store(
    store: ScriptedStorage,
    live: Callable[[ToyEngine, ThreadRanks], Result],
    size: int = 2,
    chosen: Callable[[int, int], ModelLayout] = one_for_all(mixed_layout()),
) -> list[Result]:
    """Run ranks over one store; ``chosen`` gives each its layout, by rank and size."""

    def opened(ranks: ThreadRanks) -> Result:
        model = chosen(ranks.rank, ranks.size)
        identity = identity_of(ranks.rank, ranks.size)
        return live(engine(store, layout=model, device=24, ranks=ranks, identity=identity), ranks)

    return in_threads(size, opened)


@pytest.mark.parametrize("cell", [cell for count in (1, 2, 4, 8) for cell in cells(count)], ids=str)
def test_a_fresh_group_resumes_its_own_bytes_and_each_share_was_put_once(cell: GridCell) -> None:
    store = ScriptedStorage()
    in_threads(cell.ranks_count, lambda ranks: cell.back_up(ranks, store))
    assert Counter(label.pool for label in store.offered) == cell.objects()
    assert len(set(store.offered)) == len(store.offered)
    assert same(in_threads(cell.ranks_count, lambda ranks: cell.resume(ranks, store))) == PROMPT_PAGES


@pytest.mark.parametrize("cell", list(cells(4)), ids=str)
def test_a_group_clears_all_that_its_ranks_have_stored_and_each_object_once(cell: GridCell) -> None:
    store = ScriptedStorage()
    in_threads(cell.ranks_count, lambda ranks: cell.back_up(ranks, store))
    removed = in_threads(cell.ranks_count, lambda ranks: cell.clear(ranks, store))
    assert sum(removed) == cell.objects().total()
    assert not store.pages


def test_two_ranks_of_a_group_that_name_one_shard_are_refused_on_all() -> None:
    layout_ = toy_layout((SPAN_ALL, 1), PAGE)

    def live(ranks: ThreadRanks, identity: Identity) -> bool:
        cache = engine(layout=layout_, device=8, ranks=ranks, identity=identity).cache
        store = MemoryStorage()
        with pytest.raises(ConfigError, match="must name the part of the model that it alone holds"):
            cache.attach(store)
        return cache.prefetch(prompt_of_pages(cache, 2)) is NotStarted.NO_STORAGE

    assert same(in_threads(3, lambda ranks: live(ranks, IDENTITY)))
    assert same(in_threads(3, lambda ranks: live(ranks, identity_of(ranks.rank // 2, 2))))


LAYERS = Extent(0, 16, 32)
MINE = Shard.of_rank(1, 2, 8, LAYERS)


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (replace(MINE, tokens=TokenRuns(0, 2, run_tokens=4)), "multiple of the 8 tokens"),
        (Shard.of_rank(0, 2, 8, LAYERS), "a unit of heads must be part of"),
        (replace(MINE, layers=Extent(16, 32, 32)), "a unit of heads must be part of"),
        (replace(MINE, tokens=TokenRuns(1, 2)), "a unit of heads must be part of"),
        (NamedShard("rank 1"), "a unit of heads must be part of"),
        (NamedShard(), "a unit of heads must be part of"),
    ],
    ids=str,
)
def test_pools_of_heads_that_are_not_those_of_the_shard_are_refused(shard: Shard | NamedShard, said: str) -> None:
    model = ModelLayout(PAGE, (Component("full", SPAN_ALL, PoolSpec.of_units("kv", MINE, 2, 64)),))
    assert len(set(replace(IDENTITY, shard=MINE).owners(model).values())) == 2
    with pytest.raises(LayoutError, match=said):
        replace(IDENTITY, shard=shard).owners(model)


def test_a_mere_name_owns_no_replicated_pools() -> None:
    with pytest.raises(LayoutError, match="replicated pools need a Shard, which says its layers"):
        replace(IDENTITY, shard=NamedShard("heads 0-8/8")).owners(mixed_layout())


OWNERS_BEFORE = {"kv": "af832db82927a99a", "index": "af832db82927a99a", "state": "fe2019f7bcfc415c"}
UNIT_OWNERS_BEFORE = {"kv_h2": "515be800adf909bb", "swa_h2": "515be800adf909bb", "state": "107f6b45e8059df2"}
"""As earlier versions made them, where an engine gave the shard and its stage each by its own name."""


def test_shards_keep_the_digests_that_stores_know_them_by() -> None:
    model = mixed_layout()
    identity = Identity("kept", "r1", "bfloat16", Shard(Extent(2, 4, 8), Extent(16, 32, 32)))
    assert {pool: owner.hex()[:16] for pool, owner in identity.owners(model).items()} == OWNERS_BEFORE
    units = cut_layout(1, 4)
    identity = Identity("kept", "r1", "bfloat16", Shard.of_rank(1, 4, HEADS, Extent.whole(32)))
    assert {pool: owner.hex()[:16] for pool, owner in identity.owners(units).items()} == UNIT_OWNERS_BEFORE


def test_what_the_one_writer_could_not_store_is_stored_for_nobody() -> None:
    store = ScriptedStorage()
    store.failing = {Method.PUT}

    def live(toy: ToyEngine, ranks: ThreadRanks) -> tuple[OperationState, list[int]]:
        operation = over(toy.cache, toy.cache.backup(serve(toy, 4)))
        return operation.state, toy.cache.stats().traffic[TransferKind.STORE].component_pages

    latent = ModelLayout(PAGE, mixed_layout().components[:1])
    assert same(on_shared_store(store, live, 4, one_for_all(latent))) == (OperationState.FAILED, [0])
    assert store.offered, "the first rank tried"


def test_groups_of_other_sizes_share_replicated_pools_and_equal_shards() -> None:
    mixed = mixed_layout()
    by_size = {size: [identity_of(rank, size).owners(mixed) for rank in range(size)] for size in (1, 2, 4)}
    assert len({owners["kv"] for found in by_size.values() for owners in found}) == 1
    assert len({owners["state"] for found in by_size.values() for owners in found}) == 1 + 2 + 4


HEADS, HEADS_PER_UNIT = 8, 2


def cut_layout(rank: int, size: int) -> ModelLayout:
    """Make what a rank keeps of full attention, a window and recurrent state, attention cut into units of heads."""
    shard = Shard.of_rank(rank, size, HEADS, Extent.whole(32))
    full = Component("full", SPAN_ALL, PoolSpec.of_units("kv", shard, HEADS_PER_UNIT, 64))
    windowed = Component("swa", 2, PoolSpec.of_units("swa", shard, HEADS_PER_UNIT, 40))
    return ModelLayout(PAGE, (full, windowed, Component("state", 1, (PoolSpec("state", 48),))))


@pytest.mark.parametrize(("writers", "readers"), [(1, 4), (2, 4), (4, 2), (4, 1)])
def test_groups_of_other_sizes_share_objects_of_some_heads(writers: int, readers: int) -> None:
    def attention(rank: int, size: int) -> ModelLayout:
        whole = cut_layout(rank, size)
        return ModelLayout(PAGE, whole.components[:2])

    def write(toy: ToyEngine, ranks: ThreadRanks) -> OperationState:
        return over(toy.cache, toy.cache.backup(serve(toy, 4))).state

    def read(toy: ToyEngine, ranks: ThreadRanks) -> tuple[int, int]:
        prompt = prompt_of_pages(toy.cache, 4)
        fetched = over(toy.cache, toy.cache.prefetch(prompt))
        over(toy.cache, toy.cache.load(prompt))
        return fetched.pages_count, toy.verify(prompt, toy.cache.lock(toy.cache.match(prompt)))

    store = ScriptedStorage()
    assert same(on_shared_store(store, write, writers, attention)) == OperationState.DONE
    puts = [label.pool for label in store.offered]
    assert {pool: puts.count(pool) for pool in puts} == {
        **{f"kv_h{start}": 4 for start in range(0, HEADS, HEADS_PER_UNIT)},
        **{f"swa_h{start}": 2 for start in range(0, HEADS, HEADS_PER_UNIT)},
    }
    assert same(on_shared_store(store, read, readers, attention)) == (4, 6)


def test_what_cannot_be_cut_goes_by_the_whole_shard_beside_what_is_cut() -> None:
    by_size = {
        size: [identity_of(rank, size).owners(cut_layout(rank, size)) for rank in range(size)] for size in (2, 4)
    }
    cut = [{pool: owner for found in owners for pool, owner in found.items()} for owners in by_size.values()]
    assert len(cut[0]) == 2 * HEADS // HEADS_PER_UNIT + 1
    assert {pool: owner for pool, owner in cut[0].items() if pool != "state"} == {
        pool: owner for pool, owner in cut[1].items() if pool != "state"
    }
    assert len({found["state"] for owners in by_size.values() for found in owners}) == 2 + 4
    identity, whole = identity_of(0, 2), cut_layout(0, 2)
    for part in identity.parts(whole):
        assert described_by(manifest_of(part.identity, part.layout)).identity == part.identity


def test_an_identity_that_names_no_shard_owns_everything_under_its_own_digest() -> None:
    for model in (mixed_layout(), toy_layout((SPAN_ALL, 1), PAGE)):
        assert set(IDENTITY.owners(model).values()) == {IDENTITY.digest(model)}
        (part,) = IDENTITY.parts(model)
        assert (part.identity, part.layout) == (IDENTITY, model)


def test_a_store_is_told_of_both_owners_of_a_mixed_layout() -> None:
    store, mixed = ListedMemory(), mixed_layout()
    engine(store, layout=mixed, device=8, identity=identity_of(1, 2))
    owners = identity_of(1, 2).owners(with_toy_tensors(mixed))
    assert list(store.manifests()) == [owners["kv"], owners["state"]]
    assert all(manifest and described_by(manifest) for manifest in store.manifests().values())


# ---- shards ------------------------------------------------------------------------------------------------------


def test_a_shard_is_named_by_what_it_holds() -> None:
    whole = Extent.whole(32)
    shard = Shard.of_rank(1, 4, 8, whole)
    assert shard.text == shard.rank_text == "heads 2-4/8, layers 0-32/32"
    assert Shard(Extent.whole(8), Extent(16, 32, 32)).stage == "layers 16-32/32"
    third, fourth = Shard.of_rank(2, 16, 8, whole), Shard.of_rank(3, 16, 8, whole)
    assert third.text == fourth.text == "heads 1-2/8, layers 0-32/32", "two ranks share a head"
    assert [each.rank_text for each in (third, fourth)] == [
        "heads 1-2/8, replica 0/2, layers 0-32/32",
        "heads 1-2/8, replica 1/2, layers 0-32/32",
    ]


def test_a_shard_that_cannot_be_is_refused() -> None:
    for make in (
        lambda: Extent(2, 2, 8),
        lambda: Extent(0, 9, 8),
        lambda: HeadReplica(2, 2),
        lambda: TokenRuns(0, 2, run_tokens=0),
        lambda: Shard.of_rank(4, 4, 8, Extent.whole(1)),
        lambda: Shard.of_rank(0, 3, 8, Extent.whole(1)),
        lambda: Shard.of_rank(0, 8, 2, Extent.whole(1)).interleaved(3),
        lambda: Shard.of_rank(1, 2, 8, Extent.whole(1)).units(3),
    ):
        with pytest.raises(LayoutError):
            make()


# ---- generation and facts, unknown spans, pages of other sizes -------------------------------------------------------


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
    rest = (("d", "e"),)
    assert Identity("m", facts=(*facts, *rest)).digest(one) != Identity("m", facts=rest).digest(two)
    assert Identity("m", facts=facts).digest(one) != Identity("m").digest(one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((Full((PoolSpec("kv", 64, replicated=True),)),), (Full((KV,)),)),
        ((Full((KV,)), SlidingWindow(128, 64, (SWA,))), (Full((KV,)), Component("swa", 2, (SWA,)))),
    ],
    ids=["whether pools are replicated", "a window counted in the layout's own pages"],
)
def test_what_says_nothing_of_a_page_s_bytes_changes_no_digest(
    one: tuple[Component, ...], other: tuple[Component, ...]
) -> None:
    assert MODEL.digest(ModelLayout(64, one)) == MODEL.digest(ModelLayout(64, other))


REFUSED: tuple[tuple[str, Callable[[], object]], ...] = (
    ("page_size of swa", lambda: Component("swa", 2, (SWA,), page_size=0)),
    ("page_size of swa", lambda: Component("swa", 2, (SWA,), page_size=1.5)),  # type: ignore[arg-type]
    ("those of full must be", lambda: ModelLayout(4, (Full((KV,)), Component("state", 1, (PoolSpec("s", 48, True),))))),
    (
        "must be one of full's",
        lambda: ModelLayout(
            4, (Full((replace(KV, unit=MINE.units(2)[0]),)), Full((replace(SWA, unit=MINE.units(2)[1]),)))
        ),
    ),
    (
        "page_bytes must not be negative, found -1",
        lambda: PoolSpec("kv", -1),
    ),
    (
        "pool names must differ",
        lambda: ModelLayout(4, (Full((KV,)), Component("swa", 2, (KV,)))),
    ),
    (
        "swa must say which pages a resume needs",
        lambda: ModelLayout(64, (Full((KV,)), Component("swa", SPAN_UNKNOWN, (SWA,)))).check_resumable(),
    ),
    (
        "swa: a window counted in pages of 16 tokens, found 64",
        lambda: ModelLayout(64, (Full((KV,)), Component("swa", 2, (SWA,), page_size=16))).check_resumable(),
    ),
)


@pytest.mark.parametrize(("said", "make"), REFUSED)
def test_a_layout_that_contradicts_itself_is_refused(said: str, make: Callable[[], object]) -> None:
    with pytest.raises(LayoutError, match=said):
        make()


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
    assert len({MODEL.digest(model) for model in layouts}) == len(layouts)
    for model in layouts:
        assert described_by(manifest_of(MODEL, model)).layout == model
    assert layouts[1].components[1].hit_policy is None
    assert layouts[2].page_size_of(layouts[2].components[1]) == 16


# ---- tensors -------------------------------------------------------------------------------------------------


def tensors_engine(
    store: Store, rows: torch.Tensor, identity: Identity | str = "my-model"
) -> tuple[UnifiedCache, torch.Tensor]:
    """Open a cache over an engine's tensor of 9 slots, with 16 bytes a page."""
    spec = PoolSpec("kv", 16)
    layout_ = ModelLayout(PAGE, (Full((spec,)),))
    config = CacheConfig((8,), (8,), write=WritePolicy.ON_CALL)
    pools = [DevicePool(spec, [rows])]
    cache = UnifiedCache.open(layout_, config, pools, identity=identity, storage=store, workers=InlineWorkers())
    return cache, rows


@pytest.mark.parametrize(
    ("rows", "shared_pages"),
    [
        (torch.zeros((9, 8), dtype=torch.bfloat16), 4),
        (torch.zeros((9, 8), dtype=torch.float16), 0),
        (torch.zeros((9, 4, 2), dtype=torch.bfloat16), 0),
        (torch.zeros((9, 2, 4), dtype=torch.bfloat16), 0),
        (torch.zeros((9, 16), dtype=torch.uint8), 0),
        (torch.zeros((9, 16), dtype=torch.bfloat16)[:, :8], 4),
    ],
    ids=["the same", "another dtype", "another shape", "the dimensions swapped", "bytes", "slots further apart"],
)
def test_engines_whose_tensors_differ_share_no_page_whatever_their_names_say(
    rows: torch.Tensor, shared_pages: int
) -> None:
    store = ListedMemory()
    cache, _ = tensors_engine(store, torch.zeros((9, 8), dtype=torch.bfloat16))
    prompt = cache.prompt(range(4 * PAGE), whole=True)
    lock = cache.lock(cache.match(prompt))
    slots = cache.allocate(cache.pages_to_allocate(0, 4, [4]))
    assert slots is not None
    cache.release(cache.insert(prompt, slots, lock))
    over(cache, cache.backup(prompt))
    cache.close()
    other, _ = tensors_engine(store, rows)
    over(other, other.prefetch(prompt))
    assert other.match(prompt).host_end == shared_pages
    other.close()


def test_a_manifest_says_what_tensors_hold_of_a_page() -> None:
    cache, _ = tensors_engine(MemoryStorage(), torch.zeros((9, 2, 4), dtype=torch.bfloat16))
    described = described_by(manifest_of(cache.identity, cache.layout))
    assert [pool.tensors for pool in described.layout.pools] == ["1 x bfloat16[2, 4]"]
    cache.close()


def test_tensors_of_many_shapes_are_described_in_a_text_that_a_service_takes() -> None:
    layers = [torch.zeros((9, number), dtype=torch.bfloat16) for number in range(1, 100)]
    one, other = (DevicePool(PoolSpec("kv", 2 * 50 * 99), each) for each in (layers, layers[::-1]))
    assert one.tensors != other.tensors
    assert max(len(one.tensors), len(other.tensors)) <= TEXT_CHARS_MAX


def test_a_dtype_has_one_name_and_what_is_none_is_refused() -> None:
    assert {Identity("m", dtype=name).dtype for name in ("bf16", "bfloat16", "torch.bfloat16", "BF16")} == {"bfloat16"}
    for name in ("garbage", "bf61", "int3", " "):
        with pytest.raises(InputError):
            Identity("m", dtype=name)


def test_an_identity_that_contradicts_the_tensors_is_refused() -> None:
    rows = torch.zeros((9, 8), dtype=torch.float16)
    with pytest.raises(ConfigError, match="float16"):
        tensors_engine(MemoryStorage(), rows, Identity("my-model", dtype="bf16"))
    for sound in ("fp16", ""):
        tensors_engine(MemoryStorage(), rows, Identity("my-model", dtype=sound))[0].close()
    fp8_in_bytes = torch.zeros((9, 16), dtype=torch.uint8)
    tensors_engine(MemoryStorage(), fp8_in_bytes, Identity("my-model", dtype="fp8_e4m3"))[0].close()
