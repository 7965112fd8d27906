"""Everything comes back over HiCache, and over our linker in its place: every prompt, byte by byte."""

from dataclasses import replace

import pytest

from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.runner import CORES, EngineRunner

OVER = pytest.mark.parametrize("linked", ["", "whole"], ids=["hicache", "linker"])


@OVER
@pytest.mark.both_cores
def check_every_store(runner: EngineRunner, stack: str, core: str, linked: str) -> None:
    runner.run(EngineJob(stack, core, runner.all_fresh(), linked=linked))


@pytest.mark.both_cores
def check_what_one_process_writes_another_one_reads_on_another_core(
    runner: EngineRunner, stack: str, core: str
) -> None:
    stores, (other,) = runner.all_fresh(), {*CORES} - {core}
    runner.prepare(EngineJob(stack, core, stores, "write"))
    runner.run(EngineJob(stack, other, stores, "read"))


@OVER
def check_two_ranks(runner: EngineRunner, stack: str, core: str, linked: str) -> None:
    """Each has its shard, or one writes for both; ``packed:`` serves one process at a time."""
    stores, meeting = runner.all_fresh("packed"), str(runner.root / f"meeting-{stack}-{linked}")
    job = EngineJob(stack, core, stores, size=2, meeting=meeting, linked=linked)
    for run in [runner.start(replace(job, rank=rank)) for rank in range(2)]:
        runner.end(run)


@pytest.mark.both_cores
def check_a_conversation_whose_turns_are_anchored_on_those_before(runner: EngineRunner, stack: str, core: str) -> None:
    plain, with_keys = (runner.all_fresh(hicache_storage_pass_prefix_keys=passed) for passed in (False, True))
    runner.run(EngineJob(stack, core, [*plain, *with_keys], grows=True, prompts=3, pages=4))


def check_a_store_that_is_attached_while_the_engine_runs(runner: EngineRunner, stack: str, core: str) -> None:
    runner.run(EngineJob(stack, core, runner.all_fresh(), attach=True))


def check_prompts_of_more_pages_than_one_batch(runner: EngineRunner) -> None:
    runner.run(EngineJob(stores=runner.all_fresh(), attach=True, prompts=1, pages=300, layers=1, heads=1))


@pytest.mark.parametrize("stack_alike", ["full", "mla", "swa", "dsv4"])
def check_host_pools_with_a_buffer_for_each_layer(runner: EngineRunner, stack_alike: str) -> None:
    runner.run(EngineJob(stack_alike, stores=runner.all_fresh(), layout="layer_first", io_backend="direct"))
