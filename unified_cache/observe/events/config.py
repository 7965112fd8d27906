"""Settings of a publisher of KV events."""

import math
from dataclasses import dataclass

from unified_cache.core.errors import ConfigError, check_kind, check_text
from unified_cache.observe.events.encoding import Consumer

__all__ = ["EventsConfig"]

INT_MAX = (1 << 31) - 1
"""Largest number that ZMQ and consumers take: a C int."""

CLOSE_S_MAX = 3_600.0
"""Longest ``close_timeout_s``: what a thread and a socket can wait for has an end."""


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Addresses, form and bounds of the events of one cache."""

    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of the PUB socket, in ZMQ's words; port 0 draws one."""
    replay_endpoint: str | None = None
    """Address of the ROUTER socket that sends past batches again; None for no replay."""
    connects: bool = False
    """True to connect the PUB socket to a subscriber that has bound the address; else it binds."""
    topic: str = ""
    """First frame of every message; some consumers expect ``kv@POD@MODEL``."""
    consumer: Consumer = Consumer.VLLM
    """Whose events consumers know."""
    rank: int | None = None
    """Data-parallel rank that batches name."""
    changes_pages_max: int = 1 << 18
    """Pages of changes that wait for ``publish``; after more, everything is announced again."""
    queued_pages_max: int = 1 << 18
    """Pages of changes handed over and not sent yet; with as many, ``publish`` hands over none."""
    batch_pages_max: int = 1_024
    """Pages reported in one batch."""
    replay_batches_max: int = 10_000
    """Batches kept for replay; as buffer_steps in vLLM 0.33."""
    replay_bytes_max: int = 64 << 20
    """Bytes kept for replay."""
    subscriber_batches_max: int = 10_000
    """Batches that wait for a slow subscriber; it misses those after them, and sees it by their numbers."""
    announce_pause_s: float = 1.0
    """Time between two announcements of everything that consumers ask for."""
    close_timeout_s: float = 2.0
    """How long ``close`` waits until what was handed over is sent."""

    def __post_init__(self) -> None:
        check_kind(self.consumer, Consumer, "consumer as a Consumer, such as Consumer.VLLM", ConfigError)
        check_text("topic", self.topic, ConfigError)
        if self.rank is not None:
            check_kind(self.rank, int, "rank as a number, or None", ConfigError)
            if not 0 <= self.rank <= INT_MAX:
                raise ConfigError(f"rank must be at least 0 and at most {INT_MAX}, found {self.rank}")
        for name, value, most in (
            ("changes_pages_max", self.changes_pages_max, math.inf),
            ("queued_pages_max", self.queued_pages_max, math.inf),
            ("batch_pages_max", self.batch_pages_max, math.inf),
            ("replay_batches_max", self.replay_batches_max, INT_MAX - 2),
            ("replay_bytes_max", self.replay_bytes_max, math.inf),
            ("subscriber_batches_max", self.subscriber_batches_max, INT_MAX),
            ("close_timeout_s", self.close_timeout_s, CLOSE_S_MAX),
        ):
            if not value > 0:
                raise ConfigError(f"{name} must be positive, found {value}")
            if value > most:
                raise ConfigError(f"{name} must be at most {most}, found {value}")
        if self.announce_pause_s < 0:
            raise ConfigError(f"announce_pause_s must not be negative, found {self.announce_pause_s}")
