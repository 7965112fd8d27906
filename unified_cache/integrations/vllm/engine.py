"""Names that the tier and the connector take from vLLM; the one module that knows in what its versions differ."""

# pyright: reportMissingImports=false

from vllm.version import __version__ as vllm_version

from unified_cache.core.errors import ConfigError
from unified_cache.integrations.ranges import VersionRange

CHECKED = VersionRange("UnifiedCacheTier", "vLLM", "0.31", "0.33", "docs/vllm.md#versions")
"""Versions that ``make engines`` runs."""

try:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, PromMetric, PromMetricT
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
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
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_sliding_window_size_in_chunks
    except ImportError:  # vLLM 0.31 and 0.32
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import get_sliding_window_size_in_chunks
except ImportError as error:
    raise ConfigError(f"{CHECKED.line(vllm_version)}, which lacks what it needs: {error}") from error


def writer_of_bytes() -> str:
    """Return who gives the bytes of a chunk their meaning, as far as no other fact says it.

    The checked versions restore each other's chunks on a CPU, which is tried. Elsewhere each version has its own: its
    attention may order bytes otherwise, and vLLM does not say which one it chooses.
    """
    is_tried = current_platform.is_cpu() and vllm_version in CHECKED
    return f"vllm {CHECKED.oldest} to {CHECKED.newest}" if is_tried else f"vllm {vllm_version}"


__all__ = [
    "CHECKED",
    "BackpressureDetector",
    "JobResult",
    "KVCacheConfig",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadKey",
    "OffloadPolicy",
    "OffloadingConnector",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "PromMetric",
    "PromMetricT",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SecondaryTierManager",
    "TransferJob",
    "VllmConfig",
    "build_offloading_config",
    "current_platform",
    "get_sliding_window_size_in_chunks",
    "vllm_version",
    "writer_of_bytes",
]
