"""The small engine: what it takes on, how it interleaves, and that a request may end at any step."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from examples.continuous_batching import (
    BatchingEngine,
    EngineSettings,
    GenerationRequest,
    RequestOutcome,
    TierSizes,
    opened,
)
from tests.support.budget import examples
from tests.support.exactness import SETTLE_S, kept_by, tokens_of
from tests.support.session import Session
from unified_cache.core.config import Retention
from unified_cache.core.errors import ConfigError, InputError
from unified_cache.core.page import Namespace
from unified_cache.forward import ForwardMode

GEMMA, MAMBA = "tiny-gemma3", "tiny-qwen3-next"
PAGE = kept_by(GEMMA).layout.page_size
ABORTS = examples(30, 500)
DETERMINISTIC = EngineSettings(keeps_answers=False)


@contextmanager
def engine(
    family: str = GEMMA,
    settings: EngineSettings = EngineSettings(),
    sizes: TierSizes = TierSizes(60, 120),
    storage: str | None = None,
) -> Iterator[BatchingEngine]:
    with opened(family, kept_by(family), sizes, storage, settings) as made:
        yield made


def request(seed: int, count: int, tokens_max: int = 4) -> GenerationRequest:
    return GenerationRequest(list(tokens_of(seed, count)), tokens_max)


def serve(made: BatchingEngine, *requests: GenerationRequest) -> None:
    for each in requests:
        assert made.submit(each)
    made.run()
    assert all(each.outcome is RequestOutcome.FINISHED for each in requests)


def assert_at_rest(made: BatchingEngine) -> None:
    made.cache.wait_all(SETTLE_S)
    made.cache.check()
    assert not made.cache._locks
    assert not any(lane.out for lane in made.cache.stats().occupancy)


@pytest.mark.parametrize("family", [GEMMA, MAMBA])
def test_requests_served_together_get_the_answers_that_they_get_alone(family: str) -> None:
    lengths = (3 * PAGE + 5, PAGE, 2, 5 * PAGE + 1, 4 * PAGE)
    alone, together = ([request(seed, length, 20) for seed, length in enumerate(lengths)] for _ in range(2))
    with engine(family, DETERMINISTIC) as made:
        for each in alone:
            serve(made, each)
        assert_at_rest(made)
    with engine(family, DETERMINISTIC) as made:
        serve(made, *together)
        assert_at_rest(made)
    assert [each.generated for each in together] == [each.generated for each in alone]


def test_a_prompt_under_way_does_not_hold_up_an_answer() -> None:
    with engine(settings=EngineSettings(batch_tokens=1)) as made:
        talking, coming = request(1, 2, 40), request(2, 10 * PAGE)
        made.submit(talking)
        made.step()
        made.submit(coming)
        spoken: list[int] = []
        while not coming.generated:
            made.step()
            spoken.append(len(talking.generated))
        assert spoken == sorted(set(spoken)), "a token in every iteration"
        assert made.forwards[ForwardMode.EXTEND] >= 10
        made.run()
        assert made.forwards[ForwardMode.DECODE]


def test_the_queue_is_bounded_and_what_can_never_fit_is_refused() -> None:
    with engine(settings=EngineSettings(queue_max=2), sizes=TierSizes(4, 8)) as made:
        assert made.submit(request(1, PAGE))
        assert made.submit(request(2, PAGE))
        late = request(3, PAGE)
        assert not made.submit(late)
        assert late.outcome is None
        with pytest.raises(InputError, match="4 pages, found 5"):
            made.submit(request(4, 4 * PAGE, 1))
        made.run()
        assert made.submit(late)


def test_a_request_waits_until_the_device_has_pages_for_all_that_it_may_come_to() -> None:
    with engine(sizes=TierSizes(6, 24)) as made:
        first, second = request(1, 3 * PAGE), request(2, 3 * PAGE)
        made.submit(first)
        made.submit(second)
        while not first.generated:
            made.step()
            assert not second.computed_tokens
        made.run()
        assert second.outcome is RequestOutcome.FINISHED
        assert_at_rest(made)


@pytest.mark.parametrize("family", [GEMMA, MAMBA])
def test_the_next_turn_resumes_where_the_answer_ended(family: str) -> None:
    with engine(family) as made:
        session = Session(list(tokens_of(1, 2 * PAGE)))
        list(session.stream(made, [1, 2, 3], 2 * PAGE))
        spoken = len(session.tokens)
        assert spoken == 4 * PAGE + 3
        list(session.stream(made, [4, 5, 6], 2))
        assert session.last is not None
        assert session.last.reused.device == 4 * PAGE


@pytest.mark.parametrize("extra_count", [-1, 0, 1])
def test_a_turn_of_bigrams_resumes_from_the_pages_whose_next_token_is_known(extra_count: int) -> None:
    bigrams = Namespace(bigrams=True)
    with engine(GEMMA) as made:
        page_size = made.cache.layout.page_size
        first = GenerationRequest(list(tokens_of(1, 2 * page_size + extra_count)), page_size, namespace=bigrams)
        serve(made, first)
        second = GenerationRequest([*first.tokens, 7], 1, namespace=bigrams)
        serve(made, second)
        # The last generated token was never run, so what it would have begun is not known.
        assert second.reused.total == (len(first.tokens) - 1) // page_size * page_size
        assert_at_rest(made)


def test_an_answer_that_has_filled_the_windows_drops_those_it_began_with() -> None:
    with engine(sizes=TierSizes(60)) as made:
        asked = request(1, 4 * PAGE, 5 * PAGE)
        assert made.submit(asked)
        while len(asked.tokens) <= 4 * PAGE:
            made.step()
        components = made.cache.layout.components
        spans = [component.span for component in components[1:]]
        assert spans == [3]
        pinned: dict[int, list[int]] = {}
        while asked.outcome is None:
            made.step()
            lanes = made.cache.stats().occupancy[: len(components)]
            pinned.setdefault((len(asked.tokens) - 2) // PAGE, [lane.protected for lane in lanes])
        # From the page on before which three are the request's own; Full stays pinned until its end.
        assert pinned == {4: [4, 3], 5: [4, 3], 6: [4, 3], 7: [4, 0], 8: [4, 0]}
        assert_at_rest(made)


def test_without_keeping_answers_only_prompts_are_resumed() -> None:
    with engine(settings=DETERMINISTIC) as made:
        session = Session(list(tokens_of(1, 2 * PAGE)))
        list(session.stream(made, [1, 2, 3], 2 * PAGE))
        list(session.stream(made, [4, 5, 6], 2))
        assert session.last is not None
        assert session.last.reused.device == 2 * PAGE


def test_a_turn_that_was_given_up_is_no_part_of_the_conversation() -> None:
    with engine() as made:
        session = Session([1, 2, 3])
        for _ in session.stream(made, [4], 8):
            break
        assert session.last is not None
        assert session.last.outcome is RequestOutcome.ABORTED
        session.record_answer()
        assert session.tokens == [1, 2, 3]
        assert_at_rest(made)


def test_a_stop_token_is_the_last_one() -> None:
    with engine(settings=DETERMINISTIC) as made:
        free = request(1, PAGE, 12)
        serve(made, free)
        stop = free.generated[5]
        stopped = GenerationRequest(list(tokens_of(1, PAGE)), 12, stop=(stop,))
        serve(made, stopped)
        assert stopped.generated == free.generated[: free.generated.index(stop) + 1]


def test_a_turn_whose_pages_have_no_room_is_served_all_the_same() -> None:
    with engine(sizes=TierSizes(6, 0), settings=DETERMINISTIC) as made:
        expected, found = request(1, 3 * PAGE + 1, PAGE), request(1, 3 * PAGE + 1, PAGE)
        serve(made, expected)
        made.cache.reset()
        taken = made.cache.allocate(made.cache.pages_to_allocate(0, 4, range(1, 5)))
        assert taken is not None
        serve(made, found)
        assert found.generated == expected.generated
        made.cache.free(taken)
        assert_at_rest(made)


@pytest.mark.parametrize("family", [GEMMA, MAMBA])
def test_requests_aborted_at_any_step_leave_nothing_behind(family: str) -> None:
    rng = random.Random(f"aborts of {family}")
    shared = tokens_of(1, 4 * PAGE)
    sizes = TierSizes(16, 24, Retention(tail_tokens=2 * PAGE))
    with engine(family, DETERMINISTIC, sizes, "memory:") as made:
        probe = GenerationRequest([*shared, 7], 6)
        serve(made, probe)
        for number in range(ABORTS):
            prompt = [*shared[: rng.randrange(1, len(shared))], *tokens_of(number, rng.randrange(3 * PAGE))]
            doomed = GenerationRequest(prompt, rng.randrange(1, 2 * PAGE))
            made.submit(doomed)
            made.submit(GenerationRequest(list(prompt[: rng.randrange(1, len(prompt) + 1)]), 2))
            for _ in range(rng.randrange(12)):
                made.step()
            made.abort(doomed)
            made.cache.check()
        made.run()
        again = GenerationRequest([*shared, 7], 6)
        serve(made, again)
        assert again.generated == probe.generated
        assert_at_rest(made)


def test_closing_aborts_whatever_is_under_way() -> None:
    with engine() as made:
        running, waiting = request(1, 5 * PAGE, 9), request(2, PAGE)
        made.submit(running)
        made.step()
        made.submit(waiting)
        made.close()
        assert (running.outcome, waiting.outcome) == (RequestOutcome.ABORTED, RequestOutcome.ABORTED)
        assert_at_rest(made)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EngineSettings(requests_max=0),
        lambda: EngineSettings(queue_max=0),
        lambda: EngineSettings(chunk_pages=0),
        lambda: EngineSettings(batch_tokens=0),
    ],
)
def test_an_engine_without_room_for_anything_is_an_error(make: Callable[[], EngineSettings]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        make()


@pytest.mark.parametrize(("prompt", "tokens_max"), [([], 1), ([1], 0)])
def test_a_request_for_nothing_is_an_error(prompt: list[int], tokens_max: int) -> None:
    with pytest.raises(InputError):
        GenerationRequest(prompt, tokens_max)
