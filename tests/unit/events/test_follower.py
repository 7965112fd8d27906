"""Batches of one publisher in order: gaps, replays, losses, restarts."""

from collections.abc import Sequence

import pytest

from unified_cache.events.encoding import Consumer, Encoding, EventEncoder
from unified_cache.events.follower import PublisherFollower, ReplayRequest
from unified_cache.events.index import Knowledge, PrefixIndex
from unified_cache.events.values import ClearedEvent, KvEvent, Medium, RemovedEvent, StoredEvent
from unified_cache.page import Prompt

PAGE = 2
PROMPT = Prompt.of(range(64 * PAGE), PAGE)
ENGINE = "engine"


def stored(page: int) -> StoredEvent:
    tokens = tuple(range(page * PAGE, (page + 1) * PAGE))
    parent = PROMPT.keys[page - 1] if page else None
    return StoredEvent(Medium.DEVICE, 0, (PROMPT.keys[page],), parent, tokens, PAGE)


def batch(seq: int, *events: KvEvent, run: int = 0) -> bytes:
    """Return batch ``seq`` of a publisher started for the ``run``-th time; without events, page ``seq`` is stored."""
    payload = EventEncoder(Consumer.VLLM, Encoding.MAPS, None).encode(1000.0 * run + seq, events or (stored(seq),))
    assert payload is not None
    return payload


class Router:
    """A follower and what it knows."""

    def __init__(self, *, can_replay: bool = True) -> None:
        self.index = PrefixIndex()
        self.index.add_engine(ENGINE)
        self.follower = PublisherFollower(self.index, ENGINE, 5.0 if can_replay else None)
        self.follower.begin(0.0)

    def hears(self, *seqs: int, run: int = 0) -> "Router":
        for seq in seqs:
            self.follower.receive(seq, batch(seq, run=run), 0.0)
        return self

    def gets(self, seqs: Sequence[int], *, run: int = 0, ends: bool = True) -> "Router":
        """Answer a replay with these batches."""
        for seq in seqs:
            self.follower.receive_again(seq, batch(seq, run=run))
        if ends:
            self.follower.end_answer(0.0)
        return self

    def asks(self) -> list[int | None]:
        return [request.start_seq for request in self.follower.take_requests()]

    @property
    def known(self) -> tuple[Knowledge, int]:
        (score,) = self.index.score(range(64 * PAGE))
        return score.knowledge, score.device_pages


def test_it_begins_with_everything_that_the_publisher_keeps() -> None:
    router = Router()
    assert router.asks() == [0]
    assert router.hears(3).known == (Knowledge.NONE, 0), "what is before it is still to come"
    assert router.gets([0, 1, 2]).known == (Knowledge.WHOLE, 4)
    assert router.asks() == []


def test_batches_in_order_are_applied_as_they_come() -> None:
    router = Router().gets([]).hears(0, 1, 2)
    assert router.known == (Knowledge.WHOLE, 3)
    assert router.follower.counts.gaps == 0


def test_nothing_is_counted_from_a_gap_until_its_replay() -> None:
    router = Router().gets([0, 1]).hears(2)
    router.asks()
    router.hears(5)
    assert router.known == (Knowledge.NONE, 0)
    assert router.asks() == [2], "from the batch on that was applied last"
    router.hears(6)
    assert router.gets([2, 3, 4, 5]).known == (Knowledge.WHOLE, 7)
    assert (router.follower.counts.gaps, router.follower.counts.losses) == (1, 0)


def test_what_a_replay_keeps_no_longer_is_lost_and_everything_is_asked_for_anew() -> None:
    router = Router().gets([0, 1])
    router.asks()
    router.hears(6)
    router.gets([4, 5])
    assert router.known[0] is Knowledge.PART
    assert router.known[1] == 0, "the pages before are not known"
    assert router.asks() == [1, None]
    router.follower.receive(7, batch(7, ClearedEvent(), stored(0), stored(1)), 0.0)
    assert router.known == (Knowledge.WHOLE, 2)
    assert router.follower.counts.losses == 1


def test_after_a_loss_only_what_was_told_since_counts() -> None:
    router = Router(can_replay=False).hears(0, 1, 3, 4)
    assert router.known == (Knowledge.PART, 0)
    router.follower.receive(5, batch(5, stored(0), stored(1)), 0.0)
    assert router.known == (Knowledge.PART, 2)
    assert router.index.pages_count(ENGINE) == 2, "pages 3 and 4 have no place: the page before them is not known"
    router.follower.receive(6, batch(6, RemovedEvent(Medium.DEVICE, 0, (PROMPT.keys[1],))), 0.0)
    assert router.known == (Knowledge.PART, 1)


def test_a_publisher_started_anew_holds_nothing_of_what_it_held() -> None:
    router = Router().gets([0, 1, 2])
    router.asks()
    router.hears(0, run=1)
    assert router.known == (Knowledge.NONE, 0)
    assert router.asks() == [0]
    assert router.gets([0, 1], run=1).known == (Knowledge.WHOLE, 2)
    assert router.follower.counts.restarts == 1


@pytest.mark.parametrize("replayed", [[2, 3, 4], []])
def test_a_look_finds_that_a_publisher_was_started_anew(replayed: list[int]) -> None:
    router = Router().gets([0, 1, 2])
    router.asks()
    router.follower.look(10.0)
    assert router.asks() == [2]
    router.gets(replayed, run=1)
    assert router.known == (Knowledge.NONE, 0)
    assert router.asks() == [0]
    assert router.gets([0, 1], run=1).known == (Knowledge.WHOLE, 2)


def test_a_look_finds_the_last_batch_missing_and_counts_on_meanwhile() -> None:
    router = Router().gets([0, 1, 2])
    router.follower.look(10.0)
    assert router.known == (Knowledge.WHOLE, 3)
    assert router.gets([2, 3]).known == (Knowledge.WHOLE, 4)


def test_a_batch_that_a_replay_brought_already_changes_nothing() -> None:
    router = Router().gets([0, 1, 2]).hears(1, 2)
    assert router.known == (Knowledge.WHOLE, 3)
    assert router.follower.counts.restarts == 0


def test_a_replay_that_does_not_end_in_time_is_given_up() -> None:
    router = Router().gets([0, 1])
    router.asks()
    router.hears(5)
    assert not router.follower.tick(4.9)
    assert router.follower.tick(5.1)
    assert router.known == (Knowledge.PART, 0)
    router.gets([1, 2, 3, 4])
    assert router.follower.next_seq == 6, "a late answer is nobody's"
    router.follower.look(10.0)
    assert router.asks() == [1, None]


def test_a_look_that_is_not_answered_changes_nothing() -> None:
    router = Router().gets([0, 1])
    router.follower.look(10.0)
    router.hears(2)
    assert router.follower.tick(15.1)
    assert router.known == (Knowledge.WHOLE, 3)


def test_a_batch_that_cannot_be_read_is_a_loss() -> None:
    router = Router().gets([0, 1])
    router.asks()
    router.follower.receive(2, b"no batch", 0.0)
    assert router.known == (Knowledge.PART, 0)
    assert router.follower.counts.not_understood == 1
    assert router.asks() == [None]


def test_an_announcement_asked_for_is_answered_by_the_next_batches() -> None:
    router = Router(can_replay=True).gets([4, 5])
    assert router.known[0] is Knowledge.PART
    router.follower.end_answer(0.0)
    router.follower.receive(6, batch(6, ClearedEvent()), 0.0)
    assert router.known == (Knowledge.WHOLE, 0)
    assert ReplayRequest(None).start_seq is None
