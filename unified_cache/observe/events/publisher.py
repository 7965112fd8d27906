"""Publisher of a cache's KV events: takes what has changed on the owner's thread, and has another thread send it.

owner's thread    publish()    takes what has changed, and hands it over; never waits
own thread                     makes events of it, numbers and sends batches, answers replays; it owns the ZMQ sockets

A message is ``[topic, sequence number, batch]``, the number in 8 bytes, big-endian, from 0 on without a gap: so a
consumer sees what it has missed. It asks the ROUTER for a number, 8 bytes, and gets every batch from there on that is
still kept, in the same form, then the number -1. A first batch with a higher number than it asked for says that those
before are lost. Asked for -1 itself, the publisher says ``AllBlocksCleared`` at its next turn and announces to all
everything that memory holds; so it does by itself after changes were lost.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller.page_changes import (
    ObjectsEvicted,
    PageChange,
    PageChanges,
    PagesHeld,
    PagesStored,
    SlotsLeft,
    StoredRun,
)
from unified_cache.core.errors import ConfigError
from unified_cache.core.extras import needs_extra
from unified_cache.observe.events.config import EventsConfig
from unified_cache.observe.events.encoding import EventEncoder
from unified_cache.observe.events.slot_keys import SlotKeys
from unified_cache.observe.events.values import ClearedEvent, KvEvent

with needs_extra("events", "unified_cache.observe.events"):
    import zmq

__all__ = ["EventPublisher"]

SEQ_BYTES = 8

ANNOUNCE_SEQ = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
"""In the place of a sequence number: the end of a replay; asked for, an announcement of everything."""

REQUEST_BYTES_MAX = 1024
"""Longest frame taken of anybody: more than the greeting of a connection has, whose name may have 255 bytes."""


@dataclass(slots=True)
class PublisherCounts:
    """Work of a publisher so far."""

    batches: int = 0
    """Batches numbered; the next one has this number."""
    events: int = 0
    pages: int = 0
    """Pages reported, once for each event that names them."""
    announcements: int = 0
    """Times that all that memory holds was announced: the first one, those asked for, and those after a loss."""
    losses: int = 0
    """Times that more had changed between two calls of ``publish`` than may wait."""
    replays: int = 0
    replays_cut: int = 0
    """Replays that ended early because their consumer did not take them."""
    replays_too_old: int = 0
    """Replays asked for from a batch that is no longer kept."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Work for the thread: changes, or all that memory holds."""

    changes: tuple[PageChange, ...]
    runs: tuple[StoredRun, ...] | None
    """None for changes."""
    pages_count: int
    """Pages in it, and one for itself."""


class ReplayBuffer:
    """Batches sent last, with neighbouring numbers, the oldest first: bounded by number and bytes. Not thread-safe."""

    __slots__ = ("_batches", "_batches_max", "_bytes_count", "_bytes_max", "first_seq")

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._batches: deque[bytes] = deque()
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._bytes_count = 0
        self.first_seq = 0
        """Sequence number of the oldest batch kept, or of the next one if there is none."""

    def append(self, payload: bytes) -> None:
        """Keep the next batch; forget the oldest ones beyond the bounds, the new one itself included."""
        self._batches.append(payload)
        self._bytes_count += len(payload)
        while len(self._batches) > self._batches_max or self._bytes_count > self._bytes_max:
            self._bytes_count -= len(self._batches.popleft())
            self.first_seq += 1

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """Yield sequence number and batch of those kept from ``seq`` on."""
        start = min(max(seq - self.first_seq, 0), len(self._batches))
        yield from enumerate(islice(self._batches, start, None), self.first_seq + start)


