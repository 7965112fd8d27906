"""Ranks as real processes over gloo: they agree as threads do, and none hangs, whoever is late or dies."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from unified_cache.controller.ranks.gloo import FRAME_BYTES, TorchRanks
from unified_cache.core.errors import ConfigError, RankLostError

SIZE = 3
MEETING_S = 120
"""For all processes to start, on a slow machine."""
WALL_S = 240.0
"""For all processes of a play; what takes longer hangs."""
DEADLINE_S = 60.0
SHORT_DEADLINE_S = 2.0
DEATH = 9
"""Exit status of the rank that dies on purpose."""


def agree(ranks: TorchRanks) -> object:
    """Agree on arrays of every kind of length, each rank's with one False of its own."""
    found: list[bool] = []
    for length in (0, 1, 8, 63, 8 * FRAME_BYTES - 64, 8 * FRAME_BYTES - 63, 100_003):
        bits, expected = np.ones((2, length), np.bool_)
        bits[ranks.rank :: 2 * SIZE] = False
        for rank in range(SIZE):
            expected[rank :: 2 * SIZE] = False
        found.append(bool(np.array_equal(ranks.agree(bits), expected)))
    return [ranks.rank, ranks.size, all(found)]


def lost(ranks: TorchRanks, length: int) -> str:
    try:
        ranks.agree(np.ones(length, np.bool_))
    except RankLostError as error:
        return str(error)
    return "agreed"


def disagree(ranks: TorchRanks) -> object:
    """Ask another question than the others; say what came of it, and of another call."""
    return [lost(ranks, 3 + ranks.rank // 2), lost(ranks, 1), ranks.is_lost]


def pairs(ranks: TorchRanks) -> object:
    """Cut the processes into groups of two, but for the last one."""
    try:
        pair = TorchRanks.open(DEADLINE_S, [[0, 1]])
    except ConfigError as error:
        return str(error)
    return [pair.rank, pair.size, pair.agree(np.arange(SIZE) != ranks.rank).tolist()]


def dawdle(ranks: TorchRanks) -> object:
    """Have the last rank not come to an agreement, though it lives; say whether the others waited for long."""
    short = TorchRanks.open(SHORT_DEADLINE_S)
    short.agree(np.ones(1, np.bool_))
    found: list[object] = []
    if ranks.rank < SIZE - 1:
        started_s = time.monotonic()
        found = [lost(short, 1).split(":")[0], time.monotonic() - started_s < 10 * SHORT_DEADLINE_S]
    ranks.agree(np.ones(1, np.bool_))  # where the last one has waited meanwhile
    return found


def die(ranks: TorchRanks) -> object:
    """Lose the last rank, which dies; say what the others are told, and whether it took them long."""
    if ranks.rank == SIZE - 1:
        os._exit(DEATH)
    started_s = time.monotonic()
    return [lost(ranks, 1).split(":")[0], ranks.is_lost, time.monotonic() - started_s < DEADLINE_S / 2]


PLAYS = (agree, pairs, disagree, dawdle, die)


def live(pipe: Connection, directory: Path, rank: int) -> None:
    """Be one rank: play all parts, in a group of its own each. A group that has lost a rank does not end by itself."""
    torch.set_num_threads(1)
    meeting, timeout = f"file://{directory}/meeting", timedelta(seconds=MEETING_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=SIZE, timeout=timeout)
    for play in PLAYS:
        pipe.send(play(TorchRanks.open(DEADLINE_S)))
    os._exit(0)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[object]]]:
    """Return by play what each rank saw; None of the one that died."""
    context, directory = get_context("spawn"), tmp_path_factory.mktemp("ranks")
    pipes = [context.Pipe() for _ in range(SIZE)]
    processes = [
        context.Process(target=live, args=(theirs, directory, rank), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()

    def seen(rank: int) -> object:
        ours = pipes[rank][0]
        assert ours.poll(WALL_S), f"rank {rank} hangs"
        try:
            return ours.recv()
        except (EOFError, ConnectionResetError):
            processes[rank].join(WALL_S)
            assert processes[rank].exitcode == DEATH, f"rank {rank} failed, see its standard error"
            return None

    yield {play.__name__: [seen(rank) for rank in range(SIZE)] for play in PLAYS}
    for process in processes:
        process.kill()
        process.join()


def test_arrays_of_every_length_are_agreed_on(played: dict[str, list[object]]) -> None:
    assert played["agree"] == [[rank, SIZE, True] for rank in range(SIZE)]


def test_ranks_out_of_step_are_reported_on_every_rank(played: dict[str, list[object]]) -> None:
    for outcomes in played["disagree"]:
        assert isinstance(outcomes, list)
        first, second, is_lost = outcomes
        assert "out of step" in first
        assert (second, is_lost) == (first, True)


def test_processes_can_be_cut_into_groups(played: dict[str, list[object]]) -> None:
    outside = "process 2 is in none of the groups [[0, 1]]"
    assert played["pairs"] == [[0, 2, [False, False, True]], [1, 2, [False, False, True]], outside]


def test_a_rank_that_dies_is_lost_to_the_others_at_once(played: dict[str, list[object]]) -> None:
    assert played["die"] == [*([f"rank {rank} of 3 lost the others", True, True] for rank in range(2)), None]


def test_a_rank_that_does_not_come_in_time_is_lost_to_the_others(played: dict[str, list[object]]) -> None:
    assert played["dawdle"] == [*([f"rank {rank} of 3 lost the others", True] for rank in range(2)), []]
