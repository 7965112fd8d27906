"""Interface of an engine's store to its adapter: settings, pages, reasons for what is not available, and counts."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import NamedTuple

from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError, check_kind, without_secrets
from unified_cache.core.seal import Flaw, Label
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.protocol import PIECE_BYTES_MAX, Answer
from unified_cache.storage_backends.wrappers import Method

logger = logging.getLogger(__name__)

Clock = Callable[[], float]
"""Seconds, for ages and deadlines."""

PIECE_BYTES = 1 << 20
"""Least that bounce buffers must hold where nobody says how much."""

CALL_PAGES = 128
"""Pages that a call has the time of a call for; as BATCH_SIZE in SGLang 0.5.23."""


REQUESTS_MIN = 16
"""Requests after which it is said that nothing was restored."""


@dataclass(frozen=True, slots=True)
class EngineStoreConfig:
    """Bounds of one engine's store."""

    guard: GuardConfig = field(default_factory=GuardConfig)
    """Deadline, retries and circuit breaker. ``guard.calls_max`` bounds the threads as well."""
    bounce_bytes: int = 256 << 20
    """Memory that pages pass through on their way, at most; the system gives it as it is used. A page must fit."""
    piece_bytes: int | None = None
    """Pages of one call to the store hold about so many bytes; a page that is larger goes alone. None for 8 MiB, or
    what the store asks for if that is less and pages pass through bounce buffers: then they are verified and copied
    while they are in the processor's caches. A store that returns by itself is given up to 64 MiB, and cuts them."""
    call_timeout_s: float = 30.0
    """After this time, for each ``CALL_PAGES`` pages, no further piece of a call is begun. So a call returns after this
    time and one deadline."""

    def __post_init__(self) -> None:
        check_kind(self.guard, GuardConfig, "guard as a GuardConfig", ConfigError)
        least_bytes = PIECE_BYTES if self.piece_bytes is None else self.piece_bytes
        if not 0 < least_bytes <= PIECE_BYTES_MAX:
            raise ConfigError(f"piece_bytes must be in (0, {PIECE_BYTES_MAX}], found {self.piece_bytes}")
        if self.bounce_bytes < least_bytes:
            raise ConfigError(f"bounce_bytes must be at least piece_bytes, found {self.bounce_bytes}")
        if not 0 < self.call_timeout_s < math.inf:
            raise ConfigError(f"call_timeout_s must be positive and finite, found {self.call_timeout_s}")


class EnginePage(NamedTuple):
    """One page in an engine's memory: the payload alone, without our header."""

    label: Label
    rows: tuple[memoryview, ...]
    """The payload in order, each a contiguous run of bytes; writable where a page is to be read.

    The engine keeps them from other use until the call has returned, and no longer.
    """


class Unavailable(Enum):
    """Reason why a page was UNAVAILABLE."""

    AWAY = "the store could not be opened yet"
    UNREGISTERED = "the store has not taken the page's identity yet"
    LATE = "the store did not return in time"
    FAILED = "the store failed"
    REFUSED = "the store said so, or its circuit breaker was open"
    BUSY = "no thread was free in time"
    NO_BOUNCE_BUFFER = "no bounce buffer was free in time, or the page is larger than all of them"
    CALL_OVER = "the time of the whole call was over, or the store was closed meanwhile"
    CLOSED = "the store was closed"


@dataclass(frozen=True, slots=True)
class EngineStoreCounts:
    """Counts of one engine's store since it was opened, and its state now."""

    answers: Mapping[tuple[Method, Answer], int]
    """Pages by method and answer; pairs that never came are absent."""
    unavailable: Mapping[tuple[Method, Unavailable], int]
    """Those of them that were UNAVAILABLE, by method and reason."""
    payload_bytes: Mapping[Method, int]
    """Bytes copied into rows by GET, and out of rows by PUT."""
    seconds: Mapping[Method, float]
    """Time spent inside of the calls, by method."""
    late_calls_count: int
    """Abandoned calls."""
    last_error: str
    """What failed last, for people; empty if nothing has."""
    flaws: Mapping[Flaw, int] = field(default_factory=dict)
    """Pages that the store returned and that did not verify."""
    late_now_count: int = 0
    """Late calls that the store has not returned from yet."""
    bounce_bytes: int = 0
    quarantined_bytes: int = 0
    """Of the bounce buffers, what calls that are late may still read or write."""
    breaker: BreakerState | None = None
    """None while the store is away."""
    registered_count: int = 0
    """Identities that the store has taken, of ``announced_count``."""
    announced_count: int = 0

    @property
    def is_registered(self) -> bool:
        """Whether the store is there and has taken every announced identity."""
        return self.breaker is not None and self.registered_count == self.announced_count


class HitWatch:
    """Says once in the log that nothing was restored, after so many requests of an engine. Thread-safe."""

    def __init__(self, counts: Callable[[], EngineStoreCounts], url: str, document: str) -> None:
        """``counts`` are those of the store; ``document`` is the section of a document that says what to do."""
        self._counts = counts
        self._url = without_secrets(url)
        self._document = document
        self._left = REQUESTS_MIN
        self._guard = Lock()

    def count_request(self) -> None:
        """Count a request; after the last one, log what the store was asked for, unless it gave anything."""
        with self._guard:
            self._left -= 1
            if self._left:
                return
        counts = self._counts()
        if counts.answers.get((Method.GET, Answer.HIT)):
            return
        looked_up, offered = (
            sum(count for (method, _), count in counts.answers.items() if method is wanted)
            for wanted in (Method.EXISTS, Method.PUT)
        )
        found, stored = (
            counts.answers.get((Method.EXISTS, Answer.HIT), 0),
            counts.answers.get((Method.PUT, Answer.STORED), 0),
        )
        logger.log(
            logging.INFO if looked_up and stored else logging.WARNING,
            "nothing was restored from %s for %d requests: %d of %d pages looked up were found, %d of %d offered were "
            "stored%s. See %s",
            self._url,
            REQUESTS_MIN,
            found,
            looked_up,
            stored,
            offered,
            f"; the store said: {counts.last_error}" if counts.last_error else "",
            self._document,
        )
