"""Events over real ZMQ sockets: order and numbers, replay, slow and late subscribers, losses, bounds."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.cache import ToyEngine
from tests.support.events import Cleared, VllmBatch, VllmRemoved, VllmStored
from tests.support.operations import engine, serve, started, tokens
from unified_cache.core.errors import ConfigError, StateError
from unified_cache.observe.events.config import EventsConfig
from unified_cache.observe.events.publisher import ANNOUNCE_SEQ, REQUEST_BYTES_MAX, EventPublisher, ReplayBuffer
from unified_cache.storage_backends.memory import MemoryStorage

DEADLINE_S = 30.0
SOON_S = 0.01

Event = VllmStored | VllmRemoved | Cleared
Told = dict[tuple[str | None, int | None], set[bytes | int]]
"""Pages that a consumer takes each tier and component to hold."""


def eventually(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline_s, otherwise
        pause.wait(SOON_S)


def config(tmp_path: Path, **fields: object) -> EventsConfig:
    values = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay", **fields}
    return EventsConfig(**values)  # type: ignore[arg-type]  # fields by name


@pytest.fixture
def toy() -> ToyEngine:
    return engine(MemoryStorage())


class ReplayClient:
    """A client of a publisher's ROUTER socket, as the engines' examples have it."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket

    def replay(self, start: int) -> list[tuple[int, list[Event]]]:
        """Return number and events of each batch from ``start`` on that is still kept."""
        self.socket.send_multipart((b"", start.to_bytes(8, "big", signed=start < 0)))
        found: list[tuple[int, list[Event]]] = []
        while True:
            empty, _, seq, payload = self.socket.recv_multipart()
            assert empty == b""
            if seq == ANNOUNCE_SEQ:
                return found
            found.append((int.from_bytes(seq, "big"), [*msgspec.msgpack.decode(payload, type=VllmBatch).events]))

    def told(self) -> Told:
        """Return what is held as far as all batches say that are still kept."""
        held: Told = {}
        for _, events in self.replay(0):
            for event in events:
                if isinstance(event, Cleared):
                    held.clear()
                    continue
                pages = held.setdefault((event.medium, event.group_idx), set())
                if isinstance(event, VllmStored):
                    pages.update(event.block_hashes)
                else:
                    pages.difference_update(event.block_hashes)
        return {lane: pages for lane, pages in held.items() if pages}


