"""Whole identities from one store to another."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.offline import (
    LAYOUTS,
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
from unified_cache.core.errors import StorageError
from unified_cache.core.pool import ModelLayout
from unified_cache.storage_backends.offline.copying import CopyResult, copy_identity, plan_identity
from unified_cache.storage_backends.offline.listing import ReadOutcome
from unified_cache.storage_backends.offline.upkeep import Watch
from unified_cache.storage_backends.protocol import Answer, PageIO, StorageBackend, StoredObject
from unified_cache.testing.storage_contract import listing


def copy(source: StorageBackend, target: StorageBackend, layout: ModelLayout, watch: Watch = unwatched) -> CopyResult:
    description = description_of(layout)
    return copy_identity(source, target, description, plan_identity(source, target, description), watch)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_a_fresh_cache_on_a_copy_restores_the_same_prefixes_with_the_right_bytes(
    name: str, kind: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    prompts = [prompt_of(1), prompt_of(2), prompt_of(1).head(5)]
    fill(open_store(kind, tmp_path / "source"), layout, prompts)
    source, target = open_store(kind, tmp_path / "source"), open_store(kind, tmp_path / "target")
    result = copy(source, target, layout)
    assert result.is_complete
    assert result.skipped.objects_count == 0
    assert objects_of(target, layout) == objects_of(source, layout) != {}
    assert result.copied.objects_count == len(objects_of(target, layout))
    source.close()
    target.close()
    for prompt in prompts:
        assert restored_pages(open_store(kind, tmp_path / "target"), layout, prompt) == prompt.pages_count


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_a_flipped_bit_in_any_pool_is_reported_and_not_copied(name: str, kind: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    fill(open_store(kind, tmp_path / "source"), layout, [prompt_of(1)])
    source, target = open_store(kind, tmp_path / "source"), open_store(kind, tmp_path / "target")
    found = sorted(listing(source, TOY.digest(layout)))
    flipped = {known.label.pool: known for known in found}
    for known in flipped.values():
        flip(source, known)
    before = objects_of(source, layout)
    result = copy(source, target, layout)
    assert not result.is_complete
    assert {label: finding.outcome for label, finding in result.findings.items()} == {
        known.label: ReadOutcome.FLAWED for known in flipped.values()
    }
    assert objects_of(source, layout) == before
    copied = objects_of(target, layout)
    assert copied.keys() == before.keys() - result.findings.keys()
    source.close()
    target.close()
    assert restored_pages(open_store(kind, tmp_path / "target"), layout, prompt_of(1)) < prompt_of(1).pages_count


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", STORE_KINDS)
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
            if told:
                raise KeyboardInterrupt
            told.append(objects_count)

        plan = plan_identity(source, target, description_of(layout))
        assert plan.skipped.objects_count == done
        assert plan.todo.objects_count == total - done
        try:
            copy_identity(source, target, description_of(layout), plan, cut)
        except KeyboardInterrupt:
            done = len(objects_of(target, layout))
            continue
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


@pytest.mark.parametrize("kind", STORE_KINDS)
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


def test_an_object_of_another_length_in_the_source_is_reported_and_not_copied(tmp_path: Path) -> None:
    layout = LAYOUTS["full"]
    fill(open_store("memory", tmp_path), layout, [prompt_of(1)])
    source, target = open_store("memory", tmp_path), ListedMemory()
    label = min(objects_of(source, layout))
    replace(source, label, b"short")
    result = copy(source, target, layout)
    assert list(result.findings) == [label]
    assert target.exists([label]) == [Answer.MISS]


def test_what_a_capped_target_declines_or_lets_go_again_makes_the_copy_incomplete(tmp_path: Path) -> None:
    layout = LAYOUTS["full_swa"]
    fill(open_store("memory", tmp_path), layout, [prompt_of(1)])
    source = open_store("memory", tmp_path)
    wanted = objects_of(source, layout)
    target = ListedMemory(sum(map(len, wanted.values())) // 2)
    result = copy(source, target, layout)
    assert not result.is_complete
    assert result.declined_count == len(wanted) - len(objects_of(target, layout))


class BadSector(ListedMemory):
    """Fails every get of one object."""

    def __init__(self, bad: StoredObject, *, retryable: bool) -> None:
        super().__init__()
        self._bad = bad
        self._retryable = retryable

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        if any(page.label == self._bad.label for page in pages):
            raise StorageError("cannot read: EIO", retryable=self._retryable)
        return super().get(pages)


@pytest.mark.parametrize("retryable", [False, True])
def test_an_object_that_cannot_be_read_costs_itself_alone_and_a_fault_that_may_pass_ends_the_copy(
    retryable: bool, tmp_path: Path
) -> None:
    layout = LAYOUTS["full"]
    fill(open_store("memory", tmp_path), layout, [prompt_of(1)])
    healthy = open_store("memory", tmp_path)
    bad = min(listing(healthy, TOY.digest(layout)))
    source, target = BadSector(bad, retryable=retryable), ListedMemory()
    for label, content in objects_of(healthy, layout).items():
        replace(source, label, content)
    if retryable:
        with pytest.raises(StorageError, match="EIO"):
            copy(source, target, layout)
        return
    result = copy(source, target, layout)
    assert [finding.outcome for finding in result.findings.values()] == [ReadOutcome.UNREADABLE]
    assert objects_of(target, layout).keys() == objects_of(healthy, layout).keys() - {bad.label}
