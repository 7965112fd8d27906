"""Choice of the node that pages are put on: one at a time, so that a prefix lies on few nodes and not on all.

    put     |-- prompt a --|- b -|---- c ----|-- d --|- e -|---- f ...
    node    |---------- 2 ----------|---------- 1 ----------|--- 3 ...

A dead node takes along every prefix of which it holds a page. Placed at random, that is nearly all of them.
"""

import random
import time
from collections.abc import Callable
from enum import Enum
from threading import Lock
from zlib import crc32

__all__ = ["NodeChoice", "Placement"]

STAY_S = 1.0
"""Time for which one node is put on: longer than the puts of one prompt, and short enough to fill all nodes alike."""

LISTING_FRESH_S = 5.0
"""Time for which a list of nodes is believed."""

LISTING_PAUSE_S = 60.0
"""Time after which a master that lists no nodes is asked again; until then it chooses itself."""

AVOIDED_S = 10.0
"""Time for which a node is not chosen on which a put has failed: the master forgets dead nodes within it."""


class Placement(Enum):
    """Rule by which pages get their node."""

    TOGETHER = "together"
    """Those of one prompt on one, as far as it has room."""
    SPREAD = "spread"
    """Each page where the master says: at random."""


class NodeChoice:
    """The node that is put on now, of those that the master lists. Thread-safe.

    Another one is drawn every ``STAY_S``, in another order in each process. They do not follow in turn: requests that
    come every three seconds would all be put on one of three nodes.
    """

    __slots__ = ("_avoided_until_s", "_clock", "_guard", "_list_at_s", "_listing", "_nodes", "_seed")

    def __init__(
        self,
        listing: Callable[[], frozenset[str]],
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """``listing`` asks for all nodes; empty where nobody tells. ``seed`` is random where it is not given."""
        self._listing = listing
        self._clock = clock
        self._seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        self._nodes: list[str] = []
        self._list_at_s = -1.0
        self._avoided_until_s: dict[str, float] = {}
        self._guard = Lock()

    def node(self) -> str:
        """Return the node to put on; empty where the master is to choose."""
        now_s = self._clock()
        with self._guard:
            is_due = now_s >= self._list_at_s
            if is_due:  # one thread asks; others go on with what there was
                self._list_at_s = now_s + LISTING_PAUSE_S
        if is_due:
            self._learn(sorted(self._listing()))
        with self._guard:
            nodes = [node for node in self._nodes if self._avoided_until_s.get(node, now_s) <= now_s]
        drawn = crc32(b"%d" % (self._seed + int(now_s / STAY_S)))
        return nodes[drawn % len(nodes)] if nodes else ""

    def avoid(self, node: str) -> None:
        """Choose others than this node for a while, since a put on it has failed."""
        now_s = self._clock()
        with self._guard:
            self._avoided_until_s = {name: until for name, until in self._avoided_until_s.items() if until > now_s}
            self._avoided_until_s[node] = now_s + AVOIDED_S

    def _learn(self, nodes: list[str]) -> None:
        with self._guard:
            self._nodes = nodes
            if nodes:
                self._list_at_s = self._clock() + LISTING_FRESH_S
