"""Nodes of a cluster: the location of objects on them, a breaker for each that fails, and those that are put on.

Pages are put on one node at a time, or with two replicas on one pair, so that a prefix lies on few nodes and not on
all. A dead node takes along every prefix of which it holds the only replica of a page; placed at random, that is nearly
all of them::

    put     |-- prompt a --|- b -|---- c ----|-- d --|- e -|---- f ...
    node    |---------- 2 ----------|---------- 1 ----------|--- 3 ...
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import lru_cache
from threading import Lock
from typing import NamedTuple
from zlib import crc32

from unified_cache.storage_backends.common.breaker import Admission, Backoff, BreakerState, CircuitBreaker

STAY_S = 1.0
"""Time for which the same nodes are put on: longer than the puts of one prompt, short enough to fill all alike."""

LISTING_FRESH_S = 5.0
"""Time for which a list of nodes is believed."""

LISTING_PAUSES = Backoff(LISTING_FRESH_S, 60.0)
"""After these a master that lists no nodes is asked again; until then those it had are believed, or it chooses."""

REST = Backoff(1.0, 4.0)
"""Rest of a node that failed: a fault that clears is noticed within the longest of these."""

NODES_MAX = 1024
"""Endpoints of which anything is known."""

LOCATION_FRESH_S = 5.0
"""Time for which a location from the master is believed: less than it takes to notice that a node is gone."""

LOCATIONS_MAX = 1 << 16
"""Objects whose place is remembered; about 20 MB of names."""


class ReplicaLocation(NamedTuple):
    """Node that holds a replica of an object, and the size of the object."""

    endpoint: str
    """Node that the library reads from."""
    object_bytes: int
    others: tuple[str, ...] = ()
    """Nodes of further replicas."""


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


class Endpoints:
    """A circuit breaker for each node: after a failure it rests, longer each time; then one call is its probe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # Nodes come back under other ports: those that nobody has asked for longest are forgotten.
        self._breaker = lru_cache(NODES_MAX)(lambda endpoint: CircuitBreaker(1, REST, clock, endpoint))

    def is_up(self, endpoint: str) -> bool:
        """Return whether an endpoint is to be asked."""
        breaker = self._breaker(endpoint)
        return breaker.state is not BreakerState.HALF_OPEN and not breaker.is_resting

    def admit(self, endpoint: str) -> Admission | None:
        """Admit a call, to be made in a ``with`` block, which succeeds unless it ``failed``; None while it rests."""
        return self._breaker(endpoint).admit()

    def failed(self, endpoint: str) -> None:
        """Record a failed call; makes the endpoint rest."""
        self._breaker(endpoint).record_failure()


class NodeChoice:
    """The nodes that are put on now, of those that the master lists and none of which has failed just now. Thread-safe.

    Others are drawn every ``STAY_S``, in another order in each process. They do not follow in turn: requests that
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
        self._failures_count = 0

    def nodes(self, count: int) -> list[str]:
        """Return so many nodes to put on, fewer where fewer are up; none where the master is to choose."""
        now_s = self._clock()
        if now_s >= self._list_at_s:
            self._list_at_s = now_s + LISTING_FRESH_S  # others go on with what there was
            listed = sorted(self._listing())
            self._nodes = listed or self._nodes
            self._failures_count = 0 if listed else self._failures_count + 1
            self._list_at_s = self._clock() + LISTING_PAUSES.pause_s(self._failures_count or 1)
        nodes = [node for node in self._nodes if self._endpoints.is_up(node)]
        drawn = crc32(b"%d" % (self._seed + int(now_s / STAY_S)))
        chosen: list[str] = []
        while nodes and len(chosen) < count:
            drawn, at = divmod(drawn, len(nodes))
            chosen.append(nodes.pop(at))
        return chosen
