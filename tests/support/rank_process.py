"""One rank as a process: ``python -m tests.support.rank_process PLAYS RANK SIZE SEEDS STEPS DIRECTORY``.

Meets the others through a file in the directory, plays its part in each of the plays, in a group of their own for each,
and writes what it saw to ``PLAY.RANK.json`` there.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.support.cache import ToyEngine, toy_layout
from tests.support.rank_grid import cells
from tests.support.rank_script import Rank
from tests.support.ranks import out_pages, ranked
from tests.support.waiting import wait_until
from unified_cache.controller import InlineWorkers, NotStarted, ThreadWorkers
from unified_cache.controller.ranks.gloo import FRAME_BYTES, TorchRanks
from unified_cache.core.errors import ConfigError, RankLostError
from unified_cache.core.page import Prompt
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage

MEETING_S = 120
"""For all processes to start, on a slow machine."""
DEADLINE_S = 60.0
SHORT_DEADLINE_S = 2.0
DEATH = 9
"""Exit status of a rank that dies on purpose."""


def play_seeds(ranks: TorchRanks, seeds: int, steps: int) -> object:
    """Let every seed's script run, first undisturbed, then troubled; report each."""
    reports = []
    for seed in range(seeds):
        for troubled in (False, True):
            rank = Rank(seed, ranks, troubled)
            rank.run(steps)
            rank.close()
            reports.append(rank.report())
    return reports


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
    """Lose the last rank with a transfer under way; say what the others have left."""
    toy = ToyEngine(toy_layout((SPAN_ALL, 2), 1), (40, 40), (40, 40), None, InlineWorkers())
    cache = ranked(toy, ranks, MemoryStorage(), ThreadWorkers.start())
    prompt, longer = cache.prompt(range(5)), cache.prompt(range(9))
    serve(toy, prompt)
    cache.backup(prompt)
    cache.wait_all(DEADLINE_S)
    operation = cache.prefetch(longer)
    assert operation
    if ranks.rank == ranks.size - 1:
        os._exit(DEATH)
    started_s = time.monotonic()
    outcome = "nothing"
    try:
        cache.wait_all(DEADLINE_S)
    except RankLostError:
        outcome = "lost"
    in_time = time.monotonic() - started_s < DEADLINE_S / 2
    told = [operation] == cache.wait_all(DEADLINE_S) and isinstance(operation.error, RankLostError)
    declined = [start(longer) is NotStarted.RANK_LOST for start in (cache.load, cache.backup, cache.prefetch)]
    verified = serve(toy, longer)
    cache.check()
    return [outcome, in_time, told, declined, verified, out_pages(cache), cache.close()]


def serve(toy: ToyEngine, prompt: Prompt) -> int:
    """Serve a request, verify its pages and let them go; return how many they are."""
    lock = toy.serve(prompt)
    assert lock is not None
    verified = toy.verify(prompt, lock)
    toy.cache.release(lock)
    return verified


def dawdle(ranks: TorchRanks, directory: Path) -> object:
    """Have the last rank not come, though it lives; say how long the others waited."""
    short = TorchRanks.open(SHORT_DEADLINE_S)
    short.agree(np.ones(1, np.bool_))
    if ranks.rank == ranks.size - 1:
        others = [report_of(directory, "dawdle", rank) for rank in range(ranks.rank)]
        assert wait_until(lambda: all(report.exists() for report in others), DEADLINE_S)
        return []
    started_s = time.monotonic()
    outcome = lost(short, 1)
    return [outcome.split(":")[0], time.monotonic() - started_s < 10 * SHORT_DEADLINE_S]


def back_up(ranks: TorchRanks, store: Path) -> object:
    """Back a prompt up as every cell of the grid, into one store."""
    storage = FileStorage.open(store)
    for cell in cells(ranks.size):
        cell.back_up(ranks, storage)
    return "stored"


def resume(ranks: TorchRanks, store: Path) -> object:
    """Resume that prompt as every cell; return by cell how many of its pages came, all of them verified."""
    storage = FileStorage.open(store)
    return {str(cell): cell.resume(ranks, storage) for cell in cells(ranks.size)}


def report_of(directory: Path, play: str, rank: int) -> Path:
    """Name the file of what a rank saw."""
    return directory / f"{play}.{rank}.json"


def main(names: Sequence[str], rank: int, size: int, seeds: int, steps: int, directory: Path) -> None:
    """Meet the others; play and report, play by play."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=MEETING_S),
    )
    plays: Mapping[str, Callable[[TorchRanks], object]] = {
        "seeds": lambda ranks: play_seeds(ranks, seeds, steps),
        "agree": agree,
        "disagree": disagree,
        "pairs": pairs,
        "die": die,
        "dawdle": lambda ranks: dawdle(ranks, directory),
        "back_up": lambda ranks: back_up(ranks, directory.parent / "store"),
        "resume": lambda ranks: resume(ranks, directory.parent / "store"),
    }
    for name in names:
        report = plays[name](TorchRanks.open(DEADLINE_S))
        draft = directory / f"{name}.{rank}.draft"
        draft.write_text(json.dumps(report))
        draft.rename(report_of(directory, name, rank))
    sys.stdin.read()  # until the parent closes it: the others may not be done with this one
    os._exit(0)  # a group that has lost a rank does not end by itself


if __name__ == "__main__":
    names, number, count, seeds_count, steps_count, place = sys.argv[1:]
    main(names.split(","), int(number), int(count), int(seeds_count), int(steps_count), Path(place))
