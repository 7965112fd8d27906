"""Keys that a user writes into vLLM's configuration, checked: what the tier is opened with."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar

from unified_cache.byte_sizes import parse_bytes
from unified_cache.errors import ConfigError
from unified_cache.storage_backends.protocol import Level

__all__ = ["OnReset", "TierSettings", "own_keys"]


class OnReset(Enum):
    """Meaning of a reset of vLLM's caches for the pages in the store."""

    FORGET = "forget"
    """This engine finds none of them any more: after a weight update they would be wrong."""
    KEEP = "keep"
    """They stay valid: whoever resets never changes the weights."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of one tier. The names are the keys in vLLM's configuration."""

    url: str
    """The store, as in ``open_storage``."""
    bytes_max: int | None = None
    """Cap on the bytes stored; text such as 100GiB in the configuration."""
    model: str = ""
    """Name that pages are stored under; vLLM's name of the model if empty. Engines share pages under one name only."""
    revision: str = ""
    """Revision of the weights; found out by the connector if empty, demanded by a tier without one."""
    on_reset: OnReset = OnReset.FORGET
    """What a reset of vLLM's caches means for the pages in the store."""
    level: Level = Level.CACHED
    """Promise of a put: cached, or durable through a crash of the machine."""
    deadline_s: float = 5.0
    """Longest wait for one call of the store."""
    close_timeout_s: float = 10.0
    """Longest wait for stores under way, at shut-down and at a reset; what has not begun by then is dropped."""
    store_share: float = 0.25
    """Largest share of vLLM's host memory that waits to be stored; more is dropped, so that loads find room."""
    load_threads: int = 1
    """Threads that only load."""
    store_threads: int = 2
    """Threads that store, and load first where loads wait: one copies and checks while another one waits."""

    def __post_init__(self) -> None:
        if not self.url:
            raise ConfigError("url must name a store, as in file:/var/kv or grpc://host:port, found none")
        for name, value in (("deadline_s", self.deadline_s), ("close_timeout_s", self.close_timeout_s)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, found {value}")
        if not 0 < self.store_share <= 1:
            raise ConfigError(f"store_share must be in (0, 1], found {self.store_share}")
        for name, count in (("load_threads", self.load_threads), ("store_threads", self.store_threads)):
            if count < 1:
                raise ConfigError(f"{name} must be at least 1, found {count}")

    @classmethod
    def of(cls, options: Mapping[str, object]) -> "TierSettings":
        """Read the keys of a configuration.

        Raises:
            ConfigError: a key that none is, or a value that cannot be; the message names it.
        """
        unknown = sorted(set(options) - own_keys())
        if unknown:
            raise ConfigError(f"the keys of a tier are {', '.join(sorted(own_keys()))}; found {', '.join(unknown)}")
        bytes_max = options.get("bytes_max")
        base = cls(_text(options, "url", ""))
        return cls(
            url=base.url,
            bytes_max=None if bytes_max is None else parse_bytes("bytes_max", str(bytes_max)),
            model=_text(options, "model", base.model),
            revision=_text(options, "revision", base.revision),
            on_reset=_one_of(OnReset, options, "on_reset", base.on_reset),
            level=_one_of(Level, options, "level", base.level),
            deadline_s=_number(options, "deadline_s", base.deadline_s),
            close_timeout_s=_number(options, "close_timeout_s", base.close_timeout_s),
            store_share=_number(options, "store_share", base.store_share),
            load_threads=int(_number(options, "load_threads", base.load_threads)),
            store_threads=int(_number(options, "store_threads", base.store_threads)),
        )


def own_keys() -> frozenset[str]:
    """Return the keys of a configuration that are the tier's own; all others are vLLM's."""
    return frozenset(each.name for each in fields(TierSettings))


def _text(options: Mapping[str, object], key: str, default: str) -> str:
    value = options.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be text, found {value!r}")
    return value


def _number(options: Mapping[str, object], key: str, default: float) -> float:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} must be a number, found {value!r}")
    return value


_Choice = TypeVar("_Choice", OnReset, Level)


def _one_of(kind: type[_Choice], options: Mapping[str, object], key: str, default: _Choice) -> _Choice:
    value = options.get(key, default.value)
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{key} must be one of {', '.join(each.value for each in kind)}, found {value!r}") from None
