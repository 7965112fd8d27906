"""Subscriber to the KV events of many engines over ZMQ: one thread that keeps an index of what they hold."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from unified_cache.errors import ConfigError, StateError
from unified_cache.events.follower import FollowerCounts, PublisherFollower, ReplayRequest
from unified_cache.events.index import EngineTraits, PrefixIndex
from unified_cache.events.sender import ANNOUNCE_SEQ, SEQ_BYTES
from unified_cache.extras import needs_extra

with needs_extra("events", "unified_cache.events"):
    import zmq

__all__ = ["EventSource", "EventSubscriber", "SubscriberConfig"]

BATCH_FRAMES = 3
"""Topic, number, batch."""

RECEIVED_MAX = 256
"""Messages taken of one engine before the next has its turn."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Addresses of one engine's publisher."""

    endpoint: str
    """Address of its PUB socket."""
    replay_endpoint: str | None = None
    """Address of its ROUTER socket; None for no replay: then a gap is lost."""
    topic: str = ""
    """Messages whose topic begins with this; empty for all."""


@dataclass(frozen=True, slots=True)
class SubscriberConfig:
    """Times and bounds of a subscriber."""

    replay_timeout_s: float = 5.0
    """Wait for a replay to end."""
    look_every_s: float = 10.0
    """Between two looks whether the last batches are missing, or an engine was started anew."""
    batches_max: int = 10_000
    """Batches of one engine that wait to be taken; those after them are asked for again."""
    close_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name, value in (
            ("replay_timeout_s", self.replay_timeout_s),
            ("look_every_s", self.look_every_s),
            ("batches_max", self.batches_max),
            ("close_timeout_s", self.close_timeout_s),
        ):
            if not value > 0:
                raise ConfigError(f"{name} must be positive, found {value}")


@dataclass(slots=True)
class Followed:
    """One engine, on the thread."""

    source: EventSource
    follower: PublisherFollower
    sub: "zmq.Socket[bytes]"
    dealer: "zmq.Socket[bytes] | None"
    look_at_s: float


