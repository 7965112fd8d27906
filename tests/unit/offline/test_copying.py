"""Whole identities and single prefixes from one store to another, and what can be restored afterwards."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.offline import (
    LAYOUTS,
    PAGE_SIZE,
    PAGES,
    STORE_KINDS,
    TOY,
    ListedMemory,
    description_of,
    fill,
    flip,
    objects_of,
    open_store,
    prompt_of,
    replace,
    restored_pages,
)
from tests.support.store_calls import ScriptedStorage
from unified_cache.core.errors import LayoutError, StorageError
from unified_cache.core.page import Namespace, PageKey, Prompt
from unified_cache.core.pool import Component, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN, window
from unified_cache.storage_backends.offline.copying import (
    CopyResult,
    Prefetched,
    PrefixPrefetch,
    copy_identity,
    copy_planned,
    plan_prompts,
)
from unified_cache.storage_backends.offline.listing import Watch, unwatched
from unified_cache.storage_backends.offline.stores import StoredIdentity
from unified_cache.storage_backends.offline.upkeep import Garbage, Verification, collect, verify
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.wrappers.layer import Method
from unified_cache.testing.storage_contract import listing, sealed_page

KV, SWA, STATE = PoolSpec("kv", 96), PoolSpec("swa", 40), PoolSpec("swa_state", 8)
FULL = Component("full", SPAN_ALL, (KV,))
UNKNOWN = ModelLayout(PAGE_SIZE, (FULL, Component("swa", SPAN_UNKNOWN, (SWA, STATE))))
WINDOW_ALONE = ModelLayout(PAGE_SIZE, (Component("swa", 2, (SWA,)),))
PROMPT = prompt_of(1)

every_layout = pytest.mark.parametrize("name", LAYOUTS)
every_kind = pytest.mark.parametrize("kind", STORE_KINDS)
TARGET_OF = dict(zip(STORE_KINDS, (*STORE_KINDS[1:], STORE_KINDS[0]), strict=True))
"""Another kind of store, to copy into, by the kind of the source."""


def copy(source: Store, target: Store, layout: ModelLayout, watch: Watch = unwatched) -> CopyResult:
    return copy_identity(source, target, description_of(layout), watch)


@every_layout
@every_kind
def test_a_fresh_cache_on_a_copy_restores_the_same_prefixes_with_the_right_bytes(
    name: str, kind: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    prompts = [prompt_of(1), prompt_of(2), prompt_of(1).head(5)]
    fill(open_store(kind, tmp_path / "source"), layout, prompts)
    source, target = open_store(kind, tmp_path / "source"), open_store(TARGET_OF[kind], tmp_path / "target")
    result = copy(source, target, layout)
    assert result.is_complete
    assert result.skipped.objects_count == 0
    assert objects_of(target, layout) == objects_of(source, layout) != {}
    assert result.copied.objects_count == len(objects_of(target, layout))
    source.close()
    target.close()
    for prompt in prompts:
        assert restored_pages(open_store(TARGET_OF[kind], tmp_path / "target"), layout, prompt) == prompt.pages_count


@every_layout
@every_kind
def test_a_flipped_bit_in_any_pool_and_another_length_are_reported_and_not_copied(
    name: str, kind: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    fill(open_store(kind, tmp_path / "source"), layout, [prompt_of(1)])
    source, target = open_store(kind, tmp_path / "source"), open_store(kind, tmp_path / "target")
    found = sorted(listing(source, TOY.digest(layout)))
    flipped = {known.label.pool: known for known in found}
    for known in flipped.values():
        flip(source, known)
    short = max(known for known in found if known not in flipped.values())
    flipped["of another length"] = short
    replace(source, short.label, b"short")
    before = objects_of(source, layout)
    result = copy(source, target, layout)
    assert not result.is_complete
    assert {label: finding.outcome for label, finding in result.findings.named.items()} == {
        known.label: Answer.FLAWED for known in flipped.values()
    }
    assert objects_of(source, layout) == before
    copied = objects_of(target, layout)
    assert copied.keys() == before.keys() - result.findings.named.keys()
    source.close()
    target.close()
    assert restored_pages(open_store(kind, tmp_path / "target"), layout, prompt_of(1)) < prompt_of(1).pages_count


@every_layout
@every_kind
def test_a_copy_cut_short_anywhere_goes_on_with_the_rest(name: str, kind: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    prompts = [prompt_of(seed) for seed in range(4)]
    fill(open_store(kind, tmp_path / "source"), layout, prompts)
    source, target = open_store(kind, tmp_path / "source"), open_store(kind, tmp_path / "target")
    total = len(objects_of(source, layout))
    done = 0
    for _ in range(total):
        told: list[int] = []

        def cut(objects_count: int, object_bytes: int, told: list[int] = told) -> None:
            told.append(objects_count)
            if sum(told) > done:  # noqa: B023 -- called before the next round
                raise KeyboardInterrupt

        try:
            copy(source, target, layout, cut)
        except KeyboardInterrupt:
            done = len(objects_of(target, layout))
            continue
        assert sum(told) == done
        break
    assert objects_of(target, layout) == objects_of(source, layout)
    assert copy(source, target, layout).copied.objects_count == 0
    source.close()
    target.close()


def test_kv_is_there_before_its_sidecars_whenever_a_copy_stops(tmp_path: Path) -> None:
    layout = LAYOUTS["full_swa_mamba"]
    fill(open_store("memory", tmp_path), layout, [prompt_of(seed) for seed in range(3)])
    source, target = open_store("memory", tmp_path), ListedMemory()
    order = [pool.name for _, pool in layout.transfer_order]
    seen: list[str] = []

    def look(objects_count: int, object_bytes: int) -> None:
        pools = {known.label.pool for known in listing(target, TOY.digest(layout))}
        seen.append(max(pools, key=order.index))

    copy(source, target, layout, look)
    assert seen == sorted(seen, key=order.index)
    assert set(seen) == set(order)


@every_kind
def test_an_object_of_another_length_in_the_target_is_replaced(kind: str, tmp_path: Path) -> None:
    layout = LAYOUTS["full"]
    fill(open_store(kind, tmp_path / "source"), layout, [prompt_of(1)])
    source, target = open_store(kind, tmp_path / "source"), open_store(kind, tmp_path / "target")
    wanted = objects_of(source, layout)
    label = min(wanted)
    replace(target, label, b"short")
    assert copy(source, target, layout).copied.objects_count == len(wanted)
    assert objects_of(target, layout) == wanted
    source.close()
    target.close()


def test_what_a_capped_target_declines_or_drops_again_makes_the_copy_incomplete(tmp_path: Path) -> None:
    layout = LAYOUTS["full_swa"]
    fill(open_store("memory", tmp_path), layout, [prompt_of(1)])
    source = open_store("memory", tmp_path)
    wanted = objects_of(source, layout)
    target = ListedMemory(sum(map(len, wanted.values())) // 2)
    result = copy(source, target, layout)
    assert not result.is_complete
    assert result.declined_count == len(wanted) - len(objects_of(target, layout))


@pytest.mark.parametrize("retryable", [False, True])
def test_an_object_that_cannot_be_read_costs_itself_alone_and_a_fault_that_may_pass_ends_the_copy(
    retryable: bool, tmp_path: Path
) -> None:
    layout = LAYOUTS["full"]
    fill(open_store("memory", tmp_path), layout, [prompt_of(1)])
    healthy = open_store("memory", tmp_path)
    bad = min(listing(healthy, TOY.digest(layout)))
    source, target = ScriptedStorage(ListedMemory()), ListedMemory()

    def fail() -> None:
        if any(page.label == bad.label for page in source.given):
            raise StorageError("cannot read: EIO", retryable=retryable)

    source.before[Method.GET] = fail
    for label, content in objects_of(healthy, layout).items():
        replace(source, label, content)
    if retryable:
        with pytest.raises(StorageError, match="EIO"):
            copy(source, target, layout)
        return
    result = copy(source, target, layout)
    assert result.findings.counts == {Answer.UNAVAILABLE: 1}
    assert objects_of(target, layout).keys() == objects_of(healthy, layout).keys() - {bad.label}


# Single prefixes from one store to another: windows, tombstones, flaws, and what can be restored afterwards


def prefetch(
    source: Store, target: Store, layout: ModelLayout, prompts: Sequence[Prompt]
) -> tuple[list[Prefetched], CopyResult]:
    return PrefixPrefetch(source, target, description_of(layout), prompts).run(unwatched)


def backup(source: Store, target: Store, layout: ModelLayout, prompts: Sequence[Prompt]) -> CopyResult:
    return copy_planned(source, target, plan_prompts(source, target, description_of(layout), prompts), unwatched)


def needed(layout: ModelLayout, prompt: Prompt, end: int) -> set[Label]:
    """Name the objects that a resume after ``end`` pages needs."""
    return {
        Label(TOY.digest(layout), prompt.keys[page], pool.name)
        for component in layout.components
        if component.span != SPAN_UNKNOWN
        for pool in component.pools
        if pool.page_bytes
        for page in range(window(end, component.span), end)
    }


def put(storage: Store, layout: ModelLayout, key: PageKey, pool: PoolSpec) -> Label:
    label = Label(TOY.digest(layout), key, pool.name)
    assert storage.put([sealed_page(label, HEADER_BYTES + pool.page_bytes)], Level.CACHED) == [Answer.STORED]
    return label


def fill_densely(storage: Store, layout: ModelLayout, prompt: Prompt) -> None:
    """Store every page in every pool, so that every length can be restored; the bytes are nobody's."""
    for pool in layout.pools:
        if pool.page_bytes:
            for key in prompt.keys:
                put(storage, layout, key, pool)


