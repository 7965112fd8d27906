"""Explanations of a hit: each state of a missing page is set up, and named right."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.support.cache import IDENTITY, ToyEngine, WholePromptCache, toy_layout
from tests.support.offline import ListedMemory
from tests.support.operations import PAGE, SPANS, Stepped, over, serve, started, tokens
from unified_cache.cache.explain.explanation import ComponentExplanation, Explanation
from unified_cache.cache.explain.miss_reason import MissReason
from unified_cache.controller import InlineWorkers, Workers
from unified_cache.core.config import CacheConfig, Retention, WritePolicy
from unified_cache.core.page import Namespace
from unified_cache.core.pool import Identity
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, StorageBackend


def over_store(
    storage: StorageBackend | None = None,
    *,
    host: int = 12,
    spans: tuple[int, ...] = (SPAN_ALL,),
    identity: Identity = IDENTITY,
    workers: Workers | None = None,
    **fields: object,
) -> ToyEngine:
    """Return an engine of 12 device pages that backs up when it is told to."""
    layout = toy_layout(spans, PAGE)
    device_pages, host_pages = (12,) * len(spans), (host,) * len(spans)
    toy = ToyEngine(layout, device_pages, host_pages, None, InlineWorkers(), identity)
    toy.cache.close()
    config = CacheConfig(device_pages, host_pages, write=WritePolicy.ON_CALL, guard=None)
    toy.cache = WholePromptCache.open(
        layout,
        replace(config, **fields),  # type: ignore[arg-type]  # fields of CacheConfig by name
        list(toy.pools.values()),
        identity=identity,
        storage=storage,
        workers=workers or InlineWorkers(),
    )
    return toy


def explained(toy: ToyEngine, pages: int, first: int = 0, namespace: Namespace = Namespace()) -> Explanation:
    return toy.cache.explain(toy.cache.prompt(tokens(pages, first), namespace))


def component_of(explanation: Explanation, tier: str, component: int = 0) -> ComponentExplanation:
    return next(each for each in explanation.tiers if each.tier == tier).components[component]


def whys(explanation: Explanation, tier: str, component: int = 0) -> Mapping[tuple[int, int], MissReason]:
    return {(run.start, run.end): run.why for run in component_of(explanation, tier, component).missing}


def back_up(toy: ToyEngine, pages: int, first: int = 0) -> None:
    over(toy.cache, toy.cache.backup(toy.cache.prompt(tokens(pages, first))))


def stored_and_forgotten(toy: ToyEngine, pages: int = 6) -> None:
    """Have a prompt in storage alone."""
    serve(toy, pages)
    back_up(toy, pages)
    toy.cache.reset()


@pytest.mark.parametrize("policy", [WritePolicy.ON_CALL, WritePolicy.SELECTIVE])
def test_pages_that_only_the_device_has_are_not_copied_and_others_in_no_tier(policy: WritePolicy) -> None:
    toy = over_store(MemoryStorage(), write=policy)
    serve(toy, 4)
    explanation = explained(toy, 6)
    assert whys(explanation, "device") == {(4, 6): MissReason.IN_NO_TIER}
    for tier in ("host", "storage"):
        assert whys(explanation, tier) == {(0, 4): MissReason.NOT_COPIED, (4, 6): MissReason.IN_NO_TIER}
    assert (explanation.end, explanation.write) == (4, policy)
    assert policy.value in str(explanation)


def test_what_the_device_evicts_was_not_brought_back_from_the_host() -> None:
    toy = over_store()
    serve(toy, 10)
    back_up(toy, 10)
    serve(toy, 6, first=10_000)
    assert whys(explained(toy, 10), "device") == {(6, 10): MissReason.NOT_FETCHED}


def test_what_only_storage_has_was_not_fetched() -> None:
    store = MemoryStorage()
    stored_and_forgotten(over_store(store))
    explanation = explained(over_store(store), 6)
    assert whys(explanation, "device") == whys(explanation, "host") == {(0, 6): MissReason.NOT_FETCHED}
    assert whys(explanation, "storage") == {}
    assert explanation.end == 6


def test_what_a_backup_copies_is_on_its_way() -> None:
    workers = Stepped()
    toy = over_store(workers=workers)
    started(toy.cache.backup(serve(toy, 4)))
    assert whys(explained(toy, 4), "host") == {(0, 4): MissReason.ARRIVING}
    workers.run()


def test_what_a_store_that_does_not_answer_has_is_unknown_on_every_tier() -> None:
    class Away(MemoryStorage):
        def exists(self, labels: Sequence[Label]) -> list[Answer]:
            return [Answer.UNAVAILABLE] * len(labels)

    toy = over_store(Away())
    serve(toy, 3)
    explanation = explained(toy, 5)
    assert whys(explanation, "storage") == {(0, 5): MissReason.STORE_UNAVAILABLE}
    assert whys(explanation, "device") == {(3, 5): MissReason.STORE_UNAVAILABLE}
    assert [loss.why for loss in explanation.losses] == [MissReason.STORE_UNAVAILABLE]


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
    toy = over_store(spans=SPANS, retention=Retention(branches=False))
    serve(toy, 8)
    explanation = explained(toy, 6)
    assert whys(explanation, "device", 1) == {(0, 6): MissReason.NOT_KEPT}
    device = explanation.tiers[0]
    assert (device.end, [each.next_page for each in device.components]) == (0, [None, 0])
    (loss,) = explanation.losses
    assert (loss.component, loss.start, loss.end, loss.why) == ("toy1", 0, 6, MissReason.NOT_KEPT)


def test_an_explanation_agrees_with_match_and_changes_nothing() -> None:
    toy = over_store(MemoryStorage(), spans=SPANS, host=10)
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
    toy = over_store(MemoryStorage(), spans=SPANS)
    serve(toy, 8)
    lines = str(explained(toy, 10)).splitlines()
    assert lines[0] == "8 pages of 10 can be resumed (16 tokens each; write policy on_call)"
    assert lines[1] == "device: 8 pages; for one more, toy0 lacks page 8, toy1 lacks page 8"
    assert lines[2].split("  ")[1:4] == [
        "toy0",
        "|========..|",
        "[8, 10) in no tier: never computed here, or gone since",
    ]
    assert lines[3].split("|")[1] == "......==.."
    assert len(lines) == 1 + 3 * 3


def test_an_empty_prompt_is_explained() -> None:
    assert explained(over_store(MemoryStorage()), 0).end == 0
