"""Offline commands over layouts of stored pages: unknown spans, no Full first, pages of other sizes."""

from dataclasses import replace
from io import StringIO

import pytest

from tests.support.offline import PAGE_SIZE, PAGES, TOY, ListedMemory, description_of, objects_of, prompt_of, unwatched
from unified_cache.cli.storage import Differences, differences, print_stat, stat_as_json
from unified_cache.core.errors import LayoutError
from unified_cache.core.pool import Component, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.storage_backends.manifest import Description
from unified_cache.storage_backends.offline.copying import (
    Prefetched,
    backup_prefixes,
    plan_backup,
    plan_prefetch,
    prefetch_prefixes,
)
from unified_cache.storage_backends.offline.listing import ObjectCount
from unified_cache.storage_backends.offline.stores import StoredIdentity, Undescribed
from unified_cache.storage_backends.offline.upkeep import find_garbage, verify
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import sealed_page

KV, SWA, STATE = PoolSpec("kv", 96), PoolSpec("swa", 40), PoolSpec("swa_state", 8)
FULL = Component("full", SPAN_ALL, (KV,))
UNKNOWN = ModelLayout(PAGE_SIZE, (FULL, Component("swa", SPAN_UNKNOWN, (SWA, STATE))))
PROMPT = prompt_of(1)


def put(storage: ListedMemory, layout: ModelLayout, pool: PoolSpec, *numbers: int) -> set[Label]:
    """Store pages of the prompt in one pool; return their labels."""
    labels = [Label(TOY.digest(layout), PROMPT.keys[number], pool.name) for number in numbers]
    assert all(storage.put([sealed_page(label, HEADER_BYTES + pool.page_bytes) for label in labels], Level.CACHED))
    return set(labels)


def test_a_prefetch_brings_all_there_is_of_an_unknown_span_within_the_prefix() -> None:
    source, target = ListedMemory(), ListedMemory()
    kv = put(source, UNKNOWN, KV, *range(6))
    swa = put(source, UNKNOWN, SWA, 1, 4, 5) | put(source, UNKNOWN, STATE, 5)
    put(source, UNKNOWN, SWA, 6, 7)  # beyond the prefix
    had = put(target, UNKNOWN, SWA, 0)
    plan = plan_prefetch(source, target, description_of(UNKNOWN), [PROMPT])
    found, result = prefetch_prefixes(plan, unwatched)
    assert found == [Prefetched(PAGES, 6, 6)]
    assert result.is_complete
    assert objects_of(target, UNKNOWN).keys() == kv | swa | had


def test_a_flawed_page_of_an_unknown_span_does_not_shorten_the_prefix() -> None:
    source, target = ListedMemory(), ListedMemory()
    kv, swa = put(source, UNKNOWN, KV, *range(6)), put(source, UNKNOWN, SWA, 4)
    flawed = Label(TOY.digest(UNKNOWN), PROMPT.keys[5], SWA.name)
    source.put(
        [sealed_page(flawed._replace(pool="other"), HEADER_BYTES + SWA.page_bytes)._replace(label=flawed)], Level.CACHED
    )
    plan = plan_prefetch(source, target, description_of(UNKNOWN), [PROMPT])
    found, result = prefetch_prefixes(plan, unwatched)
    assert found == [Prefetched(PAGES, 6, 6)]
    assert list(result.findings) == [flawed]
    assert objects_of(target, UNKNOWN).keys() == kv | swa


def test_a_backup_copies_every_page_of_an_unknown_span() -> None:
    source, target = ListedMemory(), ListedMemory()
    everything = put(source, UNKNOWN, KV, *range(6)) | put(source, UNKNOWN, SWA, 0, 3, 8)
    assert backup_prefixes(plan_backup(source, target, description_of(UNKNOWN), [PROMPT]), unwatched).is_complete
    assert objects_of(target, UNKNOWN).keys() == everything


def test_where_no_span_is_told_no_prefix_is_promised() -> None:
    layout = ModelLayout(PAGE_SIZE, (Component("swa", SPAN_UNKNOWN, (SWA,)),))
    with pytest.raises(LayoutError, match="a backup copies every page"):
        plan_prefetch(ListedMemory(), ListedMemory(), description_of(layout), [PROMPT])