class EventSubscriber:
    """Thread that follows engines into an index. Public methods may be called from any thread."""

    def __init__(self, index: PrefixIndex, config: SubscriberConfig, clock: Callable[[], float]) -> None:
        """Prepare; ``start`` makes a running one."""
        self.index = index
        self._config = config
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._followed: dict[str, Followed] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._wakes, self._woken = socket.socketpair()
        for end in (self._wakes, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events-in", daemon=True)

    @classmethod
    def start(
        cls,
        index: PrefixIndex,
        config: SubscriberConfig = SubscriberConfig(),
        clock: Callable[[], float] = time.monotonic,
    ) -> "EventSubscriber":
        """Start a subscriber that follows nobody yet."""
        subscriber = cls(index, config, clock)
        subscriber._thread.start()
        return subscriber

    def follow(self, engine: str, source: EventSource, settings: EngineTraits = EngineTraits()) -> None:
        """Follow an engine from now on; one of that name is forgotten.

        Raises:
            InputError, ConfigError: as ``PrefixIndex.add_engine``, or an address that cannot be used.
            StateError: the subscriber was closed.
        """
        if self._is_stopping:
            raise StateError("the subscriber was closed")
        sub = self._connected(zmq.SUB, source.endpoint)
        sub.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        dealer = None if source.replay_endpoint is None else self._connected(zmq.DEALER, source.replay_endpoint)
        self.index.add_engine(engine, settings)
        timeout_s = None if dealer is None else self._config.replay_timeout_s
        followed = Followed(source, PublisherFollower(self.index, engine, timeout_s), sub, dealer, 0.0)
        self._orders.append(lambda: self._take_in(engine, followed))
        self._wake()

    def unfollow(self, engine: str) -> bool:
        """Follow an engine no longer and forget it; tell whether the index had it."""
        self._orders.append(lambda: self._let_go(engine))
        self._wake()
        return self.index.remove_engine(engine)

    def counts(self) -> dict[str, FollowerCounts]:
        """Return what has come, by engine; copies."""
        return {name: replace(each.follower.counts) for name, each in list(self._followed.items())}

    def close(self) -> bool:
        """End the thread and its sockets; tell whether it ended in time. Once more does nothing."""
        self._is_stopping = True
        self._wake()
        self._thread.join(self._config.close_timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> "EventSubscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connected(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.RCVHWM, self._config.batches_max)
        try:
            made.connect(endpoint)
        except zmq.ZMQError as error:
            made.close()
            raise ConfigError(f"KV events cannot be had from {endpoint}: {error}") from error
        return made

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # woken already, or over
            self._wakes.send(b"\0")

    # ---- on the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._poll()
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                while self._orders:
                    self._orders.popleft()()
                for followed in self._followed.values():
                    self._turn(followed)
        finally:
            self._context.destroy(0)
            self._wakes.close()
            self._woken.close()

    def _poll(self) -> None:
        """Wait until something comes or is due."""
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        now_s = self._clock()
        wait_s = self._config.look_every_s
        for each in self._followed.values():
            poller.register(each.sub, zmq.POLLIN)
            if each.dealer is not None:
                poller.register(each.dealer, zmq.POLLIN)
            wait_s = min(wait_s, each.follower.deadline_s - now_s, each.look_at_s - now_s)
        poller.poll(int(max(wait_s, 0.0) * 1000) + 1)

    def _turn(self, followed: Followed) -> None:
        """Take what has come from one engine, and ask it for what is missing."""
        follower = followed.follower
        for _ in range(RECEIVED_MAX):
            frames = _received(followed.sub)
            if frames is None:
                break
            if len(frames) == BATCH_FRAMES and len(frames[1]) == SEQ_BYTES:
                follower.receive(int.from_bytes(frames[1], "big"), frames[2], self._clock())
        for _ in range(RECEIVED_MAX):
            frames = None if followed.dealer is None else _received(followed.dealer)
            if frames is None:
                break
            # An empty frame, the topic, which older publishers leave out, number and batch.
            seq = frames[-2] if len(frames) >= BATCH_FRAMES else b""
            if seq == ANNOUNCE_SEQ:
                follower.end_answer(self._clock())
            elif len(seq) == SEQ_BYTES:
                follower.receive_again(int.from_bytes(seq, "big"), frames[-1])
        now_s = self._clock()
        if follower.tick(now_s):
            self._reconnect(followed)
        if now_s >= followed.look_at_s:
            followed.look_at_s = now_s + self._config.look_every_s
            follower.look(now_s)
        for request in follower.take_requests():
            self._ask(followed, request)

    def _ask(self, followed: Followed, request: ReplayRequest) -> None:
        if followed.dealer is None:
            return
        start = ANNOUNCE_SEQ if request.start_seq is None else request.start_seq.to_bytes(SEQ_BYTES, "big")
        with suppress(zmq.Again):  # not reached: the answer will be late
            followed.dealer.send_multipart((b"", start), zmq.NOBLOCK)

    def _reconnect(self, followed: Followed) -> None:
        """Leave a late answer behind: it would be taken for that of the next request."""
        if followed.dealer is not None and followed.source.replay_endpoint is not None:
            followed.dealer.close()
            followed.dealer = self._connected(zmq.DEALER, followed.source.replay_endpoint)

    def _take_in(self, engine: str, followed: Followed) -> None:
        self._let_go(engine)
        self._followed[engine] = followed
        followed.look_at_s = self._clock() + self._config.look_every_s
        followed.follower.begin(self._clock())

    def _let_go(self, engine: str) -> None:
        followed = self._followed.pop(engine, None)
        if followed is not None:
            followed.sub.close()
            if followed.dealer is not None:
                followed.dealer.close()


def _received(messages: "zmq.Socket[bytes]") -> list[bytes] | None:
    try:
        return messages.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