@every_layout
@every_kind
def test_a_prefetched_prefix_is_restored_by_a_fresh_cache_and_nothing_else_was_copied(
    name: str, kind: str, tmp_path: Path
) -> None:
    layout, prompt = LAYOUTS[name], prompt_of(1)
    fill(open_store(kind, tmp_path / "source"), layout, [prompt_of(2), prompt])
    source, target = open_store(kind, tmp_path / "source"), open_store(TARGET_OF[kind], tmp_path / "target")
    found, result = prefetch(source, target, layout, [prompt])
    assert found == [Prefetched(PAGES, PAGES, PAGES)]
    assert result.is_complete
    assert objects_of(target, layout).keys() == needed(layout, prompt, PAGES)
    source.close()
    target.close()
    assert restored_pages(open_store(TARGET_OF[kind], tmp_path / "target"), layout, prompt) == PAGES


@every_layout
def test_windows_before_the_end_are_not_prefetched_and_a_backup_copies_them(name: str) -> None:
    layout, prompt = LAYOUTS[name], prompt_of(1)
    source = ListedMemory()
    fill_densely(source, layout, prompt)
    fill_densely(source, layout, prompt_of(2))
    warmed, copied = ListedMemory(), ListedMemory()
    assert prefetch(source, warmed, layout, [prompt])[0] == [Prefetched(PAGES, PAGES, PAGES)]
    assert objects_of(warmed, layout).keys() == needed(layout, prompt, PAGES)
    assert backup(source, copied, layout, [prompt]).is_complete
    everything = objects_of(source, layout)
    assert objects_of(copied, layout) == {label: page for label, page in everything.items() if label.key in prompt.keys}