def test_a_window_alone_is_restored_from_its_last_pages() -> None:
    layout = ModelLayout(PAGE_SIZE, (Component("swa", 2, (SWA,)),))
    source, target = ListedMemory(), ListedMemory()
    put(source, layout, SWA, 3)
    window = put(source, layout, SWA, 6, 7)
    plan = plan_prefetch(source, target, description_of(layout), [PROMPT])
    assert prefetch_prefixes(plan, unwatched)[0] == [Prefetched(PAGES, 8, 8)]
    assert objects_of(target, layout).keys() == window


def test_a_prompt_s_keys_do_not_name_pages_of_another_size() -> None:
    layout = ModelLayout(PAGE_SIZE, (FULL, Component("swa", 2, (SWA,), page_size=PAGE_SIZE // 2)))
    for plan in (plan_prefetch, plan_backup):
        with pytest.raises(LayoutError, match="pages of swa have 4 tokens, expected 8"):
            plan(ListedMemory(), ListedMemory(), description_of(layout), [PROMPT])


@pytest.mark.parametrize(
    "layout",
    [
        UNKNOWN,
        ModelLayout(PAGE_SIZE, (FULL, Component("swa", 2, (SWA,), page_size=PAGE_SIZE // 2))),
        ModelLayout(PAGE_SIZE, (Component("swa", 2, (SWA,)), FULL)),
    ],
    ids=["unknown", "own page size", "no Full first"],
)
def test_gc_and_verify_leave_pages_alone_that_only_the_engine_can_judge(layout: ModelLayout) -> None:
    storage = ListedMemory()
    kept = put(storage, layout, KV, 0) | put(storage, layout, SWA, 5, 6)
    assert find_garbage(storage, TOY.digest(layout), layout).labels == []
    assert verify(storage, StoredIdentity(TOY.digest(layout), description_of(layout)), unwatched).sound_count == 3
    assert objects_of(storage, layout).keys() == kept


def test_stat_shows_facts_and_what_is_not_told() -> None:
    layout = ModelLayout(PAGE_SIZE, (*UNKNOWN.components, Component("state", 1, (PoolSpec("state", 8),), page_size=2)))
    identity = replace(TOY, facts=(("attention", "triton"), ("weights", "sha256:77")))
    kept = StoredIdentity(identity.digest(layout), Description(identity, layout))
    about = stat_as_json(kept, {"kv": ObjectCount(3, 300)}, None, None)
    assert about["facts"] == {"attention": "triton", "weights": "sha256:77"}
    components = about["components"]
    assert isinstance(components, list)
    assert [(each["hit_policy"], each["span_pages"], each["page_size"]) for each in components] == [
        ("all_pages", None, PAGE_SIZE),
        (None, None, PAGE_SIZE),
        ("trailing_pages", 1, 2),
    ]
    shown = StringIO()
    print_stat(shown, kept, {"kv": ObjectCount(3, 300)}, None, None)
    for text in ("attention triton", "weights sha256:77", "swa         unknown  ", "the last 1, of 2 tokens"):
        assert text in shown.getvalue()


def test_stat_says_what_tells_an_identity_from_the_most_similar_before_it() -> None:
    first = replace(TOY, model="/models/a", facts=(("hash", "sha256"), ("weights", "77")))
    other = replace(first, model="another", revision="2", dtype="float8")
    moved = replace(first, model="/models/b", facts=(("weights", "77"),))
    kept = [StoredIdentity(each.digest(UNKNOWN), Description(each, UNKNOWN)) for each in (first, other, moved)]
    undescribed = StoredIdentity(bytes(32), Undescribed("no manifest"))
    assert [differences(each, kept[:number]) for number, each in enumerate(kept)] == [
        None,
        Differences(kept[0], ("dtype", "model", "revision")),
        Differences(kept[0], ("hash", "model")),
    ]
    assert differences(undescribed, kept) is differences(kept[0], [undescribed]) is None
    apart = differences(kept[2], kept[:2])
    shown = StringIO()
    print_stat(shown, kept[2], {}, None, apart)
    assert f"  differs from {kept[0].short_name} in hash, model\n" in shown.getvalue()
    assert stat_as_json(kept[2], {}, None, apart)["differs"] == {"from": kept[0].digest.hex(), "in": ("hash", "model")}
