from collections.abc import Callable, Sequence

import pytest

from tests.support.vllm_tier import offload_key
from unified_cache.integrations.vllm import lookups as module
from unified_cache.integrations.vllm.lookups import Lookups
from unified_cache.storage_backends.protocol import Answer

KEYS = [offload_key(number) for number in range(6)]
HIT, MISS, LATER = Answer.HIT, Answer.MISS, Answer.UNAVAILABLE


class AskedStore:
    """A store that has three keys, knows some of them from memory, and answers when it is let."""

    def __init__(self) -> None:
        self.held = set(KEYS[:3])
        self.known: set[bytes] = set()
        self.asked: list[list[bytes]] = []
        self.asked_memory: list[bytes] = []
        self.is_late = False
        self._waiting: list[tuple[Callable[[Sequence[Answer]], None], list[Answer]]] = []

    def ask(self, keys: Sequence[bytes], on_end: Callable[[Sequence[Answer]], None]) -> None:
        """Answer later, or at once unless it is late."""
        self.asked.append(list(keys))
        self._waiting.append((on_end, [HIT if key in self.held else MISS for key in keys]))
        if not self.is_late:
            self.answer_all()

    def knows(self, key: bytes) -> bool:
        """Answer from memory."""
        self.asked_memory.append(key)
        return key in self.known

    def answer_all(self) -> None:
        """Answer what waits."""
        for on_end, answers in self._waiting:
            on_end(answers)
        self._waiting.clear()


@pytest.fixture
def store() -> AskedStore:
    return AskedStore()


@pytest.fixture
def lookups(store: AskedStore) -> Lookups:
    return Lookups(store.knows)


def answers(lookups: Lookups, request: str, keys: Sequence[bytes] = KEYS) -> list[Answer]:
    return [lookups.answer(key, request) for key in keys]


def answered(lookups: Lookups, store: AskedStore, request: str) -> list[Answer]:
    answers(lookups, request)
    lookups.send(store.ask)
    assert not lookups.waiting_count
    return answers(lookups, request)


def test_keys_of_a_step_are_asked_for_together_and_later_until_the_store_has_answered(
    lookups: Lookups, store: AskedStore
) -> None:
    store.is_late = True
    assert answers(lookups, "a") == [LATER] * 6
    assert store.asked == []
    lookups.send(store.ask)
    assert answers(lookups, "a") == [LATER] * 6
    lookups.send(store.ask)
    store.answer_all()
    assert answers(lookups, "a") == answers(lookups, "b") == [HIT] * 3 + [MISS] * 3
    assert store.asked == [KEYS]


def test_what_memory_knows_is_answered_on_the_spot_and_the_rest_is_asked_for(
    lookups: Lookups, store: AskedStore
) -> None:
    store.known = set(KEYS[:2])
    assert answers(lookups, "a") == [HIT] * 2 + [LATER] * 4
    assert lookups.answered[HIT] == 2
    # Behind the first key of a request that memory does not know it is not asked again in that step.
    assert store.asked_memory == KEYS[:3]
    assert answered(lookups, store, "a") == [HIT] * 3 + [MISS] * 3
    assert store.asked == [KEYS[2:]]
    assert store.asked_memory == KEYS[:3]


def test_memory_is_asked_for_so_many_keys_in_a_step(
    lookups: Lookups, store: AskedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KNOWN_KEYS_MAX", 1)
    store.known = set(KEYS[:2])
    lookups.send(store.ask)
    assert answers(lookups, "a", KEYS[:1]) == [HIT]
    assert answers(lookups, "b", KEYS[1:2]) == [LATER]
    lookups.send(store.ask)
    assert answers(lookups, "c", KEYS[2:3]) == [LATER]
    assert store.asked_memory == [KEYS[0], KEYS[2]]


@pytest.mark.parametrize("known", [[], KEYS[:2]], ids=["asked for", "known"])
def test_a_chunk_whose_load_failed_is_a_miss_while_a_request_lives_that_asked(
    known: list[bytes], lookups: Lookups, store: AskedStore
) -> None:
    store.known = set(known)
    answered(lookups, store, "a")
    answers(lookups, "b")
    lookups.miss(KEYS[:1])
    lookups.request_ended("a")
    assert answered(lookups, store, "b")[:2] == [MISS, HIT]
    assert answered(lookups, store, "c")[0] is MISS
    lookups.request_ended("b")
    lookups.request_ended("c")
    lookups.request_ended("never seen")
    asked_count = len(store.asked)
    assert answered(lookups, store, "d")[0] is HIT
    assert len(store.asked) == asked_count + 1


def test_a_failed_load_has_the_last_word_over_an_answer_under_way(lookups: Lookups, store: AskedStore) -> None:
    store.is_late = True
    answers(lookups, "a")
    lookups.send(store.ask)
    lookups.miss(KEYS)
    store.answer_all()
    assert not lookups.waiting_count
    assert answers(lookups, "a") == [MISS] * 6


def test_a_request_that_ended_before_the_step_did_is_not_asked_for(lookups: Lookups, store: AskedStore) -> None:
    answers(lookups, "a")
    answers(lookups, "b", KEYS[:2])
    lookups.request_ended("a")
    lookups.send(store.ask)
    assert not lookups.waiting_count
    assert store.asked == [KEYS[:2]]


def test_an_answer_of_the_time_before_a_reset_is_dropped(lookups: Lookups, store: AskedStore) -> None:
    store.is_late = True
    answers(lookups, "a")
    lookups.send(store.ask)
    lookups.ask_again()
    store.held.clear()
    assert answers(lookups, "a") == [LATER] * 6
    lookups.send(store.ask)
    store.answer_all()
    assert not lookups.waiting_count
    assert answers(lookups, "a") == [MISS] * 6


def test_keys_beyond_the_bound_are_misses_at_once(
    lookups: Lookups, store: AskedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_KEYS_MAX", 2)
    store.is_late = True
    assert answers(lookups, "a", KEYS[:3]) == [LATER] * 2 + [MISS]
    assert lookups.answered[LATER] == 1


def test_a_long_chain_is_asked_for_in_pieces(
    lookups: Lookups, store: AskedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NAMES_MAX", 4)
    assert answered(lookups, store, "a") == [HIT] * 3 + [MISS] * 3
    assert store.asked == [KEYS[:4], KEYS[4:]]
