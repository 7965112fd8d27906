"""Removals of a store, reported to those that know what it had: a publisher of KV events, or a tier under vLLM.

A store evicts by itself, and a cache that put a page learns it when a get misses. One that reports more has
``removals``; its subscribers, a few caches, ask from time to time. A store never waits for one: where more goes
than there is room for, all of it is dropped, and the next answer says so. The subscriber then knows of no page that it
is in the store, but of those that it sees there from then on.
"""

from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

from unified_cache.core.errors import StateError
from unified_cache.core.seal import Label

LABELS_WAITING_MAX = 1 << 16
"""Labels kept for a subscriber that does not ask: some 15 MB."""

SUBSCRIBERS_MAX = 16
"""Subscribers of one store: the caches of the engines in one process."""


class Removals(NamedTuple):
    """Pages that have left a store since its subscriber last asked."""

    lost_count: int
    """Pages that left since the last answer and are not reported. Unless 0, any page may have gone."""
    labels: tuple[Label, ...]
    """Pages that have gone and had not come back, in the order in which they went; each once."""


class RemovalFeed:
    """Removals of one open store, for one subscriber. Thread-safe; ``take`` waits for no disk."""

    def __init__(self) -> None:
        self._gone: dict[Label, None] = {}
        self._lost_count = 0
        self.is_open = True
        self._guard = Lock()

    def record(self, labels: Iterable[Label]) -> None:
        """Record that pages have gone."""
        with self._guard:
            if self.is_open:
                for label in labels:
                    self._gone.pop(label, None)
                    self._gone[label] = None
                if len(self._gone) > LABELS_WAITING_MAX:
                    self._lose()

    def restored(self, labels: Iterable[Label]) -> None:
        """Record that pages are there."""
        if self._gone:
            with self._guard:
                for label in labels:
                    self._gone.pop(label, None)

    def lose(self) -> None:
        """Record that any page may have gone."""
        with self._guard:
            if self.is_open:
                self._lose()

    def take(self) -> Removals:
        """Return what has gone since the last call, or since the feed was opened; nothing once closed."""
        with self._guard:
            taken = Removals(self._lost_count, tuple(self._gone))
            self._lost_count, self._gone = 0, {}
            return taken

    def close(self) -> None:
        """End the subscription. Once more does nothing."""
        with self._guard:
            self.is_open = False
            self._lost_count = 0
            self._gone = {}

    def _lose(self) -> None:
        """Drop what is kept; one page at least counts as lost."""
        self._lost_count += max(1, len(self._gone))
        self._gone = {}


class RemovalBuffer:
    """Store's side of its removals: what it records here, each subscriber finds in its feed. Thread-safe.

    As long as nobody has subscribed, nothing is kept.
    """

    def __init__(self) -> None:
        self._feeds: tuple[RemovalFeed, ...] = ()
        """Those that were open when the last one subscribed; never changed in place."""
        self._guard = Lock()

    @property
    def has_subscribers(self) -> bool:
        """Whether there is a subscriber, for whom it is worth to collect labels."""
        return any(feed.is_open for feed in self._feeds)

    def subscribe(self) -> RemovalFeed:
        """Return a feed of what goes from now on, see ``Store.removals``."""
        with self._guard:
            others = tuple(feed for feed in self._feeds if feed.is_open)
            if len(others) >= SUBSCRIBERS_MAX:
                raise StateError(
                    f"a store reports its removals to {SUBSCRIBERS_MAX} subscribers, and has as many: "
                    "close a cache that publishes events over this store"
                )
            feed = RemovalFeed()
            self._feeds = (*others, feed)
            return feed

    def record(self, labels: Iterable[Label]) -> None:
        """Record that pages have gone."""
        if feeds := self._feeds:
            gone = tuple(labels)
            for feed in feeds:
                feed.record(gone)

    def restored(self, labels: Iterable[Label]) -> None:
        """Record that pages are there, again or for the first time."""
        if feeds := self._feeds:
            there = tuple(labels)
            for feed in feeds:
                feed.restored(there)

    def lose(self) -> None:
        """Record that any page may have gone."""
        for feed in self._feeds:
            feed.lose()
