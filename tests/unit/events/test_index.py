"""The index of what engines have told: against a naive model, and its answers where something is special."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.budget import examples
from unified_cache.errors import ConfigError, InputError, TokenError
from unified_cache.events.index import EngineTraits, HashKind, Knowledge, PrefixIndex
from unified_cache.events.values import BlockHash, ClearedEvent, KvEvent, Medium, RemovedEvent, StoredEvent
from unified_cache.page import Namespace, Prompt
from unified_cache.window import SPAN_ALL, window

PAGE = 2
SPANS = (SPAN_ALL, 2)
STEM = list(range(3 * PAGE))
PROMPTS = [Prompt.of(STEM + list(range(first, first + 4 * PAGE)), PAGE) for first in (100, 200)]
ENGINES = ("ours", "theirs", "neighbour")
SETTINGS = {
    "ours": EngineTraits(HashKind.PAGE_KEYS, "shared"),
    "theirs": EngineTraits(spans=SPANS),
    "neighbour": EngineTraits(HashKind.OWN, "shared", SPANS),
}


def name_of(engine: str, prompt: Prompt, page: int) -> BlockHash:
    key = prompt.keys[page]
    return key if engine == "ours" else int.from_bytes(key[:8], "big", signed=True)


def stored(engine: str, prompt: Prompt, pages: range, medium: Medium, group: int) -> StoredEvent:
    ids = [int.from_bytes(prompt.tokens[at : at + 4], "little") for at in range(0, len(prompt.tokens), 4)]
    return StoredEvent(
        medium,
        group,
        tuple(name_of(engine, prompt, page) for page in pages),
        name_of(engine, prompt, pages.start - 1) if pages.start else None,
        tuple(ids[pages.start * PAGE : pages.stop * PAGE]),
        PAGE,
        span=SPANS[group],
        spans=SPANS if engine == "ours" else (),
    )


@dataclass
class Model:
    """Pages of one engine, as sets."""

    lanes: dict[tuple[Medium, int], set[bytes]] = field(default_factory=dict)

    def lane(self, medium: Medium, group: int) -> set[bytes]:
        return self.lanes.setdefault((medium, group), set())

    def knows(self, key: bytes) -> bool:
        return any(key in pages for pages in self.lanes.values())


def naive_ends(models: dict[str, Model], engine: str, prompt: Prompt) -> tuple[int, ...]:
    """Try every end on every tier."""
    found = []
    for upto in Medium:
        tellers = {medium: [engine] for medium in Medium}
        if SETTINGS[engine].storage:
            tellers[Medium.STORAGE] = [each for each in ENGINES if SETTINGS[each].storage]
        have = [
            set().union(*(models[each].lane(m, group) for m in Medium if m <= upto for each in tellers[m]))
            for group in range(len(SPANS))
        ]
        ends = [
            end
            for end in range(prompt.pages_count + 1)
            if all(set(prompt.keys[window(end, span) : end]) <= have[group] for group, span in enumerate(SPANS))
        ]
        found.append(max(ends))
    return tuple(found)


def moves() -> st.SearchStrategy[tuple[str, int, int, int, Medium, int, bool]]:
    return st.tuples(
        st.sampled_from(ENGINES),
        st.integers(0, 1),
        st.integers(0, 6),
        st.integers(1, 7),
        st.sampled_from(Medium),
        st.integers(0, 1),
        st.booleans(),
    )


@settings(max_examples=examples(60, 2000), deadline=None)
@given(st.lists(moves(), max_size=25))
def test_scores_are_what_trying_every_end_finds(
    history: list[tuple[str, int, int, int, Medium, int, bool]],
) -> None:
    index = PrefixIndex()
    models = {engine: Model() for engine in ENGINES}
    for engine in ENGINES:
        index.add_engine(engine, SETTINGS[engine])
        index.set_knowledge(engine, Knowledge.WHOLE)
        index.apply(engine, [stored(engine, PROMPTS[0], range(1), Medium.DEVICE, 0)])
        models[engine].lane(Medium.DEVICE, 0).add(PROMPTS[0].keys[0])
    for engine, number, start, count, medium, group, is_stored in history:
        prompt, model = PROMPTS[number], models[engine]
        pages = range(start, min(start + count, 7))
        keys = [prompt.keys[page] for page in pages]
        if is_stored:
            index.apply(engine, [stored(engine, prompt, pages, medium, group)])
            parent_known = not start or model.knows(prompt.keys[start - 1])
            if engine == "ours" or parent_known or all(map(model.knows, keys)):
                model.lane(medium, group).update(keys)
            continue
        removed = RemovedEvent(medium, group, tuple(name_of(engine, prompt, page) for page in pages))
        gone = set(keys) if engine == "ours" else {key for key in keys if model.knows(key)}
        index.apply(engine, [removed])
        model.lane(medium, group).difference_update(gone)
        if medium is Medium.STORAGE and SETTINGS[engine].storage:
            for other in ENGINES:
                if SETTINGS[other].storage:
                    models[other].lane(medium, group).difference_update(gone)
    for number, prompt in enumerate(PROMPTS):
        scores = index.score(STEM + list(range(100 * (number + 1), 100 * (number + 1) + 4 * PAGE)))
        for score in scores:
            found = (score.device_pages, score.host_pages, score.storage_pages)
            assert found == naive_ends(models, score.engine, prompt), score
    for engine in ENGINES:
        assert index.pages_count(engine) == sum(map(len, models[engine].lanes.values()))


def plain(prompt: Prompt, pages: int, medium: Medium = Medium.DEVICE, **fields: object) -> StoredEvent:
    event = stored("ours", prompt, range(pages), medium, 0)
    values = {name: fields.get(name, getattr(event, name)) for name in StoredEvent.__dataclass_fields__}
    return StoredEvent(**{**values, "spans": fields.get("spans", ())})  # type: ignore[arg-type]  # fields by name


TOKENS = STEM + list(range(100, 100 + 4 * PAGE))


def heard(*events: KvEvent, traits: EngineTraits = EngineTraits(), pages_max: int = 1 << 20) -> PrefixIndex:
    index = PrefixIndex(pages_max)
    index.add_engine("a", traits)
    index.set_knowledge("a", Knowledge.WHOLE)
    index.apply("a", events)
    return index


def device_pages(index: PrefixIndex, namespace: Namespace | None = None) -> int:
    (score,) = index.score(TOKENS) if namespace is None else index.score(TOKENS, namespace)
    return score.device_pages


def test_full_pages_without_their_window_are_no_hit() -> None:
    index = heard(plain(PROMPTS[0], 5, spans=SPANS))
    assert device_pages(index) == 0
    index.apply("a", [stored("ours", PROMPTS[0], range(1, 3), Medium.HOST, 1)])
    (score,) = index.score(TOKENS)
    assert (score.device_pages, score.host_pages) == (0, 3)


def test_an_engine_that_nothing_is_known_of_scores_nothing_and_says_so() -> None:
    index = heard(plain(PROMPTS[0], 5))
    index.set_knowledge("a", Knowledge.NONE)
    (score,) = index.score(TOKENS)
    assert (score.knowledge, score.device_pages, score.page_size) == (Knowledge.NONE, 0, PAGE)


def test_a_clear_forgets_all_tiers_and_makes_a_part_the_whole() -> None:
    index = heard(plain(PROMPTS[0], 5), plain(PROMPTS[0], 5, Medium.STORAGE))
    index.set_knowledge("a", Knowledge.PART)
    index.apply("a", [ClearedEvent()])
    assert index.score(TOKENS)[0] == index.score(TOKENS)[0].__class__("a", Knowledge.WHOLE, PAGE, 0, 0, 0)
    assert index.pages_count("a") == 0


def test_pages_of_another_namespace_are_not_found() -> None:
    extra = (("style", "pepper"), *[("style",)] * 4)
    index = heard(plain(PROMPTS[0], 5, lora_name="style", extra_keys=extra))
    assert device_pages(index) == 0
    assert device_pages(index, Namespace(lora_id="style", cache_salt="pepper")) == 5
    assert device_pages(index, Namespace(lora_id="style")) == 0


def test_pages_that_depend_on_more_than_tokens_are_not_placed() -> None:
    image = ("('picture', 0)",)
    index = heard(plain(PROMPTS[0], 5, extra_keys=(None, None, image, None, None)))
    assert device_pages(index) == 2
    assert index.unplaced_count == 3


def test_pages_of_bigrams_are_found_as_such() -> None:
    namespace = Namespace(bigrams=True)
    prompt = Prompt.of(TOKENS, PAGE, namespace)
    pairs = tuple(token for pair in pairwise(TOKENS) for token in pair)
    event = StoredEvent(Medium.DEVICE, 0, (1, 2, 3), None, pairs[: 3 * 2 * PAGE], PAGE)
    index = heard(event)
    assert prompt.pages_count == 6
    assert (device_pages(index, namespace), device_pages(index)) == (3, 0)


def test_a_block_without_tokens_is_placed_by_what_another_tier_told() -> None:
    first = stored("theirs", PROMPTS[0], range(5), Medium.DEVICE, 0)
    bare = StoredEvent(Medium.STORAGE, 0, first.hashes, None, (), 0)
    index = heard(first, bare, RemovedEvent(Medium.DEVICE, 0, first.hashes))
    (score,) = index.score(TOKENS)
    assert (score.device_pages, score.storage_pages) == (0, 5)


def test_a_page_of_two_stores_is_there_until_both_have_lost_it() -> None:
    keys = PROMPTS[0].keys[:5]
    index = heard(plain(PROMPTS[0], 5, Medium.STORAGE, owner="a"), plain(PROMPTS[0], 5, Medium.STORAGE, owner="b"))
    index.apply("a", [RemovedEvent(Medium.STORAGE, 0, keys, "a")])
    assert index.score(TOKENS)[0].storage_pages == 5
    index.apply("a", [RemovedEvent(Medium.STORAGE, 0, keys, "b")])
    assert index.score(TOKENS)[0].storage_pages == 0


def test_beyond_its_room_the_index_forgets_what_was_told_first() -> None:
    index = heard(plain(PROMPTS[0], 7), pages_max=4)
    assert index.pages_count("a") == 4
    assert index.forgotten_count == 3
    assert device_pages(index) == 0, "the first pages are gone, and no answer counts beyond them"


def test_engines_come_and_go() -> None:
    index = heard(plain(PROMPTS[0], 5))
    index.add_engine("b", EngineTraits(storage="s"))
    index.add_engine("c", EngineTraits(storage="s"))
    for name in "bc":
        index.set_knowledge(name, Knowledge.WHOLE)
    index.apply("b", [plain(PROMPTS[0], 5, Medium.STORAGE)])
    index.apply("c", [plain(PROMPTS[0], 1)])
    assert [score.storage_pages for score in index.score(TOKENS)] == [5, 5, 5]
    assert index.remove_engine("b")
    assert not index.remove_engine("b")
    index.apply("b", [plain(PROMPTS[0], 5)])
    assert [(score.engine, score.storage_pages) for score in index.score(TOKENS)] == [("a", 5), ("c", 1)]
    assert set(index.engines()) == {"a", "c"}


def test_bad_calls_are_refused() -> None:
    index = PrefixIndex()
    with pytest.raises(ConfigError):
        PrefixIndex(0)
    with pytest.raises(InputError):
        index.add_engine("")
    with pytest.raises(ConfigError):
        index.add_engine("a", EngineTraits(spans=(0,)))
    with pytest.raises(TokenError):
        index.score([-1])
