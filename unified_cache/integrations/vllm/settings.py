"""Keys that a user writes into vLLM's configuration, checked: what the tier is opened with."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from unified_cache.core.settings.loading import read_table
from unified_cache.core.settings.section import Bytes, Seconds, Section
from unified_cache.storage_backends.protocol import Level

LOCAL_STORES = ("file:", "memory:", "packed:")


class TierSettings(Section):
    """Settings of one tier. The names are the keys in vLLM's configuration."""

    url: str = ""
    """The store, as in ``open_storage``."""
    bytes_max: Bytes | None = None
    """Cap on the bytes stored; text such as 100GiB in the configuration."""
    model: str = ""
    """Name that pages are stored under; vLLM's name of the model if empty. Engines share pages under one name only."""
    revision: str = ""
    """Revision of the weights; found out by the connector if empty, demanded by a tier without one."""
    on_reset: Literal["forget", "keep"] = "forget"
    """Whether this engine finds its pages in the store again after a reset of vLLM's caches. Not where it follows a
    change of weights: they would be wrong."""
    level: Level = Level.CACHED
    """Promise of a put: cached, or durable through a crash of the machine."""
    deadline_s: Seconds = 5.0
    """Longest wait for one call of the store."""
    close_timeout_s: Seconds = 10.0
    """Longest wait for stores under way, at shut-down and at a reset; what has not begun by then is dropped."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Where the store lies, for routers that read vLLM's events; by its URL if None."""
    store_share: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Largest share of vLLM's host memory that waits to be stored; more is dropped, so that loads find room."""

    @model_validator(mode="after")
    def _names_a_store(self) -> "TierSettings":
        if not self.url:
            raise ValueError("url must name a store, as in file:/var/kv or grpc://host:port, found none")
        return self

    @property
    def place(self) -> str:
        """Where the store lies: of a directory LOCAL, unless the user says that it is of a shared file system."""
        return self.locality or ("LOCAL" if self.url.startswith(LOCAL_STORES) else "REMOTE")

    @classmethod
    def of(cls, options: Mapping[str, object]) -> "TierSettings":
        """Read the keys of a configuration.

        Raises:
            ConfigError: a key that none is, or a value that cannot be; the message names it.
        """
        return read_table(cls, options, "kv_connector_extra_config")
