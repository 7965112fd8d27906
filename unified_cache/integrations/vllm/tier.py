"""``UnifiedCacheTier``: any store of this package as a secondary tier of vLLM's KV offloading. Imports vLLM.

vLLM loads it by name, and makes one call at a time, on its scheduler's thread or, since 0.33, another; nothing here
waits but ``drain_jobs`` and ``shutdown``, which vLLM wants to. Beside other tiers it is configured as

    {"type": "UnifiedCacheTier", "module_path": "unified_cache.integrations.vllm.tier", "url": "file:/var/kv",
     "revision": "what tells these weights from others"}

and alone by ``UnifiedCacheConnector``, which finds out the revision, and everything else that KV depends on.
"""

# Where vLLM is not installed pyright knows no name that comes from it through another module.
# pyright: reportAttributeAccessIssue=false

import logging
from collections.abc import Collection, Iterable
from typing import ClassVar

from unified_cache.core.errors import StateError
from unified_cache.integrations.vllm.chunks import ChunkTier
from unified_cache.integrations.vllm.engine import (
    CHECKED,
    BackpressureDetector,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
    vllm_version,
)
from unified_cache.integrations.vllm.facts import VllmFacts, row_shape, spec_facts
from unified_cache.integrations.vllm.logs import show_logs_with
from unified_cache.integrations.vllm.metrics import FIGURES, TierFigures
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.protocol import Answer

FACTS_KEY = "engine_facts"
"""Key under which the connector hands an engine's facts down, in the tier's configuration."""

RESULTS = {
    Answer.HIT: LookupResult.HIT,
    Answer.MISS: LookupResult.MISS,
    Answer.UNAVAILABLE: LookupResult.RETRY,
}

logger = logging.getLogger(__name__)


class UnifiedCacheTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM's, untyped where it is not installed
    """Secondary tier of one engine. vLLM's types are translated here; ``ChunkTier`` does the work."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: object,
    ) -> None:
        """Open the store; ``options`` are the keys of ``TierSettings``, as the user wrote them.

        Raises:
            ConfigError: an option that cannot be, no revision, or a URL that names no store.
        """
        show_logs_with(logging.getLogger("vllm"))
        CHECKED.warn(vllm_version)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        facts = options.pop(FACTS_KEY, None)
        settings = TierSettings.of(options)
        if not isinstance(facts, VllmFacts):
            facts = spec_facts(offloading_spec.config, settings)
        row = row_shape(offloading_spec, self.block_size_bytes)
        self._chunks = ChunkTier.open(settings, facts, primary_kv_view, row)
        self.locality = Locality(settings.place)
        self._figures = TierFigures()
        self._blocks_per_chunk = offloading_spec.config.cache.blocks_per_chunk
        if offloading_spec.kv_events_config.enable_kv_cache_events:
            self._chunks.watch()
        names = self._chunks.names
        logger.info(
            "KV of %s, %s, is stored in %s: %s",
            names.identity.model,
            names.identity.revision,
            settings.url,
            ", ".join(f"{name}: {value}" for name, value in names.identity.facts),
        )

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer HIT, MISS, or RETRY until the store has answered."""
        return RESULTS[self._chunks.look_up(key, req_context.req_id)]

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to store a job's chunks that the store does not have."""
        context = job_metadata.req_context
        keys = list(job_metadata.keys)
        self._chunks.store(job_metadata.job_id, keys, job_metadata.chunk_ids.tolist(), context.get_offload_key_position)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to load a job's chunks."""
        self._chunks.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended; of a load that failed in part, the chunks that came."""
        return [
            JobResult(
                job_id=end.number,
                success=not end.failed,
                successful_keys=end.moved if end.is_load and end.failed and end.moved else None,
                transfer_time=end.seconds,
                transfer_bytes=len(end.moved) * self.block_size_bytes,
            )
            for end in self._chunks.ended()
        ]

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the stored and removed chunks since the last call, where vLLM publishes KV events."""
        changes = self._chunks.changes()
        # vLLM then keeps the blocks of each chunk, to name all of them when it goes. A chunk of one block has its name.
        is_kept = self._blocks_per_chunk > 1 and self._chunks.reports_removals
        return [
            OffloadingEvent(list(keys), self.medium, removed, self.locality, removal_expected=is_kept and not removed)
            for keys, removed in changes
        ]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Send the store a recency hint for chunks in use."""
        self._chunks.touch(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for the chunks that are computed; after an outage for those in host memory as well, see ``ChunkTier``."""
        is_behind = self._chunks.wants_old_chunks
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if is_behind else OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Drop what only this request needed to know."""
        self._chunks.request_ended(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the look-ups of this step."""
        self._chunks.step_ended()

    def drain_jobs(self) -> None:
        """Wait for all jobs, stores first, before vLLM resets its caches; bounded."""
        self._chunks.drain()

    def shutdown(self) -> None:
        """End jobs and threads, close the store and let vLLM's memory go; bounded.

        Raises:
            StateError: a call of the store goes on past its deadline, so vLLM must not unmap its memory.
        """
        if not self._chunks.close():
            raise StateError("a call of the store has not ended: vLLM's memory is left mapped")

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, object]) -> dict[str, OffloadingMetricMetadata]:
        """Return the metrics that there are, for vLLM's front end."""
        return {
            figure.name: (OffloadingGaugeMetadata if figure.is_gauge else OffloadingCounterMetadata)(
                documentation=figure.documentation, labelnames=figure.labels
            )
            for figure in FIGURES
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call; None if nothing was."""
        readings = self._figures.readings(self._chunks.counts, self._chunks.store_counts())
        if not readings:
            return None
        stats = OffloadingConnectorStats()
        for reading in readings:
            if reading.figure.is_gauge:
                stats.set_gauge(reading.figure.name, reading.value, reading.labels)
            else:
                stats.increase_counter(reading.figure.name, reading.value, reading.labels)
        return stats
