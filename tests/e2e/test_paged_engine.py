"""The engine of the document on embedding, aborted at random: no byte of a hit is wrong, and no slot is lost."""

import random
from pathlib import Path

import pytest

from examples.paged_engine import CONFIG, WINDOW, PagedEngine, PagedRequest, state, states

ABORTS = 150
ABORTS_LONG = 10_000
JOBS_MAX = 4


def answer(tokens: list[int], length: int) -> list[int]:
    """Return what the model answers, computed without a cache."""
    said = list(tokens)
    full, window = states(tokens)
    while len(said) < length:
        said.append(window[-1] % 1000)
        for kept, value in zip((full, window), state(said[-1], full, window[-WINDOW + 1 :]), strict=True):
            kept.append(value)
    return said[len(tokens) :]


def abort_at_random(directory: Path, seed: int, aborts: int) -> int:
    """Serve prompts that share prefixes, abort and restart now and then; return how many pages came from a tier."""
    dice = random.Random(seed)
    engine, aborted, hits = PagedEngine(f"file:{directory}"), 0, 0
    jobs: list[tuple[PagedRequest, list[int]]] = []
    while aborted < aborts:
        while len(jobs) < JOBS_MAX:
            prompt = [dice.randrange(3), *range(dice.randrange(4, 60))]
            jobs.append((engine.submit(prompt, dice.randrange(1, 9)), prompt))
        for _ in range(dice.randrange(1, 6)):
            engine.step()
        for job, prompt in [each for each in jobs if len(each[0].tokens) == each[0].length_max]:
            assert job.tokens[len(prompt) :] == answer(prompt, job.length_max)
            jobs.remove((job, prompt))
        if jobs and dice.random() < 0.9:
            job, prompt = jobs.pop(dice.randrange(len(jobs)))
            engine.abort(job)
            aborted += 1
        if dice.random() < 0.01:
            hits += engine.cache.stats().lookups.hits.total
            engine.cache.close()
            engine, jobs = PagedEngine(f"file:{directory}"), []
    for job, _ in jobs:
        engine.abort(job)
    for _ in range(2):  # how many came before depends on the machine's time; of these the second does
        engine.submit(range(50), 3)
        engine.run()
    engine.cache.wait_all(timeout_s=30)
    engine.cache.check()
    assert [engine.cache.available(component) for component in (0, 1)] == list(CONFIG.device_pages), "slots are lost"
    hits += engine.cache.stats().lookups.hits.total
    engine.cache.close()
    return hits


def test_no_abort_loses_a_slot_or_leaves_a_wrong_byte(tmp_path: Path) -> None:
    assert abort_at_random(tmp_path, seed=1, aborts=ABORTS) > 0


@pytest.mark.long
def test_ten_thousand_aborts_lose_nothing(tmp_path: Path) -> None:
    assert abort_at_random(tmp_path, seed=2, aborts=ABORTS_LONG) > 0