class Peers:
    """Sockets of a test, closed when it ends."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def connected(self, kind: int, endpoint: str | None, batches_max: int = 1000) -> "zmq.Socket[bytes]":
        assert endpoint is not None
        made = self.context.socket(kind)
        self.sockets.append(made)
        made.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        made.set(zmq.RCVHWM, batches_max)
        made.connect(endpoint)
        return made

    def consumer(self, publisher: EventPublisher) -> ReplayClient:
        return ReplayClient(self.connected(zmq.DEALER, publisher.replay_endpoint))


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.context.destroy(0)


def published(publisher: EventPublisher) -> None:
    """Publish, and wait until everything that was handed over has been sent."""
    publisher.publish()
    eventually(lambda: publisher.waiting_pages == 0, "the publisher is stuck")


def test_batches_are_numbered_from_zero_without_a_gap_and_replayed(
    toy: ToyEngine, tmp_path: Path, peers: Peers
) -> None:
    with EventPublisher.open(toy.cache, config(tmp_path)) as publisher:
        for first in (0, 1000, 2000):
            publisher.publish()
            serve(toy, 2, first)
        published(publisher)
        consumer = peers.consumer(publisher)
        batches = consumer.replay(0)
        assert [seq for seq, _ in batches] == [0, 1, 2, 3]
        assert batches[0][1] == [Cleared()], "it begins with what it holds, which is nothing"
        assert isinstance(batches[1][1][0], VllmStored)
        assert [seq for seq, _ in consumer.replay(2)] == [2, 3]
        assert consumer.replay(7) == []
        counts = publisher.counts()
        assert (counts.batches, counts.replays, counts.announcements, counts.losses) == (4, 3, 1, 0)


def test_a_subscriber_gets_every_batch_in_order(toy: ToyEngine, tmp_path: Path, peers: Peers) -> None:
    settings = config(tmp_path, endpoint="tcp://127.0.0.1:0", topic="kv@pod@model")
    with EventPublisher.open(toy.cache, settings) as publisher:
        sub = peers.connected(zmq.SUB, publisher.endpoint)
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        first = 0
        while not sub.poll(10):  # until the subscription has arrived
            serve(toy, 1, first)
            publisher.publish()
            first += 1000
        numbers = []
        for _ in range(3):
            topic, seq, payload = sub.recv_multipart()
            assert topic == b"kv@pod@model"
            numbers.append(int.from_bytes(seq, "big"))
            assert msgspec.msgpack.decode(payload, type=VllmBatch).events
            serve(toy, 2, first)
            publisher.publish()
            first += 1000
        assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_a_publisher_without_replay_comes_to_a_subscriber_that_has_bound_an_address(
    toy: ToyEngine, tmp_path: Path, peers: Peers
) -> None:
    sub = peers.connected(zmq.SUB, f"ipc://{tmp_path}/elsewhere")
    endpoint = f"ipc://{tmp_path}/bound"
    sub.bind(endpoint)
    sub.setsockopt_string(zmq.SUBSCRIBE, "")
    settings = config(tmp_path, endpoint=endpoint, replay_endpoint=None, connects=True)
    with EventPublisher.open(toy.cache, settings) as publisher:
        first = 0
        while not sub.poll(10):
            serve(toy, 1, first)
            publisher.publish()
            first += 1000
        assert publisher.replay_endpoint is None
        assert msgspec.msgpack.decode(sub.recv_multipart()[2], type=VllmBatch).events


def test_what_a_clear_of_storage_takes_from_memory_is_announced_again(
    toy: ToyEngine, tmp_path: Path, peers: Peers
) -> None:
    with EventPublisher.open(toy.cache, config(tmp_path, announce_pause_s=0.0)) as publisher:
        consumer = peers.consumer(publisher)
        prompt = serve(toy, 4)
        started(toy.cache.backup(prompt))
        toy.cache.wait_all(1)
        published(publisher)
        assert {medium for medium, _ in consumer.told()} == {"GPU", "CPU", "STORAGE"}
        started(toy.cache.clear_storage())
        toy.cache.wait_all(1)
        published(publisher)
        published(publisher)
        assert publisher.counts().announcements == 2
        assert {medium for medium, _ in consumer.told()} == {"GPU", "CPU"}
        assert consumer.told()["GPU", 0] == set(prompt.keys)


def test_a_consumer_that_comes_after_the_replay_buffer_is_told_everything_when_it_asks(
    toy: ToyEngine, tmp_path: Path, peers: Peers
) -> None:
    settings = config(tmp_path, replay_batches_max=2, announce_pause_s=0.0)
    with EventPublisher.open(toy.cache, settings) as publisher:
        for first in (0, 1000, 2000):
            serve(toy, 2, first)
            publisher.publish()
        published(publisher)
        consumer = peers.consumer(publisher)
        assert consumer.replay(0)[0][0] > 0, "the first batches are no longer kept, and their numbers say so"
        assert publisher.counts().replays_too_old == 1
        assert consumer.replay(-1) == []
        published(publisher)
        _, events = consumer.replay(0)[-1]
        assert events[0] == Cleared()
        assert consumer.told()["GPU", 0] >= set(toy.cache.prompt(tokens(2)).keys)


def test_a_slow_subscriber_misses_batches_sees_it_and_catches_up(toy: ToyEngine, tmp_path: Path, peers: Peers) -> None:
    settings = config(tmp_path, subscriber_batches_max=1, topic="long" * 4_000)  # more than sockets buffer
    with EventPublisher.open(toy.cache, settings) as publisher:
        sub = peers.connected(zmq.SUB, publisher.endpoint, batches_max=1)
        sub.setsockopt_string(zmq.SUBSCRIBE, "")
        while not sub.poll(10):
            serve(toy, 1, 5000)
            toy.cache.reset()
            publisher.publish()
        last = 400
        for number in range(last):
            serve(toy, 1, number)
            toy.cache.reset()
            publisher.publish()
        published(publisher)
        heard = []
        while sub.poll(100):
            heard.append(int.from_bytes(sub.recv_multipart()[1], "big"))
        total = publisher.counts().batches
        assert total > last
        assert len(heard) < total, "the engine did not wait for it"
        assert heard == sorted(heard)
        missed = sorted(set(range(heard[0], total)) - set(heard))
        assert missed, "the numbers tell"
        replayed = peers.consumer(publisher).replay(missed[0])
        assert [seq for seq, _ in replayed] == list(range(missed[0], total))


def test_more_changes_than_may_wait_are_lost_said_and_announced_again(
    toy: ToyEngine, tmp_path: Path, peers: Peers
) -> None:
    with EventPublisher.open(toy.cache, config(tmp_path, changes_pages_max=3)) as publisher:
        publisher.publish()
        serve(toy, 4)
        published(publisher)
        counts = publisher.counts()
        assert (counts.losses, counts.announcements) == (1, 2)
        (_, events) = peers.consumer(publisher).replay(0)[-1]
        assert events[0] == Cleared()
        prompt = toy.cache.prompt(tokens(4))
        told = {name for event in events[1:] if isinstance(event, VllmStored) for name in event.block_hashes}
        assert told == set(prompt.keys)


def test_a_stuck_thread_makes_nobody_wait_and_everything_is_reported_later(toy: ToyEngine, tmp_path: Path) -> None:
    going = threading.Event()

    def wall_clock() -> float:
        assert going.wait(20)
        return 0.0

    with EventPublisher.open(toy.cache, config(tmp_path, queued_pages_max=1), wall_clock) as publisher:
        publisher.publish()
        serve(toy, 4)
        publisher.publish()
        assert publisher.waiting_pages == 1
        going.set()
        eventually(lambda: publisher.waiting_pages == 0, "the publisher is stuck")
        published(publisher)
        assert publisher.counts().pages >= 4


def test_a_large_tree_is_reported_in_bounded_batches(toy: ToyEngine, tmp_path: Path, peers: Peers) -> None:
    with EventPublisher.open(toy.cache, config(tmp_path, batch_pages_max=2)) as publisher:
        for first in (0, 1000, 2000, 3000):
            serve(toy, 2, first)
        published(publisher)
        batches = peers.consumer(publisher).replay(0)
        sizes = [
            sum(len(event.block_hashes) for event in events if isinstance(event, VllmStored)) for _, events in batches
        ]
        assert max(sizes) <= 2
        assert len(batches) > 4


def test_requests_that_are_none_are_passed_over_and_numbers_that_no_batch_has_have_an_end(
    toy: ToyEngine, tmp_path: Path, peers: Peers
) -> None:
    with EventPublisher.open(toy.cache, config(tmp_path)) as publisher:
        publisher.publish()
        consumer = peers.consumer(publisher)
        for request in ((b"", b"short"), (b"", b"", b"x" * 8), (b"x" * 9,)):
            consumer.socket.send_multipart(request)
        for number in (1 << 62, 1 << 63, (1 << 64) - 2):
            assert consumer.replay(number) == []
        assert [seq for seq, _ in consumer.replay(0)] == [0], "the publisher goes on"


def test_a_request_with_a_frame_too_long_or_one_too_many_is_not_sent_back(
    toy: ToyEngine, tmp_path: Path, peers: Peers
) -> None:
    with EventPublisher.open(toy.cache, config(tmp_path)) as publisher:
        publisher.publish()
        consumer = peers.consumer(publisher)
        consumer.socket.send_multipart((b"x" * REQUEST_BYTES_MAX, bytes(8)))
        assert [seq for seq, _ in consumer.replay(0)] == [0]
        assert publisher.counts().replays == 1
        consumer.socket.send_multipart((b"x" * (REQUEST_BYTES_MAX + 1), bytes(8)))  # cuts the connection
        other = peers.consumer(publisher)
        assert [seq for seq, _ in other.replay(0)] == [0]
        assert publisher.counts().replays == 2


def test_a_publisher_closes_in_time_and_leaves_the_cache_to_the_next(toy: ToyEngine, tmp_path: Path) -> None:
    publisher = EventPublisher.open(toy.cache, config(tmp_path))
    with pytest.raises(StateError):
        EventPublisher.open(toy.cache, config(tmp_path))
    publisher.publish()
    assert publisher.close()
    assert publisher.close()
    with EventPublisher.open(toy.cache, config(tmp_path)) as again:
        again.publish()


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint": "nonsense"},
        {"replay_endpoint": "tcp://127.0.0.1:notaport"},
        {"batch_pages_max": 0},
        {"announce_pause_s": -1},
        {"consumer": "vllm"},
        {"topic": "\ud800"},
        {"rank": -1},
        {"rank": 1 << 64},
        {"rank": "one"},
        {"subscriber_batches_max": 1 << 31},
        {"replay_batches_max": (1 << 31) - 2},
        {"close_timeout_s": float("inf")},
    ],
)
def test_settings_that_cannot_be_are_refused_and_leave_nothing_behind(
    toy: ToyEngine, tmp_path: Path, fields: dict[str, object]
) -> None:
    with pytest.raises(ConfigError):
        EventPublisher.open(toy.cache, config(tmp_path, **fields))
    assert not toy.cache.changes.is_watched


def test_a_replay_buffer_is_bounded_by_number_and_by_bytes() -> None:
    by_number = ReplayBuffer(3, 1 << 20)
    by_bytes = ReplayBuffer(100, 10)
    for number in range(6):
        by_number.append(bytes([number]))
        by_bytes.append(bytes(4))
    assert list(by_number.since(0)) == [(3, b"\3"), (4, b"\4"), (5, b"\5")]
    assert (by_number.first_seq, by_bytes.first_seq) == (3, 4)
    assert [seq for seq, _ in by_bytes.since(5)] == [5]
    by_bytes.append(bytes(11))
    assert list(by_bytes.since(0)) == []
    assert by_bytes.first_seq == 7


def test_payloads_are_msgpack_arrays_of_three(toy: ToyEngine, tmp_path: Path, peers: Peers) -> None:
    with EventPublisher.open(toy.cache, config(tmp_path, rank=2), wall_clock=lambda: 99.5) as publisher:
        published(publisher)
        socket = peers.consumer(publisher).socket
        socket.send_multipart((b"", bytes(8)))
        payload = socket.recv_multipart()[3]
        assert msgspec.msgpack.decode(payload) == [99.5, [{"type": "AllBlocksCleared"}], 2]
