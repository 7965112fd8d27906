"""Single prefixes from one store to another: windows, tombstones, flaws, and what can be restored afterwards."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.offline import (
    LAYOUTS,
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
    unwatched,
)
from unified_cache.core.page import Namespace, PageKey, Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.window import window
from unified_cache.storage_backends.offline.copying import (
    CopyResult,
    Prefetched,
    backup_prefixes,
    plan_backup,
    plan_prefetch,
    prefetch_prefixes,
)
from unified_cache.storage_backends.protocol import Answer, Level, StorageBackend, StoredObject
from unified_cache.testing.storage_contract import listing, sealed_page


def prefetch(
    source: StorageBackend, target: StorageBackend, layout: ModelLayout, prompts: Sequence[Prompt]
) -> tuple[list[Prefetched], CopyResult]:
    return prefetch_prefixes(plan_prefetch(source, target, description_of(layout), prompts), unwatched)


def backup(
    source: StorageBackend, target: StorageBackend, layout: ModelLayout, prompts: Sequence[Prompt]
) -> CopyResult:
    return backup_prefixes(plan_backup(source, target, description_of(layout), prompts), unwatched)


def needed(layout: ModelLayout, prompt: Prompt, end: int) -> set[Label]:
    """Name the objects that a resume after ``end`` pages needs."""
    return {
        Label(TOY.digest(layout), prompt.keys[page], pool.name)
        for component in layout.components
        for pool in component.pools
        if pool.page_bytes
        for page in range(window(end, component.span), end)
    }


def put(storage: StorageBackend, layout: ModelLayout, key: PageKey, pool: PoolSpec) -> Label:
    label = Label(TOY.digest(layout), key, pool.name)
    assert storage.put([sealed_page(label, HEADER_BYTES + pool.page_bytes)], Level.CACHED) == [Answer.STORED]
    return label


def fill_densely(storage: StorageBackend, layout: ModelLayout, prompt: Prompt) -> None:
    """Store every page in every pool, so that every length can be restored; the bytes are nobody's."""
    for pool in layout.pools:
        if pool.page_bytes:
            for key in prompt.keys:
                put(storage, layout, key, pool)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_a_prefetched_prefix_is_restored_by_a_fresh_cache_and_nothing_else_was_copied(
    name: str, kind: str, tmp_path: Path
) -> None:
    layout, prompt = LAYOUTS[name], prompt_of(1)
    fill(open_store(kind, tmp_path / "source"), layout, [prompt_of(2), prompt])
    source, target = open_store(kind, tmp_path / "source"), open_store(kind, tmp_path / "target")
    found, result = prefetch(source, target, layout, [prompt])
    assert found == [Prefetched(PAGES, PAGES, PAGES)]
    assert result.is_complete
    assert objects_of(target, layout).keys() == needed(layout, prompt, PAGES)
    source.close()
    target.close()
    assert restored_pages(open_store(kind, tmp_path / "target"), layout, prompt) == PAGES


@pytest.mark.parametrize("name", LAYOUTS)
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_progress_ends_with_all_that_was_planned_where_prompts_share_pages(name: str) -> None:
    layout, prompt = LAYOUTS[name], prompt_of(1)
    source, target = ListedMemory(), ListedMemory()
    fill_densely(source, layout, prompt)
    prompts = [prompt, prompt_of(1, PAGES - 3), prompt]
    seen: list[int] = []

    def watch(objects_count: int, object_bytes: int) -> None:
        seen.append(objects_count)

    for is_there in (False, True):
        plan = plan_prefetch(source, target, description_of(layout), prompts)
        prefetch_prefixes(plan, watch)
        assert sum(seen) == plan.objects_count > 0, is_there
        seen.clear()
    plan = plan_backup(source, ListedMemory(), description_of(layout), prompts)
    backup_prefixes(plan, watch)
    assert sum(seen) == plan.objects_count > 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_flawed_page_of_full_ends_the_prefix_before_it(name: str) -> None:
    layout, prompt = LAYOUTS[name], prompt_of(1)
    source, target = ListedMemory(), ListedMemory()
    fill_densely(source, layout, prompt)
    pool = next(pool for pool in layout.components[0].pools if pool.page_bytes)
    flawed = Label(TOY.digest(layout), prompt.keys[7], pool.name)
    flip(source, StoredObject(flawed, HEADER_BYTES + pool.page_bytes))
    found, result = prefetch(source, target, layout, [prompt])
    assert found == [Prefetched(PAGES, PAGES, 7)]
    assert list(result.findings) == [flawed]
    assert needed(layout, prompt, 7) <= objects_of(target, layout).keys()
    assert flawed not in objects_of(target, layout)


