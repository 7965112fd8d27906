"""Settings of the adapter, from the extra configuration that SGLang hands over."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.loading import read_table
from unified_cache.core.settings.section import Bytes, Seconds, Section
from unified_cache.integrations.engine_store import EngineStoreConfig

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # pyright: ignore[reportMissingImports]

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


class HiCacheSettings(Section):
    """Settings of one adapter. The names are the keys in the extra configuration."""

    url: str = ""
    """The store, see ``storage_backends.url``."""
    revision: str | None = None
    """Name of the weights; None to take the digest of the checkpoint."""
    generation: Annotated[int, Field(ge=0, strict=True)] = 0
    """Raised by the operator when weights change under a running engine."""
    bytes_max: Bytes | None = None
    """Cap on what the store keeps."""
    deadline_s: Seconds = 2.0
    """Longest wait for one call of the store. A prefetch keeps its request waiting: as long as SGLang waits for 4096
    tokens by its own default."""
    landing_bytes: Bytes = EngineStoreConfig().landing_bytes
    """Bounce buffers, at most."""

    @model_validator(mode="after")
    def _names_a_store(self) -> "HiCacheSettings":
        if not self.url:
            raise ValueError('url must name the store, such as "url": "packed:/var/cache/kv", found none')
        return self

    @classmethod
    def of(cls, config: "HiCacheStorageConfig") -> "HiCacheSettings":
        """Read the extra configuration, and refuse what the adapter does not do.

        Raises:
            ConfigError: a setting is missing, unknown or wrong, or the engine is set up in a way that is not supported.
        """
        extra = config.extra_config or {}
        settings = read_table(cls, {key: extra[key] for key in extra if key not in ENGINE_KEYS}, "the extra config")
        if not extra.get("interface_v1"):
            raise ConfigError('the extra config must say "interface_v1": 1, without it SGLang copies page by page')
        if config.should_split_heads:
            raise ConfigError("tp_lcm_size is not supported: remove it from the extra config")
        if config.dcp_size != 1:
            raise ConfigError(f"decode context parallelism is not supported, found dcp_size {config.dcp_size}")
        return settings

    @property
    def store_config(self) -> EngineStoreConfig:
        """Deadline and bounce buffers of the engine's store."""
        return EngineStoreConfig(guard=GuardConfig(deadline_s=self.deadline_s), landing_bytes=self.landing_bytes)