class EventPublisher:
    """Publisher of one cache; the cache's owner opens, calls and closes it."""

    def __init__(
        self, changes: PageChanges, slot_keys: SlotKeys, config: EventsConfig, wall_clock: Callable[[], float]
    ) -> None:
        """Open the sockets; ``open`` starts the thread too."""
        self._changes = changes
        self._slot_keys = slot_keys
        self._config = config
        self._wall_clock = wall_clock
        self._encoder = EventEncoder(config.consumer, config.rank)
        self._buffer = ReplayBuffer(config.replay_batches_max, config.replay_bytes_max)
        self._queue: deque[HandedOver] = deque()
        self._guard = threading.Lock()
        self.waiting_pages = 0
        """Pages handed over and not sent yet."""
        self._is_announcement_asked = False
        self._announced_s = -float("inf")
        self._is_stopping = False
        self._counts = PublisherCounts()
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = None if config.replay_endpoint is None else self._context.socket(zmq.ROUTER)
        self.endpoint = config.endpoint
        """Address that subscribers connect to."""
        self.replay_endpoint = config.replay_endpoint
        """Address that consumers ask for replays; None for no replay."""
        try:
            self._open_sockets()
        except ConfigError:
            self._close_sockets(0)
            raise

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
            publisher = cls(cache.changes, slot_keys, config, wall_clock)
        except BaseException:
            cache.changes.unwatch()
            raise
        publisher._thread.start()
        return publisher

    def publish(self) -> None:
        """Hand over what has changed since the last call: call it whenever the cache was polled. Never waits.

        Where the thread that sends is too far behind, nothing is handed over, and a later call hands over all.

        Raises:
            OwnerThreadError: not the thread that opened it.
        """
        if self.waiting_pages >= self._config.queued_pages_max:
            return
        if self._is_announcement_due():
            self._changes.forget()
        taken = self._changes.take()
        if taken is None:
            runs = tuple(self._changes.held_runs())
            self._hand_over(HandedOver((), runs, 1 + sum(held.run.pages_count for held in runs)))
        elif taken:
            self._hand_over(HandedOver(tuple(taken), None, 1 + sum(map(_pages_of, taken))))

    def counts(self) -> PublisherCounts:
        """Return what was done so far; from any thread."""
        return replace(self._counts, losses=self._changes.lost_count)

    def close(self) -> bool:
        """Send what was handed over, within ``close_timeout_s``; return whether all was. Once more does nothing.

        Subscribers are not notified that the cache has gone, and keep what they know of it. The operator that ends an
        engine takes it out of its routers.
        """
        self._changes.unwatch()
        self._is_stopping = True
        self._wake()
        self._thread.join(self._config.close_timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> "EventPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_announcement_due(self) -> bool:
        """Return True, once, when everything is to be announced and the pause since the last time is over."""
        if not self._is_announcement_asked or time.monotonic() < self._announced_s + self._config.announce_pause_s:
            return False
        self._is_announcement_asked = False
        self._announced_s = time.monotonic()
        return True

    def _hand_over(self, work: HandedOver) -> None:
        with self._guard:
            self._queue.append(work)
            self.waiting_pages += work.pages_count
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # woken already, or over
            self._wakes.send(b"\0")

    # ---- on the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                stopping = self._is_stopping
                self._send_queued()
                if stopping:
                    break
                poller.poll()
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
        finally:
            self._close_sockets(int(self._config.close_timeout_s * 500))

    def _send_queued(self) -> None:
        while self._queue:
            with self._guard:
                work = self._queue.popleft()
            if work.runs is not None:
                self._counts.announcements += 1
                self._send(self._slot_keys.announcement(work.runs))
            self._send(self._slot_keys.events(work.changes))
            if self._slot_keys.needs_announcement:
                self._is_announcement_asked = True
            with self._guard:
                self.waiting_pages -= work.pages_count

    def _send(self, events: Iterable[KvEvent]) -> None:
        """Send events in batches of bounded length."""
        batch: list[KvEvent] = []
        pages = 0
        for event in events:
            size = 1 if isinstance(event, ClearedEvent) else len(event.hashes)
            if batch and pages + size > self._config.batch_pages_max:
                self._send_batch(batch, pages)
                batch, pages = [], 0
            batch.append(event)
            pages += size
        if batch:
            self._send_batch(batch, pages)

    def _send_batch(self, events: list[KvEvent], pages: int) -> None:
        payload = self._encoder.encode(self._wall_clock(), events)
        if payload is None:
            return
        seq = self._counts.batches.to_bytes(SEQ_BYTES, "big")
        self._buffer.append(payload)
        self._counts.batches += 1
        self._counts.events += len(events)
        self._counts.pages += pages
        with suppress(zmq.Again):  # a PUB socket drops what a subscriber does not take
            self._pub.send_multipart((self._config.topic.encode(), seq, payload), zmq.NOBLOCK)

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Answer one request for a replay; a malformed one is passed over."""
        frames = replay.recv_multipart()
        # Who asks, with or without an empty frame after it, and the number. What is sent back with every batch is that.
        envelope = frames[:-1]
        if len(frames[-1]) != SEQ_BYTES or envelope[1:] not in ([], [b""]):
            return
        self._counts.replays += 1
        topic = self._config.topic.encode()
        try:
            if frames[-1] == ANNOUNCE_SEQ:
                self._is_announcement_asked = True
            else:
                start = int.from_bytes(frames[-1], "big")
                self._counts.replays_too_old += start < self._buffer.first_seq
                for seq, payload in self._buffer.since(start):
                    message = (*envelope, topic, seq.to_bytes(SEQ_BYTES, "big"), payload)
                    replay.send_multipart(message, zmq.NOBLOCK)
            replay.send_multipart((*envelope, b"", ANNOUNCE_SEQ, b""), zmq.NOBLOCK)
        except zmq.ZMQError:
            # The consumer has gone, or does not take what it asked for.
            self._counts.replays_cut += 1

    # ---- sockets --------------------------------------------------------------------------------------------------

    def _open_sockets(self) -> None:
        config = self._config
        self._pub.set(zmq.SNDHWM, config.subscriber_batches_max)
        # Subscriptions to more than the topic match nothing.
        self._pub.set(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX + len(config.topic.encode()))
        try:
            if config.connects:
                self._pub.connect(config.endpoint)
            else:
                self._pub.bind(config.endpoint)
                self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            raise ConfigError(f"KV events cannot be published at {config.endpoint}: {error}") from error
        if self._replay is None or config.replay_endpoint is None:
            return
        # A whole replay fits, and its end; who asks again before taking it is cut off.
        self._replay.set(zmq.SNDHWM, config.replay_batches_max + 2)
        self._replay.set(zmq.ROUTER_MANDATORY, 1)
        self._replay.set(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        try:
            self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"KV events cannot be replayed at {config.replay_endpoint}: {error}") from error
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def _close_sockets(self, linger_ms: int) -> None:
        """Close all, waiting at most ``linger_ms`` for subscribers to take what was sent."""
        self._context.destroy(linger_ms)
        self._wakes.close()
        self._woken.close()


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
