"""Everything comes back over HiCache: every prompt, byte by byte."""

import pytest

from tests.engines.sglang.bench import CORES, Bench
from tests.engines.sglang.outcome import EngineJob


@pytest.mark.both_cores
def check_every_store(bench: Bench, stack: str, core: str) -> None:
    bench.run(EngineJob(stack, core, bench.all_fresh()))


@pytest.mark.both_cores
def check_what_one_process_writes_another_one_reads_on_another_core(bench: Bench, stack: str, core: str) -> None:
    stores, (other,) = bench.all_fresh(), {*CORES} - {core}
    bench.prepare(EngineJob(stack, core, stores, "write"))
    bench.run(EngineJob(stack, other, stores, "read"))


def check_two_ranks(bench: Bench, stack: str, core: str) -> None:
    """Each has its shard, or one writes for both; ``packed:`` serves one process at a time."""
    stores, meeting = bench.all_fresh("packed"), str(bench.root / f"meeting-{stack}")
    running = [bench.start(EngineJob(stack, core, stores, size=2, rank=rank, meeting=meeting)) for rank in range(2)]
    for run in running:
        bench.end(run)


@pytest.mark.both_cores
def check_a_conversation_whose_turns_are_anchored_on_those_before(bench: Bench, stack: str, core: str) -> None:
    plain, with_keys = (bench.all_fresh(hicache_storage_pass_prefix_keys=passed) for passed in (False, True))
    bench.run(EngineJob(stack, core, [*plain, *with_keys], grows=True, prompts=3, pages=4))


def check_a_store_that_is_attached_while_the_engine_runs(bench: Bench, stack: str, core: str) -> None:
    bench.run(EngineJob(stack, core, bench.all_fresh(), attach=True))


def check_prompts_of_more_pages_than_one_batch(bench: Bench) -> None:
    bench.run(EngineJob(stores=bench.all_fresh(), attach=True, prompts=1, pages=300, layers=1, heads=1))


@pytest.mark.parametrize("stack_alike", ["full", "mla", "swa", "dsv4"])
def check_host_pools_with_a_buffer_for_each_layer(bench: Bench, stack_alike: str) -> None:
    bench.run(EngineJob(stack_alike, stores=bench.all_fresh(), layout="layer_first", io_backend="direct"))
