"""Chunks through vLLM's own tiering manager: our stores against its fs tier, as shipped and buffered, in one run.

Runs with the interpreter that has vLLM: ``make bench-vllm``. The page cache is dropped before every read, on both
sides; a write ends when the manager knows that it has, durable ones when a crash cannot undo them: of ``fs``, which
does not promise it, when every file and directory that the write changed is synced. Beside them stands what the disk
itself gives: the same files read directly, without a tier.

Figures are kept in ``benchmarks/results/vllm_tiers.json``, in place of those before, unless ``--json`` says where.
"""

# pyright: reportMissingImports=false
import argparse
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from benchmarks.machine import calibrate, machine
from benchmarks.measure import Spread
from unified_cache.integrations.vllm.tier import UnifiedCacheTier

RESULTS = Path(__file__).resolve().parent / "results" / "vllm_tiers.json"
"""Figures of the last run."""

ROUNDS = 7
STEP_S = 0.001
"""Pause of vLLM's engine core in a step that has nothing to compute."""

KiB, MiB = 1 << 10, 1 << 20

SIZES = ((32 * KiB, 64), (256 * KiB, 64), (MiB, 48), (2 * MiB, 48), (12 * MiB, 8))
"""Bytes and number of chunks."""

STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


@dataclass(frozen=True, slots=True)
class TierKind:
    """A tier to measure."""

    name: str
    make: Callable[["VllmHostTier", Path], SecondaryTierManager]
    is_durable: bool = False
    """Whether a put is over only when a crash cannot undo it."""
    is_synced_after: bool = False
    """Whether the tier promises nothing, and the files of each write are synced to measure what the promise would cost.

    It is then measured for its writes alone."""


@dataclass(slots=True)
class TierTimes:
    """Rates of one tier, MB/s by round."""

    reads: list[float]
    writes: list[float]


class VllmHostTier:
    """vLLM's host memory and what its tiers want to know, without an engine."""

    def __init__(self, chunk_bytes: int, count: int) -> None:
        engine = f"bench-{uuid.uuid4().hex}"
        self.chunk_bytes = chunk_bytes
        self.region = SharedOffloadRegion(engine, count, None, chunk_bytes, chunk_bytes)
        self.primary = CPUPrimaryTierOffloadingManager(num_chunks=count, mmap_region=self.region)
        self.view = self.primary.get_kv_memoryview()
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
            worker_kv_bytes_per_block=chunk_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id=engine,
            model=OffloadingModelConfig(name="bench", dtype="bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        self.spec = SimpleNamespace(
            config=config,
            blocks_per_chunk=1,
            replicated_layout=False,
            cpu_page_size_per_worker=chunk_bytes,
            kv_events_config=OffloadingKVEventsConfig(False, False),
        )


def fs(host: VllmHostTier, directory: Path) -> SecondaryTierManager:
    return FileSystemTierManager(host.spec, host.view, "fs", root_dir=str(directory))


def fs_buffered(host: VllmHostTier, directory: Path) -> SecondaryTierManager:
    tier = fs(host, directory)
    tier._use_o_direct = False
    return tier


def ours(scheme: str, level: str) -> Callable[[VllmHostTier, Path], SecondaryTierManager]:
    def make(host: VllmHostTier, directory: Path) -> SecondaryTierManager:
        url = f"{scheme}:{directory}"
        return UnifiedCacheTier(
            host.spec,
            host.view,
            "UnifiedCacheTier",
            url=url,
            revision="1",
            level=level,
            store_share=1.0,
            on_reset="keep",
        )

    return make


KINDS = (
    TierKind("fs as shipped", fs),
    TierKind("fs buffered", fs_buffered),
    TierKind("fs buffered, synced", fs_buffered, is_durable=True, is_synced_after=True),
    TierKind("file: cached", ours("file", "cached")),
    TierKind("packed: cached", ours("packed", "cached")),
    TierKind("file: durable", ours("file", "durable"), is_durable=True),
    TierKind("packed: durable", ours("packed", "durable"), is_durable=True),
)


