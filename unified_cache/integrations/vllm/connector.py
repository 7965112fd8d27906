"""``UnifiedCacheConnector``: vLLM's own KV offloading over any store of this package, in one line. Imports vLLM.

    --kv-transfer-config '{"kv_connector": "UnifiedCacheConnector",
        "kv_connector_module_path": "unified_cache.integrations.vllm.connector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"url": "file:/var/kv", "cpu_bytes_to_use": 8589934592}}'

Copies, fences, groups, recency in host memory and metrics stay vLLM's: this adds the tier to its configuration, with
the facts about the engine that a tier by itself is not given.
"""

# Where vLLM is not installed pyright knows no name that comes from it through another module.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Mapping

from unified_cache.core.errors import ConfigError
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.vllm.engine import (
    KVCacheConfig,
    KVConnectorPromMetrics,
    KVConnectorRole,
    OffloadingConnector,
    PromMetric,
    PromMetricT,
    VllmConfig,
    build_offloading_config,
    current_platform,
    get_sliding_window_size_in_chunks,
    writer_of_bytes,
)
from unified_cache.integrations.vllm.facts import GroupFacts, VllmFacts, engine_facts, group_kind
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.integrations.vllm.tier import FACTS_KEY, UnifiedCacheTier

TIERS_KEY = "secondary_tiers"


class UnifiedCacheConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM's, untyped where it is not installed
    """vLLM's offloading connector, configured with one tier over a store."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Configure vLLM's connector; its scheduler's side opens the store.

        Raises:
            ConfigError: keys that contradict each other, weights without a revision, or a hash that is not stable.
        """
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        facts = None
        if role == KVConnectorRole.SCHEDULER:
            facts = _facts(vllm_config, kv_cache_config, TierSettings.of(_own(extra)))
        extra.update(_completed(extra, facts))
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Define vLLM's metrics and the tier's, in the front end, which has no connector of its own."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        extra.update(_completed(extra, None))
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _own(extra: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in extra.items() if key in TierSettings.model_fields}


def _completed(extra: Mapping[str, object], facts: VllmFacts | None) -> dict[str, object]:
    """Return what vLLM's offloading connector wants to find beside the user's keys; the same if called again."""
    tier: dict[str, object] = {
        **_own(extra),
        "type": UnifiedCacheTier.__name__,
        "module_path": UnifiedCacheTier.__module__,
    }
    if facts is not None:
        tier[FACTS_KEY] = facts
    others = extra.get(TIERS_KEY, [])
    if not isinstance(others, list):
        raise ConfigError(f"{TIERS_KEY} must be a list of tiers, found {others!r}")
    return {
        "spec_name": extra.get("spec_name", "TieringOffloadingSpec"),
        TIERS_KEY: [tier, *(other for other in others if other.get("type") != UnifiedCacheTier.__name__)],
    }


def _facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: TierSettings) -> VllmFacts:
    """Return the facts of this engine, with the user's word for its model and revision."""
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    groups: list[GroupFacts] = []
    for each in offloading.groups:
        group = kv_cache_config.kv_cache_groups[each.group_id]
        tokens = each.tokens_per_block * offloading.cache.blocks_per_chunk
        window = get_sliding_window_size_in_chunks(group.kv_cache_spec, tokens)
        span = SPAN_ALL if window is None else window
        groups.append(GroupFacts(each.group_id, tokens, span, group_kind(group)))
    machine = {
        "engine": writer_of_bytes(),
        "platform": f"{current_platform.device_name} {current_platform.get_device_capability() or ''}".strip(),
    }
    return engine_facts(vllm_config, offloading, groups, machine, settings)
