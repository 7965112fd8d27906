"""Settings of both ways into SGLang, from the extra configuration that it hands over."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.loading import read_table
from unified_cache.core.settings.section import Bytes, BytesOrNone, Seconds, Section
from unified_cache.integrations.engine_store import EngineStoreConfig
from unified_cache.integrations.sglang.versions import decode_context_size

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # pyright: ignore[reportMissingImports]

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

LOOKUP_WAIT_S_MAX = 5.0
"""Longest wait of a look-up that may be asked for: nothing else is scheduled meanwhile."""


class StoreSettings(Section):
    """Settings of the store, the same for both ways. The names are the keys in the extra configuration."""

    url: str = ""
    """The store, see ``storage_backends.url``."""
    revision: str | None = None
    """Name of the weights; None to take the digest of the checkpoint."""
    generation: Annotated[int, Field(ge=0, strict=True)] = 0
    """Raised by the operator when weights change under a running engine."""
    bytes_max: Bytes | None = None
    """Cap on what the store keeps."""
    deadline_s: Seconds = 2.0
    """Longest wait for one call of the store. A prefetch of HiCache keeps its request waiting: as long as SGLang waits
    for 4096 tokens by its own default."""
    bounce_bytes: Bytes = EngineStoreConfig().bounce_bytes
    """Bounce buffers, at most."""

    @model_validator(mode="after")
    def _names_a_store(self) -> "StoreSettings":
        if not self.url:
            raise ValueError('url must name the store, such as "url": "packed:/var/cache/kv", found none')
        return self

    @property
    def store_config(self) -> EngineStoreConfig:
        """Deadline and bounce buffers of the engine's store."""
        return EngineStoreConfig(guard=GuardConfig(deadline_s=self.deadline_s), bounce_bytes=self.bounce_bytes)


class HiCacheSettings(StoreSettings):
    """Settings of the storage behind SGLang's host tier."""

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
        if (size := decode_context_size(config)) != 1:
            raise ConfigError(f"decode context parallelism is not supported, found dcp_size {size}")
        return settings


class LinkerSettings(StoreSettings):
    """Settings of the linker, whose host tier is ours."""

    host_bytes: BytesOrNone = 0
    """Host memory of each rank for pages, pinned where the device is a GPU."""
    lookup_wait_s: Annotated[float, Field(ge=0.0, le=LOOKUP_WAIT_S_MAX)] = 0.0
    """How long a look-up waits for storage, once for each request; SGLang's scheduler stands still meanwhile."""

    @model_validator(mode="after")
    def _has_a_host_tier(self) -> "LinkerSettings":
        if not self.host_bytes:
            raise ValueError('host_bytes must say how much memory each rank may take, such as "host_bytes": "64GB"')
        return self

    @classmethod
    def of(cls, extra: Mapping[str, object]) -> "LinkerSettings":
        """Read ``linker_extra_config``.

        Raises:
            ConfigError: a setting is missing, unknown or wrong.
        """
        return read_table(cls, dict(extra), "linker_extra_config")
