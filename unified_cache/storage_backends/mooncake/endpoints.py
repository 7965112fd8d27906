"""Nodes of a cluster: the location of objects on them, a breaker for each that fails, and the one that is put on.

Pages are put on one node at a time, so that a prefix lies on few nodes and not on all. A dead node takes along every
prefix of which it holds a page; placed at random, that is nearly all of them::

    put     |-- prompt a --|- b -|---- c ----|-- d --|- e -|---- f ...
    node    |---------- 2 ----------|---------- 1 ----------|--- 3 ...
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock
from types import TracebackType
from typing import NamedTuple
from zlib import crc32

from unified_cache.storage_backends.common.breaker import Backoff, CircuitBreaker

STAY_S = 1.0
"""Time for which one node is put on: longer than the puts of one prompt, and short enough to fill all nodes alike."""

LISTING_FRESH_S = 5.0
"""Time for which a list of nodes is believed."""

LISTING_PAUSE_S = 60.0
"""Time after which a master that lists no nodes is asked again; until then it chooses itself."""

PATIENCE_S = 1.5
"""A node in whose call somebody has been for longer is not asked by others: it takes milliseconds, or is stalled."""

REST = Backoff(1.0, 4.0)
"""Rest of a node that failed: a fault that clears is noticed within the longest of these."""

FORGET_S = 60.0
"""After a rest that no call has followed for so long, nothing is known of a node any more."""

LOCATION_FRESH_S = 5.0
"""Time for which a location from the master is believed: less than it takes to notice that a node is gone."""

LOCATIONS_MAX = 1 << 16
"""Objects whose place is remembered; about 20 MB of names."""


class ReplicaLocation(NamedTuple):
    """Node that holds a replica of an object, and the size of the object."""

    endpoint: str
    object_bytes: int


class LocationCache:
    """Locations of objects, for ``LOCATION_FRESH_S``. Bounded; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, tuple[ReplicaLocation, float]] = OrderedDict()
        self._guard = Lock()

    def find(self, names: Iterable[str]) -> dict[str, ReplicaLocation]:
        """Return the places that are known."""
        oldest_s = self._clock() - LOCATION_FRESH_S
        with self._guard:
            known = ((name, self._known.get(name)) for name in names)
            return {name: entry[0] for name, entry in known if entry is not None and entry[1] >= oldest_s}

    def learn(self, locations: Iterable[tuple[str, ReplicaLocation]]) -> None:
        """Remember what the master says now."""
        now_s = self._clock()
        with self._guard:
            for name, location in locations:
                self._known.pop(name, None)
                self._known[name] = (location, now_s)
            while len(self._known) > LOCATIONS_MAX:
                self._known.popitem(last=False)

    def forget(self, names: Iterable[str]) -> None:
        """Know nothing of these any more."""
        with self._guard:
            for name in names:
                self._known.pop(name, None)


class _EndpointHealth:
    """Failures of one endpoint, and the calls to it that are in flight."""

    def __init__(self, endpoint: str, clock: Callable[[], float]) -> None:
        self.breaker = CircuitBreaker(1, REST, clock, endpoint)
        self.started_s: list[float] = []

    def is_forgotten(self, now_s: float) -> bool:
        """Return whether nobody has asked for so long that the node is gone: it came back under another port."""
        return not self.started_s and now_s - self.breaker.rests_until_s > FORGET_S


class Endpoints:
    """A circuit breaker for each node: after a failure it rests, longer each time, and so while a call to it hangs.

    Thread-safe. The first call after a rest is the probe; calls beside it are let through as well until the probe has
    been out for ``PATIENCE_S``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._healths: dict[str, _EndpointHealth] = {}
        self._guard = Lock()

    def is_up(self, endpoint: str) -> bool:
        """Return whether an endpoint is to be asked."""
        health = self._healths.get(endpoint)
        if health is None:
            return True
        with self._guard:
            stalled = bool(health.started_s) and self._clock() - health.started_s[0] > PATIENCE_S
        return not stalled and not health.breaker.is_resting

    def asking(self, endpoint: str) -> "_Asking":
        """Record that a call to an endpoint is in flight, in a ``with`` block around it."""
        return _Asking(self, endpoint)

    def failed(self, endpoint: str) -> None:
        """Record a failed call; may make the endpoint rest."""
        now_s = self._clock()
        with self._guard:
            self._health(endpoint).breaker.record_failure()
            for gone in [name for name, each in self._healths.items() if each.is_forgotten(now_s)]:
                del self._healths[gone]

    def succeeded(self, endpoint: str) -> None:
        """Record that an endpoint works."""
        health = self._healths.get(endpoint)
        if health is not None:
            health.breaker.record_success()

    def began(self, endpoint: str) -> float:
        """Record a call to an endpoint; return when it began."""
        started_s = self._clock()
        with self._guard:
            self._health(endpoint).started_s.append(started_s)
        return started_s

    def ended(self, endpoint: str, started_s: float) -> None:
        """Take a call back. Nodes come back under other ports: one without calls and failures needs no entry."""
        with self._guard:
            health = self._healths[endpoint]
            health.started_s.remove(started_s)
            if not health.started_s and not health.breaker.has_failures:
                del self._healths[endpoint]

    def _health(self, endpoint: str) -> _EndpointHealth:
        return self._healths.setdefault(endpoint, _EndpointHealth(endpoint, self._clock))


class _Asking:
    """A call in flight. A class, since a generator in its place costs as much as the rest of a call's bookkeeping."""

    __slots__ = ("_endpoint", "_endpoints", "_started_s")

    def __init__(self, endpoints: Endpoints, endpoint: str) -> None:
        self._endpoints = endpoints
        self._endpoint = endpoint
        self._started_s = 0.0

    def __enter__(self) -> None:
        self._started_s = self._endpoints.began(self._endpoint)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._endpoints.ended(self._endpoint, self._started_s)


class NodeChoice:
    """The node that is put on now, of those that the master lists and none of which has failed just now. Thread-safe.

    Another one is drawn every ``STAY_S``, in another order in each process. They do not follow in turn: requests that
    come every three seconds would all be put on one of three nodes.
    """

    def __init__(
        self,
        listing: Callable[[], frozenset[str]],
        endpoints: Endpoints,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """``listing`` asks for all nodes; empty where nobody tells. ``seed`` is random where it is not given."""
        self._listing = listing
        self._endpoints = endpoints
        self._clock = clock
        self._seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        self._nodes: list[str] = []
        self._list_at_s = -1.0

    def node(self) -> str:
        """Return the node to put on; empty where the master is to choose."""
        now_s = self._clock()
        if now_s >= self._list_at_s:
            self._list_at_s = now_s + LISTING_PAUSE_S  # others go on with what there was
            self._nodes = sorted(self._listing())
            if self._nodes:
                self._list_at_s = self._clock() + LISTING_FRESH_S
        nodes = [node for node in self._nodes if self._endpoints.is_up(node)]
        drawn = crc32(b"%d" % (self._seed + int(now_s / STAY_S)))
        return nodes[drawn % len(nodes)] if nodes else ""