class TierRun:
    """One tier under vLLM's manager, over a directory of its own."""

    def __init__(self, kind: TierKind, chunk_bytes: int, count: int, directory: Path) -> None:
        self.kind = kind
        self.host = VllmHostTier(chunk_bytes, count)
        self.directory = SyncedDirectory(directory)
        self.manager = TieringOffloadingManager(self.host.primary, [kind.make(self.host, directory)])
        self.requests = 0
        self.content = np.random.default_rng(chunk_bytes).integers(0, 256, (count, chunk_bytes), np.uint8)

    @contextmanager
    def request(self) -> Iterator[ReqContext]:
        """Make a request of the manager, and step until nothing of it is left."""
        self.requests += 1
        context = ReqContext(f"request-{self.requests}")
        self.manager.on_new_request(context)
        yield context
        self.manager.on_request_finished(context)
        self.settle()

    def settle(self) -> None:
        while True:
            self.manager.on_schedule_end(STEP)
            if not self.manager.has_pending_work():
                return
            time.sleep(STEP_S)

    def write(self, keys: Sequence[OffloadKey]) -> float:
        """Store chunks that the tier does not have; return the rate in MB/s."""
        self.manager.reset_cache()
        rows = np.asarray(self.host.view).view(np.uint8)
        with self.request() as context:
            for number, key in enumerate(keys):
                context.set_offload_key_position(key, (number + 1) * 16)
            prepared = self.manager.prepare_store(keys, context)
            for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
                rows[row] = self.content[keys.index(key)]
            started_s = time.perf_counter()
            self.manager.complete_store(keys, context)
            self.settle()
            if self.kind.is_synced_after:
                self.directory.sync()
            seconds = time.perf_counter() - started_s
        return rate(len(keys) * self.host.chunk_bytes, seconds)

    def read(self, keys: Sequence[OffloadKey]) -> float:
        """Load chunks with a page cache that has none of them; return the rate in MB/s."""
        self.manager.reset_cache()
        np.asarray(self.host.view)[:] = 0
        self.directory.sync()
        drop_page_cache(self.directory.path)
        with self.request() as context:
            started_s = time.perf_counter()
            while True:
                results = [self.manager.lookup(key, context) for key in keys]
                if all(result.name == "HIT" for result in results):
                    break
                assert not any(result.name == "MISS" for result in results), self.kind.name
                self.manager.on_schedule_end(STEP)
                time.sleep(STEP_S)
            seconds = time.perf_counter() - started_s
            rows = np.asarray(self.host.view).view(np.uint8)
            for row, expected in zip(self.manager.prepare_load(keys, context).chunk_ids, self.content, strict=True):
                assert np.array_equal(rows[row], expected), self.kind.name
            self.manager.complete_load(keys, context)
        return rate(len(keys) * self.host.chunk_bytes, seconds)

    def close(self) -> None:
        self.manager.shutdown()


def rate(size_bytes: int, seconds: float) -> float:
    return size_bytes / seconds / 1e6


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


