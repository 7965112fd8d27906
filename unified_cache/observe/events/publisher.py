"""Publisher of a cache's KV events: takes what has changed on the owner's thread, and has another thread send it.

owner's thread    publish()    takes what has changed, and hands it over; never waits
own thread                     makes events of it, numbers and sends batches, answers replays: see ``sender``
"""

import time
from collections.abc import Callable

from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller.page_changes import (
    ObjectsEvicted,
    PageChange,
    PageChanges,
    PagesHeld,
    PagesStored,
    SlotsLeft,
)
from unified_cache.observe.events.config import EventsConfig
from unified_cache.observe.events.sender import BatchSender, HandedOver, PublisherCounts
from unified_cache.observe.events.slot_keys import SlotKeys

__all__ = ["EventPublisher"]


class EventPublisher:
    """Publisher of one cache; the cache's owner opens, calls and closes it."""

    def __init__(self, changes: PageChanges, config: EventsConfig, sender: BatchSender) -> None:
        """Take parts that fit each other; ``open`` puts them together."""
        self.endpoint = sender.endpoint
        """Address that subscribers connect to."""
        self.replay_endpoint = sender.replay_endpoint
        """Address that consumers ask for replays; None for no replay."""
        self._changes = changes
        self._config = config
        self._sender = sender

    @classmethod
    def open(
        cls, cache: UnifiedCache, config: EventsConfig, wall_clock: Callable[[], float] = time.time
    ) -> "EventPublisher":
        """Begin to publish what a cache holds; ``wall_clock`` gives seconds since 1970.

        Of several ranks open it on one: their trees are equal.

        Raises:
            ConfigError: an address that cannot be used.
            StateError: somebody else watches the cache's changes.
        """
        cache.changes.watch(config.changes_pages_max)
        try:
            slot_keys = SlotKeys(cache.changes, cache.layout, cache.identity.owners(cache.layout))
            sender = BatchSender.start(slot_keys, config, wall_clock)
        except BaseException:
            cache.changes.unwatch()
            raise
        return cls(cache.changes, config, sender)

    def publish(self) -> None:
        """Hand over what has changed since the last call: call it whenever the cache was polled. Never waits.

        Where the thread that sends is too far behind, nothing is handed over, and a later call hands over all.

        Raises:
            OwnerThreadError: not the thread that opened it.
        """
        if self._sender.waiting_pages >= self._config.queued_pages_max:
            return
        if self._sender.is_announcement_due():
            self._changes.forget()
        taken = self._changes.take()
        if taken is None:
            runs = tuple(self._changes.held_runs())
            self._sender.hand_over(HandedOver((), runs, 1 + sum(held.run.pages_count for held in runs)))
        elif taken:
            self._sender.hand_over(HandedOver(tuple(taken), None, 1 + sum(map(_pages_of, taken))))

    def counts(self) -> PublisherCounts:
        """Return what was done so far; from any thread."""
        return self._sender.counts(self._changes.lost_count)

    def close(self) -> bool:
        """Send what was handed over, within ``close_timeout_s``; return whether all was. Once more does nothing.

        Subscribers are not notified that the cache has gone, and keep what they know of it. The operator that ends an
        engine takes it out of its routers.
        """
        self._changes.unwatch()
        return self._sender.close(self._config.close_timeout_s)

    def __enter__(self) -> "EventPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pages_of(change: PageChange) -> int:
    match change:
        case PagesHeld() | PagesStored():
            return len(change.pages)
        case SlotsLeft():
            return len(change.slots)
        case ObjectsEvicted():
            return len(change.labels)
        case _:
            return 1
