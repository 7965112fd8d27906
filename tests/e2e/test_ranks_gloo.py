"""Ranks as real processes over gloo: equal trees, the longest prefix that all can resume, and no hang, whoever dies."""

from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.rank_grid import PROMPT_PAGES, StoredCounts, cells
from tests.support.rank_process import (
    RankProcesses,
    agree,
    back_up,
    dawdle,
    die,
    disagree,
    pairs,
    resume,
    scripts,
)
from tests.support.rank_script import compare
from unified_cache.storage_backends.file.store import FileStorage


@pytest.mark.parametrize(
    ("size", "seeds", "steps"),
    [(2, 4, 100), *(pytest.param(*each, marks=pytest.mark.long) for each in ((4, 3, 60), (8, 7, 80)))],
)
def test_ranks_with_other_stores_lag_and_luck_keep_the_same_trees(
    tmp_path: Path, size: int, seeds: int, steps: int
) -> None:
    with RankProcesses(tmp_path, size) as processes:
        played = processes.play(scripts, seeds, steps)
    happened: Counter[str] = Counter()
    for number, reports in enumerate(zip(*played, strict=True)):
        for name, count in compare(reports, troubled=number % 2 == 1).items():
            happened[name] += count
    assert all(happened.values()), happened


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 4, 8))])
def test_fresh_processes_resume_their_own_bytes_whatever_the_shape_of_their_group(tmp_path: Path, size: int) -> None:
    store = tmp_path / "store"
    with RankProcesses(tmp_path, size) as writers:
        assert writers.play(back_up, store) == ["stored"] * size
    assert stored_objects(store) == {str(cell): cell.objects() for cell in cells(size)}
    (tmp_path / "meeting").unlink()
    with RankProcesses(tmp_path, size) as readers:
        assert readers.play(resume, store) == [{str(cell): PROMPT_PAGES for cell in cells(size)}] * size


def stored_objects(directory: Path) -> dict[str, StoredCounts]:
    """Count by model the objects of a store, by shard and pool."""
    found: dict[str, StoredCounts] = defaultdict(Counter)
    with closing(FileStorage.open(directory)) as storage:
        for digest, manifest in storage.manifests().items():
            assert manifest is not None
            for each in storage.scan(digest).objects:
                found[manifest.model][manifest.shard, each.label.pool] += 1
    return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Three processes through all plays of three; in the last one a rank dies."""
    with RankProcesses(tmp_path_factory.mktemp("ranks"), 3) as processes:
        return {play.__name__: processes.play(play) for play in (agree, pairs, disagree, dawdle, die)}


def test_arrays_of_every_length_are_agreed_on(played: dict[str, list[object]]) -> None:
    assert played["agree"] == [[rank, 3, [True] * 7] for rank in range(3)]


def test_ranks_out_of_step_are_reported_on_every_rank(played: dict[str, list[object]]) -> None:
    for outcomes in played["disagree"]:
        assert isinstance(outcomes, list)
        first, second, is_lost = outcomes
        assert "out of step" in first
        assert (second, is_lost) == (first, True)


def test_processes_can_be_cut_into_groups(played: dict[str, list[object]]) -> None:
    assert played["pairs"] == [
        [0, 2, [False, False, True]],
        [1, 2, [False, False, True]],
        "process 2 is in none of the groups [[0, 1]]",
    ]


def test_when_a_rank_dies_the_others_fail_what_moves_and_go_on_with_the_device(played: dict[str, list[object]]) -> None:
    alive = ["lost", True, True, [True, True, True], 11, 0, []]
    assert played["die"] == [alive, alive, None]


def test_a_rank_that_does_not_come_in_time_is_lost_to_the_others(played: dict[str, list[object]]) -> None:
    *others, last = played["dawdle"]
    assert last == []
    for number, outcome in enumerate(others):
        assert outcome == [f"rank {number} of 3 lost the others", True]
