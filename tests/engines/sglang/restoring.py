"""Sections in which everything comes back: every prompt, byte by byte."""

from tests.engines.sglang.bench import CORES, ROOT, STACKS, STACKS_BY_TURNS, Bench, whole
from tests.engines.sglang.outcome import EngineJob

__all__ = ["attach", "layouts", "matrix", "processes", "ranks", "record", "talks"]

RECORDINGS = ROOT / "tests" / "unit" / "integrations" / "sglang_recordings"


def matrix(bench: Bench) -> None:
    """Every stack on both tree cores over every store."""
    for stack in STACKS:
        for core in CORES:
            bench.run(f"matrix {stack} {core}", whole, EngineJob(stack, core, bench.all_fresh()))


def processes(bench: Bench) -> None:
    """Stores that one process writes and another one reads, on another tree core."""
    for stack in STACKS:
        for core, other in (CORES, CORES[::-1]):
            stores, name = bench.all_fresh(), f"two processes {stack} {core} to {other}"
            bench.prepare(name, EngineJob(stack, core, stores, "write"))
            bench.run(name, whole, EngineJob(stack, other, stores, "read"))


def ranks(bench: Bench) -> None:
    """Two ranks over gloo: each has its shard, or one writes for both; ``packed:`` serves one process at a time."""
    for stack, core in STACKS_BY_TURNS:
        stores, meeting = bench.all_fresh("packed"), str(bench.root / f"meeting-{stack}")
        running = [bench.start(EngineJob(stack, core, stores, size=2, rank=rank, meeting=meeting)) for rank in range(2)]
        for rank, run in enumerate(running):
            bench.end(f"two ranks {stack} {core} rank {rank}", whole, run)


def talks(bench: Bench) -> None:
    """Conversations that grow: every turn is anchored on the one before."""
    for stack in STACKS:
        for core in CORES:
            plain, with_keys = (bench.all_fresh(hicache_storage_pass_prefix_keys=passed) for passed in (False, True))
            labels = [*bench.stores, *(f"{kind}, with prefix keys" for kind in bench.stores)]
            job = EngineJob(stack, core, [*plain, *with_keys], grows=True, prompts=3, pages=4)
            bench.run(f"conversation {stack} {core}", whole, job, labels)


def attach(bench: Bench) -> None:
    """A store that is attached while the engine runs; prompts of more pages than one batch."""
    for stack, core in STACKS_BY_TURNS:
        bench.run(f"attached later {stack} {core}", whole, EngineJob(stack, core, bench.all_fresh(), attach=True))
    job = EngineJob(stores=bench.all_fresh(), attach=True, prompts=1, pages=300, layers=1, heads=1)
    bench.run("attached later, 300 pages, full rust", whole, job)


def layouts(bench: Bench) -> None:
    """Host pools of another layout, with a buffer for each layer."""
    for stack in ("full", "mla", "swa", "dsv4"):
        job = EngineJob(stack, stores=bench.all_fresh(), layout="layer_first", io_backend="direct")
        bench.run(f"layer first {stack}", whole, job)


def record(bench: Bench) -> None:
    """Keep the engine's calls for tests without it: growing conversations with prefix keys, and two prompts."""
    for stack in STACKS:
        for name, grows in (("prompts", False), ("conversation", True)):
            stores = [bench.fresh("file") | {"hicache_storage_pass_prefix_keys": grows}]
            path = RECORDINGS / f"{stack}_{name}.json"
            job = EngineJob(
                stack, stores=stores, grows=grows, prompts=2, pages=5, window_pages=2, layers=2, record=str(path)
            )
            bench.run(f"recorded {stack} {name}", whole, job)