class SyncedDirectory:
    """A directory whose files and directories are on the disk as they were at the last ``sync``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mtimes_ns: dict[Path, int] = {}

    def sync(self) -> None:
        """Sync what has changed since the last call: a sync of what has not costs the disk as much again."""
        for path in (self.path, *self.path.rglob("*")):
            mtime_ns = path.stat().st_mtime_ns
            if self._mtimes_ns.get(path) != mtime_ns:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
                self._mtimes_ns[path] = mtime_ns


def drop_page_cache(directory: Path) -> None:
    """Have no byte of the files in the page cache; they are on the disk."""
    for path in files_of(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def keys_of(round_number: int, count: int) -> list[OffloadKey]:
    rng = np.random.default_rng(round_number)
    return [OffloadKey(rng.bytes(32) + bytes(4)) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class RawReads:
    """Files of chunks read directly, without a tier: what the disk gives."""

    name: str
    memory: mmap
    """Of ``threads_count`` chunks."""
    threads_count: int

    @classmethod
    def of_size(cls, chunk_bytes: int) -> "list[RawReads]":
        """Make those that bound a tier: one read at a time into ordinary memory, as ``fs``, and two into huge pages."""
        ordinary, huge = (mmap(-1, 2 * chunk_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS) for _ in range(2))
        huge.madvise(MADV_HUGEPAGE)
        return [cls("raw, one at a time", ordinary, 1), cls("raw, two at a time, huge pages", huge, 2)]

    def read(self, paths: Sequence[Path], chunk_bytes: int) -> float:
        """Read files of that length; return the rate in MB/s."""

        def read_every(first: int) -> None:
            with memoryview(self.memory) as memory, memory[first * chunk_bytes :][:chunk_bytes] as chunk:
                for path in paths[first :: self.threads_count]:
                    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
                    assert os.preadv(descriptor, [chunk], 0) == chunk_bytes
                    os.close(descriptor)

        started_s = time.perf_counter()
        with ThreadPoolExecutor(self.threads_count) as threads:
            list(threads.map(read_every, range(self.threads_count)))
        return rate(len(paths) * chunk_bytes, time.perf_counter() - started_s)


def measure(chunk_bytes: int, count: int, rounds: int, root: Path) -> dict[str, TierTimes]:
    """Let the tiers take turns: each round writes new chunks and reads them; then the disk alone."""
    runs = [TierRun(kind, chunk_bytes, count, root / str(number)) for number, kind in enumerate(KINDS)]
    raw = RawReads.of_size(chunk_bytes)
    times = {each: TierTimes([], []) for each in (*(run.kind.name for run in runs), *(each.name for each in raw))}
    for number in range(rounds):
        keys = keys_of(number, count)
        for run in runs if number % 2 == 0 else reversed(runs):
            times[run.kind.name].writes.append(run.write(keys))
            if not run.kind.is_synced_after:
                times[run.kind.name].reads.append(run.read(keys))
        paths = [path for path in files_of(runs[0].directory.path) if path.stat().st_size == chunk_bytes][-count:]
        drop_page_cache(runs[0].directory.path)
        for each in raw:
            each.read(paths[:1], chunk_bytes)
            times[each.name].reads.append(each.read(paths, chunk_bytes))
    for run in runs:
        run.close()
    return times


def spreads_of(times: dict[str, TierTimes]) -> dict[str, dict[str, Spread]]:
    """Summarise rates by direction and tier."""
    return {
        "reads": {name: Spread.of(each.reads) for name, each in times.items() if each.reads},
        "writes": {name: Spread.of(each.writes) for name, each in times.items() if each.writes},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--kib", type=int, nargs="+", help="chunks of these sizes alone")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    started, began_s = datetime.now(UTC), time.monotonic()
    before, calibration = machine(), calibrate()
    found: list[dict[str, object]] = []
    for chunk_bytes, count in SIZES:
        if options.kib and chunk_bytes // KiB not in options.kib:
            continue
        with TemporaryDirectory(dir=options.directory) as root:
            spreads = spreads_of(measure(chunk_bytes, count, options.rounds, Path(root)))
        for way, by_tier in spreads.items():
            shipped = by_tier["fs as shipped"].median
            print(f"{chunk_bytes // KiB} KiB x {count}, {way}, MB/s (to fs as shipped): ", end="")
            print(
                ", ".join(f"{name} {each.median:.0f} ({each.median / shipped:.2f})" for name, each in by_tier.items())
            )
        mb_per_s = {way: {name: asdict(each) for name, each in by_tier.items()} for way, by_tier in spreads.items()}
        found.append({"chunk_bytes": chunk_bytes, "chunks": count, "mb_per_s": mb_per_s})
    run = {
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began_s, 1),
        "machine": asdict(before),
        "load_average_after": os.getloadavg(),
        "calibration": asdict(calibration) | {"scale": calibration.scale},
        "sizes": found,
    }
    options.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
