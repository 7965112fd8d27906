"""Ranks as real processes over gloo: equal trees, the longest prefix that all can resume, and no hang, whoever dies."""

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.rank_grid import PROMPT_PAGES, StoredCounts, cells
from tests.support.rank_process import DEATH, report_of
from tests.support.rank_script import compare
from unified_cache.storage_backends.file.store import FileStorage

WALL_S = 240.0
"""For all processes of a play; what takes longer hangs."""


def play(directory: Path, name: str, size: int, *, seeds: int = 0, steps: int = 0) -> list[object]:
    """Run a play with ``size`` processes; return by rank what each wrote down, None for one that died on purpose."""
    return play_all(directory, [name], size, seeds=seeds, steps=steps)[name]


def play_all(
    directory: Path, names: Sequence[str], size: int, *, seeds: int = 0, steps: int = 0
) -> dict[str, list[object]]:
    """Run plays one after the other, all with the same processes; return what ``play`` does, by play."""
    deadline_s = time.monotonic() + WALL_S
    arguments = [str(value) for value in (size, seeds, steps, directory)]
    with ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            command = [sys.executable, "-m", "tests.support.rank_process", ",".join(names), str(rank), *arguments]
            errors = stack.enter_context((directory / f"{rank}.err").open("wb"))
            started.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=errors))
            stack.enter_context(started[-1])
            stack.callback(started[-1].kill)
        for rank, running in enumerate(started):
            while running.poll() is None and not report_of(directory, names[-1], rank).exists():
                assert time.monotonic() < deadline_s, f"rank {rank} hangs"
                with suppress(subprocess.TimeoutExpired):
                    running.wait(0.02)
        for running in started:
            let_end(running)
            running.wait(max(1.0, deadline_s - time.monotonic()))
        statuses = [ended.returncode for ended in started]
    assert set(statuses) <= {0, DEATH}, [(directory / f"{rank}.err").read_text()[-3000:] for rank in range(size)]
    reports = {name: [report_of(directory, name, rank) for rank in range(size)] for name in names}
    return {
        name: [json.loads(report.read_text()) if report.exists() else None for report in written]
        for name, written in reports.items()
    }


def let_end(running: subprocess.Popen[bytes]) -> None:
    """Let a process end: none does before the others are done with it."""
    if running.stdin is not None:
        running.stdin.close()


@pytest.mark.parametrize(
    ("size", "seeds", "steps"),
    [(2, 4, 100), (4, 3, 60), pytest.param(8, 7, 80, marks=pytest.mark.long)],
)
def test_ranks_with_other_stores_lag_and_luck_keep_the_same_trees(
    tmp_path: Path, size: int, seeds: int, steps: int
) -> None:
    played = play(tmp_path, "seeds", size, seeds=seeds, steps=steps)
    happened: dict[str, int] = {}
    for number, reports in enumerate(zip(*played, strict=True)):
        for name, count in compare(reports, troubled=number % 2 == 1).items():
            happened[name] = happened.get(name, 0) + count
    assert all(happened.values()), happened


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 4, 8))])
def test_fresh_processes_resume_their_own_bytes_whatever_the_shape_of_their_group(tmp_path: Path, size: int) -> None:
    writers, readers = tmp_path / "writers", tmp_path / "readers"
    for place in (writers, readers):
        place.mkdir()
    assert play(writers, "back_up", size) == ["stored"] * size
    assert stored_objects(tmp_path / "store") == {str(cell): cell.objects() for cell in cells(size)}
    assert play(readers, "resume", size) == [{str(cell): PROMPT_PAGES for cell in cells(size)}] * size


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
    names = ("agree", "pairs", "disagree", "dawdle", "die")
    return play_all(tmp_path_factory.mktemp("ranks"), names, 3)


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
