"""Names that the tier and the connector take from vLLM; the one module that knows in what its versions differ."""

# pyright: reportMissingImports=false

from vllm.version import __version__ as vllm_version

from unified_cache.core.errors import ConfigError

SUPPORTED = "0.32 or 0.33"
"""Versions that the checks of tests/engines/vllm ran under."""

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
    except ImportError:  # vLLM 0.32
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import get_sliding_window_size_in_chunks
except ImportError as error:
    raise ConfigError(f"unified-cache needs vLLM {SUPPORTED}, found vLLM {vllm_version}: {error}") from error

__all__ = [
    "BackpressureDetector",
    "JobResult",
    "KVCacheConfig",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
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
]