@every_layout
def test_pages_that_prompts_share_are_copied_and_told_of_once(name: str) -> None:
    layout, prompt = LAYOUTS[name], prompt_of(1)
    source, target = ListedMemory(), ListedMemory()
    fill_densely(source, layout, prompt)
    prompts = [prompt, prompt_of(1, PAGES - 3), prompt]
    seen: list[int] = []

    def watch(objects_count: int, object_bytes: int) -> None:
        seen.append(objects_count)

    for is_there in (False, True):
        prefetch = PrefixPrefetch(source, target, description_of(layout), prompts)
        found, result = prefetch.run(watch)
        assert [each.restorable_pages for each in found] == [PAGES, PAGES - 3, PAGES]
        wanted = needed(layout, prompt, PAGES) | needed(layout, prompt, PAGES - 3)
        assert objects_of(target, layout).keys() == wanted
        assert result.copied.objects_count == (0 if is_there else len(wanted))
        assert sum(seen) == prefetch.plan.todo.objects_count
        assert bool(seen) is not is_there
        seen.clear()
    copied = ListedMemory()
    plan = plan_prompts(source, copied, description_of(layout), prompts)
    copy_planned(source, copied, plan, watch)
    assert sum(seen) == plan.todo.objects_count > 0


def test_a_target_without_room_gets_the_longest_prefix_that_fits() -> None:
    layout, prompt = LAYOUTS["full"], prompt_of(1)
    source, target = ListedMemory(), ListedMemory(5 * (HEADER_BYTES + LAYOUTS["full"].pools[0].page_bytes))
    fill_densely(source, layout, prompt)
    found, result = prefetch(source, target, layout, [prompt])
    assert found == [Prefetched(PAGES, PAGES, 5)]
    assert not result.is_complete


