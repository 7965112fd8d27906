from collections.abc import Callable, Sequence

import pytest

from tests.support.vllm_tier import offload_key
from unified_cache.integrations.vllm import lookups as module
from unified_cache.integrations.vllm.lookups import Lookups
from unified_cache.storage_backends.protocol import Answer

KEYS = [offload_key(number) for number in range(6)]


class AskedStore:
    """A store that has some keys, and answers when it is let."""

    def __init__(self, held: set[bytes]) -> None:
        self.held = held
        self.asked: list[list[bytes]] = []
        self.is_late = False
        self._waiting: list[tuple[Callable[[Sequence[Answer]], None], list[Answer]]] = []

    def __call__(self, keys: Sequence[bytes], on_end: Callable[[Sequence[Answer]], None]) -> None:
        self.asked.append(list(keys))
        self._waiting.append((on_end, [Answer.HIT if key in self.held else Answer.MISS for key in keys]))
        if not self.is_late:
            self.answer_all()

    def answer_all(self) -> None:
        for on_end, answers in self._waiting:
            on_end(answers)
        self._waiting.clear()


@pytest.fixture
def store() -> AskedStore:
    return AskedStore(set(KEYS[:3]))


@pytest.fixture
def lookups(store: AskedStore) -> Lookups:
    return Lookups(store)


def answers(lookups: Lookups, request: str, keys: Sequence[bytes] = KEYS) -> list[Answer]:
    return [lookups.answer(key, request) for key in keys]


def answered(lookups: Lookups, request: str, keys: Sequence[bytes] = KEYS) -> list[Answer]:
    answers(lookups, request, keys)
    lookups.send()
    assert not lookups.waiting_count
    return answers(lookups, request, keys)


def test_keys_of_a_step_are_asked_for_together_and_later_until_then(lookups: Lookups, store: AskedStore) -> None:
    assert answers(lookups, "a") == [Answer.UNAVAILABLE] * 6
    assert store.asked == []
    assert answered(lookups, "a") == [Answer.HIT] * 3 + [Answer.MISS] * 3
    assert store.asked == [KEYS]


def test_a_look_up_never_waits_for_the_store(lookups: Lookups, store: AskedStore) -> None:
    store.is_late = True
    answers(lookups, "a")
    lookups.send()
    assert answers(lookups, "a") == [Answer.UNAVAILABLE] * 6
    lookups.send()
    store.answer_all()
    assert not lookups.waiting_count
    assert store.asked == [KEYS]


class KnownKeys:
    """Memory that knows some keys, and notes which it was asked for."""

    def __init__(self, known: set[bytes]) -> None:
        self.known = known
        self.asked: list[bytes] = []

    def __call__(self, key: bytes) -> bool:
        self.asked.append(key)
        return key in self.known


@pytest.fixture
def memory(store: AskedStore) -> KnownKeys:
    return KnownKeys(set(KEYS[:2]))


@pytest.fixture
def quick(store: AskedStore, memory: KnownKeys) -> Lookups:
    return Lookups(store, memory)


def test_what_memory_knows_is_answered_on_the_spot_and_the_rest_is_asked_for(
    quick: Lookups, store: AskedStore, memory: KnownKeys
) -> None:
    assert answers(quick, "a") == [Answer.HIT] * 2 + [Answer.UNAVAILABLE] * 4
    assert quick.answered[Answer.HIT] == 2
    # Behind the first key of a request that memory does not know it is not asked again in that step.
    assert memory.asked == KEYS[:3]
    assert answered(quick, "a") == [Answer.HIT] * 3 + [Answer.MISS] * 3
    assert store.asked == [KEYS[2:]]
    assert memory.asked == KEYS[:3]


def test_a_key_that_memory_knew_and_whose_load_failed_is_a_miss(quick: Lookups) -> None:
    answers(quick, "a")
    quick.miss(KEYS[:1])
    assert answers(quick, "a")[:2] == [Answer.MISS, Answer.HIT]
    quick.request_ended("a")
    assert answers(quick, "b")[:2] == [Answer.HIT] * 2


def test_memory_is_asked_for_so_many_keys_in_a_step(
    quick: Lookups, memory: KnownKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KNOWN_KEYS_MAX", 1)
    quick.send()
    assert answers(quick, "a", KEYS[:1]) == [Answer.HIT]
    assert answers(quick, "b", KEYS[1:2]) == [Answer.UNAVAILABLE]
    quick.send()
    assert answers(quick, "c", KEYS[2:3]) == [Answer.UNAVAILABLE]
    assert memory.asked == [KEYS[0], KEYS[2]]


def test_a_second_request_shares_the_answer(lookups: Lookups, store: AskedStore) -> None:
    answered(lookups, "a")
    assert answers(lookups, "b")[0] is Answer.HIT
    lookups.request_ended("a")
    assert answers(lookups, "b")[0] is Answer.HIT
    assert store.asked == [KEYS]


def test_a_chunk_whose_load_failed_is_a_miss_while_a_request_lives_that_asked(
    lookups: Lookups, store: AskedStore
) -> None:
    answered(lookups, "a")
    answers(lookups, "b")
    lookups.miss(KEYS[:1])
    lookups.request_ended("a")
    assert answered(lookups, "b")[:2] == [Answer.MISS, Answer.HIT]
    assert answered(lookups, "c")[0] is Answer.MISS
    lookups.request_ended("b")
    lookups.request_ended("c")
    assert answered(lookups, "d")[0] is Answer.HIT


def test_a_failed_load_has_the_last_word_over_an_answer_under_way(lookups: Lookups, store: AskedStore) -> None:
    store.is_late = True
    answers(lookups, "a")
    lookups.send()
    lookups.miss(KEYS)
    store.answer_all()
    assert not lookups.waiting_count
    assert answers(lookups, "a") == [Answer.MISS] * 6


def test_nothing_is_remembered_of_requests_that_ended(lookups: Lookups, store: AskedStore) -> None:
    answered(lookups, "a")
    answers(lookups, "b", KEYS[:2])
    lookups.request_ended("a")
    assert lookups.keys_count == 2
    lookups.request_ended("b")
    assert lookups.keys_count == 0
    lookups.request_ended("never seen")


def test_a_request_that_ended_before_the_step_did_is_not_asked_for(lookups: Lookups, store: AskedStore) -> None:
    answers(lookups, "a")
    lookups.request_ended("a")
    lookups.send()
    assert not lookups.waiting_count
    assert store.asked == []


def test_an_answer_of_the_time_before_a_reset_is_dropped(lookups: Lookups, store: AskedStore) -> None:
    store.is_late = True
    answers(lookups, "a")
    lookups.send()
    lookups.ask_again()
    store.held.clear()
    assert answers(lookups, "a") == [Answer.UNAVAILABLE] * 6
    lookups.send()
    store.answer_all()
    assert not lookups.waiting_count
    assert answers(lookups, "a") == [Answer.MISS] * 6


def test_keys_beyond_the_bound_are_misses_at_once(
    lookups: Lookups, store: AskedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_KEYS_MAX", 2)
    store.is_late = True
    assert answers(lookups, "a", KEYS[:3]) == [Answer.UNAVAILABLE] * 2 + [Answer.MISS]
    assert lookups.answered[Answer.UNAVAILABLE] == 1


def test_a_long_chain_is_asked_for_in_pieces(
    lookups: Lookups, store: AskedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NAMES_MAX", 4)
    assert answered(lookups, "a") == [Answer.HIT] * 3 + [Answer.MISS] * 3
    assert store.asked == [KEYS[:4], KEYS[4:]]
