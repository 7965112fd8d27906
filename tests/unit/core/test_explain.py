"""Explanations of a hit: where each page of a prompt is held, and why what is held nowhere is missed."""

from functools import partial

import numpy as np
import pytest

from tests.support.cache import IDENTITY, ToyEngine
from tests.support.offline import ListedMemory
from tests.support.operations import FULL, HYBRID, PAGE, engine, over, serve, tokens
from tests.support.store_calls import ScriptedStorage
from unified_cache.cache.explain import Explanation, MissingRun, MissReason
from unified_cache.core.config import Retention, WritePolicy
from unified_cache.core.page import Namespace
from unified_cache.core.pool import Identity
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.layer import Method

over_store = partial(engine, layout=FULL, device=12)


def explained(toy: ToyEngine, pages: int, first: int = 0, namespace: Namespace = Namespace()) -> Explanation:
    return toy.cache.explain(toy.cache.prompt(tokens(pages, first), namespace))


def held(explanation: Explanation, component: int = 0) -> dict[str, tuple[tuple[int, int], ...]]:
    return {each.tier: each.components[component].held for each in explanation.tiers}


def back_up(toy: ToyEngine, pages: int, first: int = 0) -> None:
    over(toy.cache, toy.cache.backup(toy.cache.prompt(tokens(pages, first))))


def stored_and_forgotten(toy: ToyEngine, pages: int = 6) -> None:
    """Have a prompt in storage alone."""
    serve(toy, pages)
    back_up(toy, pages)
    toy.cache.reset()


@pytest.mark.parametrize("policy", [WritePolicy.ON_CALL, WritePolicy.SELECTIVE])
def test_pages_that_only_the_device_has_are_held_there_and_others_in_no_tier(policy: WritePolicy) -> None:
    toy = over_store(MemoryStorage(), write=policy)
    serve(toy, 4)
    explanation = explained(toy, 6)
    assert held(explanation) == {"device": ((0, 4),), "host": (), "storage": ()}
    assert explanation.losses == (MissingRun("toy0", 4, 6, MissReason.IN_NO_TIER),)
    assert (explanation.end, explanation.write) == (4, policy)
    assert policy.value in str(explanation)


def test_what_the_device_evicts_is_held_by_the_host() -> None:
    toy = over_store()
    serve(toy, 10)
    back_up(toy, 10)
    serve(toy, 6, first=10_000)
    explanation = explained(toy, 10)
    assert held(explanation) == {"device": ((0, 6),), "host": ((0, 10),)}
    assert ([each.end for each in explanation.tiers], explanation.losses) == ([6, 10], ())


def test_what_only_storage_has_can_be_resumed_with_its_help() -> None:
    store = MemoryStorage()
    stored_and_forgotten(over_store(store))
    explanation = explained(over_store(store), 6)
    assert held(explanation) == {"device": (), "host": (), "storage": ((0, 6),)}
    assert ([each.end for each in explanation.tiers], explanation.end) == ([0, 0, 6], 6)


def test_what_a_store_that_does_not_answer_has_is_unknown() -> None:
    store = ScriptedStorage()
    store.answers[Method.EXISTS] = Answer.UNAVAILABLE
    toy = over_store(store)
    serve(toy, 3)
    explanation = explained(toy, 5)
    assert held(explanation) == {"device": ((0, 3),), "host": (), "storage": ()}
    assert explanation.losses == (MissingRun("toy0", 3, 5, MissReason.STORE_UNAVAILABLE),)


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        (Namespace(cache_salt="a"), Namespace(cache_salt="b"), ("cache_salt",)),
        (Namespace(lora_id="french"), Namespace(), ("lora_id",)),
        (Namespace(), Namespace(tenant="us", extra_key="x"), ("extra_key", "tenant")),
        (Namespace(bigrams=True), Namespace(), ("bigrams",)),
    ],
)
def test_the_same_tokens_in_another_namespace_are_a_near_match(
    theirs: Namespace, ours: Namespace, named: tuple[str, ...]
) -> None:
    toy = over_store()
    toy.run(toy.cache.prompt(np.arange(6 * PAGE + 1, dtype=np.int32), theirs))
    explanation = explained(toy, 6, namespace=ours)
    (near,) = explanation.near
    assert (near.place, near.differs) == ("memory", named)
    assert near.pages == (5 if theirs.bigrams else 6)
    assert explanation.end == 0
    assert "near match: memory has" in str(explanation)


@pytest.mark.parametrize(
    ("theirs", "namespace", "named"),
    [
        (Identity("toy", dtype="float8_e4m3"), Namespace(), "dtype (float8_e4m3 there, none here)"),
        (Identity("toy", generation=3), Namespace(), "generation (3 there, 0 here)"),
        (Identity("other"), Namespace(), "model (other there, toy here)"),
        (IDENTITY, Namespace(cache_salt="b"), "cache_salt"),
    ],
)
def test_the_same_tokens_stored_under_another_identity_or_namespace_are_a_near_match(
    theirs: Identity, namespace: Namespace, named: str
) -> None:
    store = ListedMemory()
    stored_and_forgotten(over_store(store, identity=theirs), 5)
    (near,) = explained(over_store(store), 6, namespace=namespace).near
    assert (near.place, near.pages, near.differs) == ("storage", 5, (named,))


def test_windows_that_no_end_needed_were_not_kept() -> None:
    toy = over_store(layout=HYBRID, retention=Retention(branches=False))
    serve(toy, 8)
    explanation = explained(toy, 6)
    assert held(explanation, 1)["device"] == ()
    device = explanation.tiers[0]
    assert (device.end, [each.next_page for each in device.components]) == (0, [None, 0])
    assert explanation.losses == (MissingRun("toy1", 0, 6, MissReason.NOT_KEPT),)


def test_an_explanation_agrees_with_match_and_changes_nothing() -> None:
    toy = over_store(MemoryStorage(), layout=HYBRID, host=10)
    for first in (0, 10_000, 20_000, 0):
        serve(toy, 8, first)
        back_up(toy, 8, first)
    for first in (0, 10_000, 20_000):
        explanation = explained(toy, 9, first)
        found = toy.cache._ledger.tree.peek(toy.cache.prompt(tokens(9, first)))
        device, host, storage = explanation.tiers
        assert (device.end, host.end) == (found.device_end, found.host_end)
        assert storage.end == explanation.end >= host.end
        assert sum(loss.end - loss.start for loss in explanation.losses) == 9 - explanation.end
        assert explained(toy, 9, first) == explanation
    toy.cache.check()


def test_the_picture_has_a_line_for_each_component_and_tier() -> None:
    toy = over_store(MemoryStorage(), layout=HYBRID)
    serve(toy, 8)
    lines = str(explained(toy, 10)).splitlines()
    assert lines[0] == "8 pages of 10 can be resumed (16 tokens each; write policy on_call)"
    assert lines[1] == "device: 8 pages; for one more, toy0 lacks page 8, toy1 lacks page 8"
    assert [line.split("|")[1] for line in lines[2:4]] == ["========..", "......==.."]
    assert lines[-1] == "missed: [8, 10) for toy0, in no tier: never computed here, or gone since"
    assert len(lines) == 1 + 3 * 3 + 1


def test_an_empty_prompt_is_explained() -> None:
    assert explained(over_store(MemoryStorage()), 0).end == 0
