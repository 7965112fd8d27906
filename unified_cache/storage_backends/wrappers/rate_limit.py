"""A wrapper that asks no more of a store than it was given: calls and bytes a second, reads and writes apart."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from unified_cache.errors import ClosedError, ConfigError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.protocol import Capability, Level, PageIO, Scan, StorageBackend
from unified_cache.storage_backends.wrappers.method import Method

__all__ = ["Rate", "RateLimit"]


@dataclass(frozen=True, slots=True)
class Rate:
    """What one kind of call may use."""

    calls_per_s: float
    bytes_per_s: float
    burst_s: float
    """What this many seconds bring may be saved up and spent at once."""

    def __post_init__(self) -> None:
        if self.calls_per_s <= 0 or self.bytes_per_s <= 0 or self.burst_s < 0:
            raise ConfigError(f"a rate needs calls and bytes above 0 and a burst of at least 0, found {self}")


class _Bucket:
    """Tokens that come in at a steady rate, up to a bound, and may be overdrawn. Its owner guards it."""

    __slots__ = ("_at_s", "_level", "_level_max", "_per_s")

    def __init__(self, per_s: float, level_max: float, now_s: float) -> None:
        self._per_s = per_s
        self._level_max = level_max
        self._level = level_max
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Take in what has come since; return how long until nothing is overdrawn."""
        self._level = min(self._level_max, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return max(0.0, -self._level / self._per_s)

    def take(self, tokens: float) -> None:
        """Take tokens, more than there are if need be."""
        self._level -= tokens


class RateLimit:
    """Hold ``get`` and ``put`` to a rate each; a call that would wait longer than ``wait_max_s`` is not made.

    A get that is not made is all misses, a put is all declined, and both are counted. A call waits until what earlier
    ones overdrew has come in, and then overdraws by as much as it needs: so a batch larger than any burst passes like
    others and delays those after it. Bytes count as asked for, misses included. The other methods pass.

    It owns the wrapped backend. Thread-safe where the backend is. ``clock`` gives seconds.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        gets: Rate,
        puts: Rate,
        wait_max_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if wait_max_s < 0:
            raise ConfigError(f"wait_max_s must not be negative, found {wait_max_s}")
        self._backend = backend
        self._wait_max_s = wait_max_s
        self._clock = clock
        self._sleep = sleep
        now_s = clock()
        self._buckets = {
            method: (
                _Bucket(rate.calls_per_s, rate.calls_per_s * rate.burst_s, now_s),
                _Bucket(rate.bytes_per_s, rate.bytes_per_s * rate.burst_s, now_s),
            )
            for method, rate in ((Method.GET, gets), (Method.PUT, puts))
        }
        self._refused_count: Counter[Method] = Counter()
        self._closed = False
        self._guard = Lock()

    @property
    def refused_count(self) -> dict[Method, int]:
        """Calls not made so far; a copy, methods never refused are absent."""
        with self._guard:
            return dict(self._refused_count)

    def capability(self) -> Capability:
        """Say what the wrapped backend can do."""
        return self._backend.capability()

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Announce an identity to the wrapped backend."""
        self._backend.register(manifest, slabs)

    def exists(self, labels: Sequence[Label]) -> list[bool]:
        """Ask the wrapped backend."""
        return self._backend.exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[bool]:
        """Fill each page's buffers, when their turn has come; all misses where it would not come in time."""
        if not self._turn(Method.GET, pages):
            return [False] * len(pages)
        return self._backend.get(pages)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[bool]:
        """Store pages, when their turn has come; all declined where it would not come in time."""
        if not self._turn(Method.PUT, pages):
            return [False] * len(pages)
        return self._backend.put(pages, level)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects from the wrapped backend."""
        return self._backend.remove(labels)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of the wrapped backend."""
        return self._backend.scan(identity, cursor)

    def close(self) -> None:
        """Close the wrapped backend; a call that waits for its turn finds it closed."""
        with self._guard:
            self._closed = True
        self._backend.close()

    def _turn(self, method: Method, pages: Sequence[PageIO]) -> bool:
        """Wait until a call may be made; False, at once, where that would take too long."""
        asked_bytes = sum(map(page_bytes, pages))
        with self._guard:
            if self._closed:
                raise ClosedError("this store with a rate limit was closed")
            now_s = self._clock()
            calls, transfers = self._buckets[method]
            wait_s = max(calls.wait_s(now_s), transfers.wait_s(now_s))
            if wait_s > self._wait_max_s:
                self._refused_count[method] += 1
                return False
            calls.take(1)
            transfers.take(asked_bytes)
        if wait_s:
            self._sleep(wait_s)
        return True
