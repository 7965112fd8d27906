"""Ranks as processes over gloo, which play what they are told over a pipe and send back what they saw."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from unified_cache.controller.ranks.gloo import FRAME_BYTES, TorchRanks
from unified_cache.core.errors import ConfigError, RankLostError

MEETING_S = 120
"""For all processes to start, on a slow machine."""
WALL_S = 240.0
"""For all processes of a play; what takes longer hangs."""
DEADLINE_S = 60.0
SHORT_DEADLINE_S = 2.0
DEATH = 9
"""Exit status of a rank that dies on purpose."""


class RankProcesses:
    """Ranks of one group, met in a directory; killed at the end of a ``with`` block."""

    def __init__(self, directory: Path, size: int) -> None:
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_obey, args=(theirs, directory, rank, size), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def play(self, play: Callable[..., object], *arguments: object) -> list[object]:
        """Have every rank play its part, in a group of their own; return by rank what each saw.

        It is None of a rank that died on purpose.
        """
        for pipe in self._pipes:
            pipe.send((play, arguments))
        return [self._seen_by(rank) for rank in range(len(self._pipes))]

    def _seen_by(self, rank: int) -> object:
        assert self._pipes[rank].poll(WALL_S), f"rank {rank} hangs"
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(WALL_S)
            assert self._processes[rank].exitcode == DEATH, f"rank {rank} failed, see its standard error"
            return None


def _obey(pipe: Connection, directory: Path, rank: int, size: int) -> None:
    """Be one rank: a group that has lost a rank does not end by itself."""
    torch.set_num_threads(1)
    meeting = f"file://{directory}/meeting"
    timeout = timedelta(seconds=MEETING_S)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timeout)
    with suppress(EOFError):  # whoever told it what to play is gone
        while True:
            play, arguments = pipe.recv()
            pipe.send(play(TorchRanks.open(DEADLINE_S), *arguments))
    os._exit(0)


def agree(ranks: TorchRanks) -> object:
    """Agree on arrays of every kind of length, each rank's with one False of its own."""
    found: list[bool] = []
    for length in (0, 1, 8, 63, 8 * FRAME_BYTES - 64, 8 * FRAME_BYTES - 63, 100_003):
        bits = np.ones(length, np.bool_)
        bits[ranks.rank :: 2 * ranks.size] = False
        expected = np.ones(length, np.bool_)
        for rank in range(ranks.size):
            expected[rank :: 2 * ranks.size] = False
        found.append(bool(np.array_equal(ranks.agree(bits), expected)))
    return [ranks.rank, ranks.size, found]


def disagree(ranks: TorchRanks) -> object:
    """Ask another question than the others; say what came of it, and of another call."""
    outcomes = [lost(ranks, 3 + ranks.rank // 2), lost(ranks, 1)]
    return [*outcomes, ranks.is_lost]


def lost(ranks: TorchRanks, length: int) -> str:
    try:
        ranks.agree(np.ones(length, np.bool_))
    except RankLostError as error:
        return str(error)
    return "agreed"


def pairs(ranks: TorchRanks) -> object:
    """Cut the processes into groups of two, but for the last one."""
    size = dist.get_world_size()
    groups = [[first, first + 1] for first in range(0, size - 1, 2)]
    try:
        pair = TorchRanks.open(DEADLINE_S, groups)
    except ConfigError as error:
        return str(error)
    bits = np.ones(size, np.bool_)
    bits[dist.get_rank()] = False
    return [pair.rank, pair.size, pair.agree(bits).tolist()]


def die(ranks: TorchRanks) -> object:
    """Lose the last rank, which dies; say what the others are told, and whether it took them long."""
    if ranks.rank == ranks.size - 1:
        os._exit(DEATH)
    started_s = time.monotonic()
    outcome = lost(ranks, 1)
    return [outcome.split(":")[0], ranks.is_lost, time.monotonic() - started_s < DEADLINE_S / 2]


def dawdle(ranks: TorchRanks) -> object:
    """Have the last rank not come to an agreement, though it lives; say how long the others waited."""
    short = TorchRanks.open(SHORT_DEADLINE_S)
    short.agree(np.ones(1, np.bool_))
    found: list[object] = []
    if ranks.rank < ranks.size - 1:
        started_s = time.monotonic()
        outcome = lost(short, 1)
        found = [outcome.split(":")[0], time.monotonic() - started_s < 10 * SHORT_DEADLINE_S]
    ranks.agree(np.ones(1, np.bool_))  # where the last one has waited meanwhile
    return found