def test_another_namespace_has_other_pages() -> None:
    layout = LAYOUTS["full"]
    source, target = ListedMemory(), ListedMemory()
    tokens = list(range(PAGES * 8))
    fill_densely(source, layout, Prompt.of(tokens, 8, Namespace(tenant="acme"), whole=True))
    other = Prompt.of(tokens, 8, Namespace(tenant="other"))
    assert plan_prompts(source, target, description_of(layout), [other]).tasks == {}
    assert prefetch(source, target, layout, [other])[0] == [Prefetched(PAGES, 0, 0)]


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), UNKNOWN, WINDOW_ALONE], ids=[*LAYOUTS, "unknown", "window"])
def test_every_combination_of_tombstones_and_flaws_gives_the_longest_prefix_that_is_whole(layout: ModelLayout) -> None:
    unknown = {pool.name for each in layout.components if each.span == SPAN_UNKNOWN for pool in each.pools}
    for seed in range(40):
        rng = random.Random(seed)
        prompt = prompt_of(seed, pages=rng.randint(1, 9))
        stores = source, target = ListedMemory(), ListedMemory()
        sound: set[Label] = set()
        flawed: set[Label] = set()
        for pool in (pool for pool in layout.pools if pool.page_bytes):
            for key in prompt.keys:
                for storage in stores:
                    if rng.random() < 0.8:
                        label = put(storage, layout, key, pool)
                        if storage is source and rng.random() < 0.1:
                            replace(storage, label, bytes(HEADER_BYTES + pool.page_bytes))
                            flawed.add(label)
                        else:
                            sound.add(label)
        had = objects_of(target, layout).keys()
        best = max(end for end in range(prompt.pages_count + 1) if needed(layout, prompt, end) <= sound)
        (found,), result = prefetch(source, target, layout, [prompt])
        assert found.restorable_pages == best, seed
        assert result.findings.named.keys() <= flawed
        whatever = {label for label in sound if label.pool in unknown and label.key in prompt.keys[:best]}
        got = objects_of(target, layout).keys()
        assert needed(layout, prompt, best) | whatever <= got
        if found.promised_pages == best:  # else more was brought before a flaw was met
            assert got == needed(layout, prompt, best) | whatever | had


# Offline commands over layouts of stored pages: unknown spans, no Full first, pages of other sizes


def put_pages(storage: ListedMemory, layout: ModelLayout, pool: PoolSpec, *numbers: int) -> set[Label]:
    """Store pages of the prompt in one pool; return their labels."""
    labels = [Label(TOY.digest(layout), PROMPT.keys[number], pool.name) for number in numbers]
    assert all(storage.put([sealed_page(label, HEADER_BYTES + pool.page_bytes) for label in labels], Level.CACHED))
    return set(labels)


def test_a_backup_copies_every_page_of_an_unknown_span() -> None:
    source, target = ListedMemory(), ListedMemory()
    everything = put_pages(source, UNKNOWN, KV, *range(6)) | put_pages(source, UNKNOWN, SWA, 0, 3, 8)
    assert backup(source, target, UNKNOWN, [PROMPT]).is_complete
    assert objects_of(target, UNKNOWN).keys() == everything


def test_where_no_span_is_known_no_prefix_is_promised() -> None:
    layout = ModelLayout(PAGE_SIZE, (Component("swa", SPAN_UNKNOWN, (SWA,)),))
    with pytest.raises(LayoutError, match="a backup copies every page"):
        PrefixPrefetch(ListedMemory(), ListedMemory(), description_of(layout), [PROMPT])


def test_a_prompt_s_keys_do_not_name_pages_of_another_size() -> None:
    layout = ModelLayout(PAGE_SIZE, (FULL, Component("swa", 2, (SWA,), page_size=PAGE_SIZE // 2)))
    for plan in (PrefixPrefetch, plan_prompts):
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
    kept = put_pages(storage, layout, KV, 0) | put_pages(storage, layout, SWA, 5, 6)
    assert collect(storage, TOY.digest(layout), layout) == Garbage()
    result = Verification()
    verify(storage, StoredIdentity(TOY.digest(layout), description_of(layout)), unwatched, result)
    assert result.sound_count == 3
    assert objects_of(storage, layout).keys() == kept
