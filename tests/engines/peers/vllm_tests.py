"""A plug-in of pytest: vLLM's own tests of a secondary tier, run over ours.

The tests lie in vLLM's source, outside the repository; ``tests.engines.versions`` runs them. A test that makes a tier
gives its spec no group of layers and its chunks short hashes, which no engine does: both are made whole here.
"""

# pyright: reportMissingImports=false

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs

from unified_cache.integrations.vllm.chunks import ChunkNames, ChunkTier
from unified_cache.integrations.vllm.tier import UnifiedCacheTier

TIMEOUT_S = 20.0

MODEL = OffloadingModelConfig(name="model", dtype="float32")
CACHE = OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1)
PARALLEL = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)

_offload_key = base.make_offload_key


def _stable_key(block_hash: bytes, group: int) -> bytes:
    return bytes(_offload_key(block_hash.ljust(32, b"\0"), group))


def _whole(spec: base.OffloadingSpec, row_bytes: int) -> SimpleNamespace:
    """Return a spec with all that an engine's has, from a test's."""
    config, events = spec.config, spec.kv_events_config
    if not dataclasses.is_dataclass(config):
        config = OffloadingConfig((), 0, False, {}, "engine", MODEL, CACHE, PARALLEL)
    if not dataclasses.is_dataclass(events):
        events = base.OffloadingKVEventsConfig(enable_kv_cache_events=False, self_describing_kv_events=False)
    copies = 1 if config.replicated_layout else config.parallel.world_size
    groups = config.groups or (OffloadingGroupConfig(16, ("layer",), 0),)
    return SimpleNamespace(
        config=dataclasses.replace(config, groups=groups),
        kv_events_config=events,
        replicated_layout=config.replicated_layout,
        cpu_page_size_per_worker=row_bytes // copies,
    )


class ChunkPaths:
    """Paths of chunks, for tests that look into the directory."""

    def __init__(self, root: str, names: ChunkNames) -> None:
        self._names, self._root = names, Path(root)
        self.base_path = str(self._root / next(iter(names.pools.values()))[0].hex())

    def get_file_name(self, key: bytes) -> str:
        """Return where the store has a chunk."""
        label = self._names.label(key)
        return str(self._root / label.identity.hex() / label.key.hex()[0] / f"{label.key.hex()}.{label.pool}")


class FileTier(UnifiedCacheTier):
    """Our tier over ``file:`` with the arguments of vLLM's ``fs``."""

    def __init__(
        self,
        offloading_spec: base.OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        locality: str | None = None,
        **others: object,
    ) -> None:
        options = {} if locality is None else {"locality": locality}
        super().__init__(
            _whole(offloading_spec, (primary_kv_view.strides or (0,))[0]),
            primary_kv_view,
            tier_type,
            others.get("backpressure_detector"),
            url=f"file:{root_dir}",
            revision="drawn",
            on_reset="keep",
            deadline_s=TIMEOUT_S,
            **options,
        )
        self.file_mapper = ChunkPaths(root_dir, self._chunks.names)


class HeldChunks:
    """Chunks of a store, as tests that look into the example's ask for them and put them there; another tier does."""

    def __init__(self, tier: ChunkTier) -> None:
        self._tier = tier
        self.asked: set[bytes] = set()

    def __setitem__(self, key: bytes, value: bool) -> None:
        self.asked.add(key)
        self._tier.store(-1, [key], [0], lambda _: 0)
        assert self._tier.wait(TIMEOUT_S)
        (end,) = self._tier.ended()
        assert not end.failed

    def __contains__(self, key: bytes) -> bool:
        self._tier.look_up(key, "held")
        self._tier.step_ended()
        assert self._tier.wait(TIMEOUT_S)
        found = self._tier.look_up(key, "held")
        self._tier.request_ended("held")
        return bool(found)

    def __iter__(self) -> Iterator[bytes]:
        return (key for key in self.asked if key in self)

    def __len__(self) -> int:
        return len(list(iter(self)))


class ExampleTier(FileTier):
    """Our tier with the arguments of vLLM's example, whose jobs end and whose look-ups answer at once."""

    def __init__(
        self,
        offloading_spec: base.OffloadingSpec,
        primary_kv_view: object,
        tier_type: str,
        custom_param: int = 0,
        backpressure_detector: object = None,
    ) -> None:
        view = memoryview(bytearray(4096)).cast("B", (1, 4096))
        if isinstance(primary_kv_view, memoryview):
            view = primary_kv_view
        directory = mkdtemp()
        super().__init__(offloading_spec, view, tier_type, directory, backpressure_detector=backpressure_detector)
        self.chunks = HeldChunks(FileTier(offloading_spec, view, tier_type, directory)._chunks)

    def get_num_chunks(self) -> int:
        """Return how many chunks the store has of those that were stored."""
        return len(self.chunks)

    def lookup(self, key: bytes, req_context: base.ReqContext) -> base.LookupResult:
        """Answer, after a wait if need be."""
        found = super().lookup(key, req_context)
        if found is base.LookupResult.RETRY:
            self._wait()
            found = super().lookup(key, req_context)
        return found

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store and wait."""
        self.chunks.asked.update(job_metadata.keys)
        super().submit_store(job_metadata)
        self._wait()

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load and wait."""
        super().submit_load(job_metadata)
        self._wait()

    def _wait(self) -> None:
        self._chunks.step_ended()
        assert self._chunks.wait(TIMEOUT_S)


base.make_offload_key = _stable_key
fs.FileSystemTierManager = FileTier
example.ExampleSecondaryTierManager = ExampleTier


def _lookup_and_wait(
    tier: FileTier, keys: Sequence[bytes], ctx: base.ReqContext | None = None, timeout: float = TIMEOUT_S
) -> list[base.LookupResult]:
    ctx = base.ReqContext(req_id="test") if ctx is None else ctx
    for key in keys:
        tier.lookup(key, ctx)
    tier.on_schedule_end(base.ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))
    assert tier._chunks.wait(timeout)
    return [tier.lookup(key, ctx) for key in keys]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests wait for our look-ups instead of for vLLM's, which they see inside of."""
    for item in items:
        if isinstance(item, pytest.Function) and "lookup_and_wait" in vars(item.module):
            item.module.lookup_and_wait = _lookup_and_wait
