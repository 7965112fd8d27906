"""Ranks as real processes over gloo: they agree as threads do, and none hangs, whoever is late or dies."""

import pytest

from tests.support.rank_process import RankProcesses, agree, dawdle, die, disagree, pairs


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


def test_a_rank_that_dies_is_lost_to_the_others_at_once(played: dict[str, list[object]]) -> None:
    assert played["die"] == [*([f"rank {rank} of 3 lost the others", True, True] for rank in range(2)), None]


def test_a_rank_that_does_not_come_in_time_is_lost_to_the_others(played: dict[str, list[object]]) -> None:
    *others, last = played["dawdle"]
    assert last == []
    for number, outcome in enumerate(others):
        assert outcome == [f"rank {number} of 3 lost the others", True]