def test_a_flawed_window_moves_the_end_to_where_another_window_is_whole() -> None:
    layout, prompt = LAYOUTS["full_swa_mamba"], prompt_of(1)
    source, target = ListedMemory(), ListedMemory()
    fill_densely(source, layout, prompt)
    sidecar = layout.components[1].pools[1]
    flip(
        source, StoredObject(Label(TOY.digest(layout), prompt.keys[9], sidecar.name), HEADER_BYTES + sidecar.page_bytes)
    )
    source.remove([Label(TOY.digest(layout), prompt.keys[8], layout.components[2].pools[0].name)])
    # Ends 10, 11 and 12 need page 9 of the window of three; 9 needs the state at page 8.
    found, _ = prefetch(source, target, layout, [prompt])
    assert found == [Prefetched(PAGES, PAGES, 8)]
    assert needed(layout, prompt, 8) <= objects_of(target, layout).keys()


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_what_the_target_has_completes_what_the_source_lacks_and_is_verified_first(kind: str, tmp_path: Path) -> None:
    layout, prompt = LAYOUTS["full"], prompt_of(1)
    source, target = open_store(kind, tmp_path / "source"), open_store(kind, tmp_path / "target")
    pool = layout.pools[0]
    labels = [put(source if page % 2 else target, layout, key, pool) for page, key in enumerate(prompt.keys)]
    found, result = prefetch(source, target, layout, [prompt])
    assert found == [Prefetched(PAGES, PAGES, PAGES)]
    assert (result.copied.objects_count, result.skipped.objects_count) == (PAGES // 2, PAGES // 2)
    flip(target, StoredObject(labels[5], HEADER_BYTES + pool.page_bytes))
    flip(target, StoredObject(labels[8], HEADER_BYTES + pool.page_bytes))
    found, result = prefetch(source, target, layout, [prompt])
    assert found == [Prefetched(PAGES, PAGES, 8)]
    assert result.copied.objects_count == 1
    assert target.exists([labels[5], labels[8]]) == [Answer.HIT, Answer.MISS]
    source.close()
    target.close()


def test_pages_that_prompts_share_are_copied_and_read_once() -> None:
    layout, prompt = LAYOUTS["full_swa"], prompt_of(1)
    source, target = ListedMemory(), ListedMemory()
    fill_densely(source, layout, prompt)
    found, result = prefetch(source, target, layout, [prompt, prompt, prompt.head(6)])
    assert [each.restorable_pages for each in found] == [PAGES, PAGES, 6]
    wanted = needed(layout, prompt, PAGES) | needed(layout, prompt, 6)
    assert result.copied.objects_count == len(wanted)
    assert objects_of(target, layout).keys() == wanted


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
    assert plan_backup(source, target, description_of(layout), [other]).objects_count == 0
    assert prefetch(source, target, layout, [other])[0] == [Prefetched(PAGES, 0, 0)]


def test_a_backup_of_a_prefix_replaces_what_is_flawed_in_the_target() -> None:
    layout, prompt = LAYOUTS["full_swa"], prompt_of(1)
    source, target = ListedMemory(), ListedMemory()
    fill_densely(source, layout, prompt)
    backup(source, target, layout, [prompt])
    flip(target, min(listing(target, TOY.digest(layout))))
    result = backup(source, target, layout, [prompt])
    assert result.copied.objects_count == 1
    assert objects_of(target, layout) == objects_of(source, layout)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_combination_of_tombstones_and_flaws_gives_the_longest_prefix_that_is_whole(name: str) -> None:
    layout = LAYOUTS[name]
    for seed in range(40):
        rng = random.Random(seed)
        prompt = prompt_of(seed, pages=rng.randint(1, 9))
        stores = source, target = ListedMemory(), ListedMemory()
        sound: set[Label] = set()
        for pool in (pool for pool in layout.pools if pool.page_bytes):
            for key in prompt.keys:
                for storage in stores:
                    if rng.random() < 0.8:
                        label = put(storage, layout, key, pool)
                        if rng.random() < 0.1:
                            replace(storage, label, bytes(HEADER_BYTES + pool.page_bytes))
                        else:
                            sound.add(label)
        best = max(end for end in range(prompt.pages_count + 1) if needed(layout, prompt, end) <= sound)
        (found,), _ = prefetch(source, target, layout, [prompt])
        assert found.restorable_pages == best, seed
        assert needed(layout, prompt, best) <= objects_of(target, layout).keys()
