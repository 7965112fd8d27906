"""Settings of the adapter, from the extra configuration that SGLang hands over."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unified_cache.byte_sizes import parse_bytes
from unified_cache.config import GuardConfig
from unified_cache.errors import ConfigError
from unified_cache.integrations.engine_store import EngineStoreConfig
from unified_cache.integrations.sglang.engine import StorageConfig

__all__ = ["HiCacheSettings"]

ENGINE_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
"""Keys of the extra configuration that SGLang itself reads."""

OWN_KEYS = ("url", "revision", "generation", "bytes_max", "deadline_s", "landing_bytes")

DEADLINE_S = 2.0
"""A prefetch keeps its request waiting: as long as SGLang waits for 4096 tokens by its own default."""


@dataclass(frozen=True, slots=True)
class HiCacheSettings:
    """Settings of one adapter."""

    url: str
    """The store, see ``storage_backends.url``."""
    revision: str | None
    """Name of the weights; None to take the digest of the checkpoint."""
    generation: int
    """Raised by the operator when weights change under a running engine."""
    bytes_max: int | None
    """Cap on what the store keeps."""
    external: EngineStoreConfig
    """Deadline and bounce buffers."""

    @classmethod
    def of(cls, config: StorageConfig) -> "HiCacheSettings":
        """Read the extra configuration, and refuse what the adapter does not do.

        Raises:
            ConfigError: a setting is missing, unknown or wrong, or the engine is set up in a way that is not supported.
        """
        extra = config.extra_config or {}
        unknown = sorted(set(extra) - ENGINE_KEYS - set(OWN_KEYS))
        if unknown:
            raise ConfigError(f"the extra config may have {', '.join(OWN_KEYS)}, found {', '.join(unknown)}")
        if not extra.get("interface_v1"):
            raise ConfigError('the extra config must say "interface_v1": 1, without it SGLang copies page by page')
        if config.should_split_heads:
            raise ConfigError("tp_lcm_size is not supported: remove it from the extra config")
        if config.dcp_size != 1:
            raise ConfigError(f"decode context parallelism is not supported, found dcp_size {config.dcp_size}")
        external = EngineStoreConfig(guard=replace(GuardConfig(), deadline_s=_seconds(extra, "deadline_s", DEADLINE_S)))
        landing_bytes = _size(extra, "landing_bytes")
        if landing_bytes is not None:
            external = replace(external, landing_bytes=landing_bytes)
        return cls(
            url=_url(extra),
            revision=_text(extra, "revision"),
            generation=_count(extra, "generation"),
            bytes_max=_size(extra, "bytes_max"),
            external=external,
        )


def _url(extra: Mapping[str, object]) -> str:
    url = _text(extra, "url")
    if not url:
        raise ConfigError('the extra config must name the store, such as "url": "packed:/var/cache/kv", found none')
    return url


def _text(extra: Mapping[str, object], key: str) -> str | None:
    value = extra.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key} in the extra config must be text, found {value!r}")
    return value


def _count(extra: Mapping[str, object], key: str) -> int:
    value = extra.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{key} in the extra config must be a whole number from 0 on, found {value!r}")
    return value


def _seconds(extra: Mapping[str, object], key: str, default_s: float) -> float:
    value = extra.get(key, default_s)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{key} in the extra config must be a number of seconds, found {value!r}")
    return float(value)


def _size(extra: Mapping[str, object], key: str) -> int | None:
    value = extra.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return parse_bytes(f"{key} in the extra config", str(value))
