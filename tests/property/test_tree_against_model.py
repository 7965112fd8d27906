"""Random histories on the tree and on a naive model; every invariant after every step."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.support.budget import PHASES, examples
from tests.support.components import SPAN_SETS
from tests.support.tree_model import TreeModel
from unified_cache.core.config import EvictionConfig, EvictionPolicy
from unified_cache.core.page import MediaItem, Namespace, Prompt, media_between
from unified_cache.core.pool import Tier

NAMESPACES = (Namespace(), Namespace(extra_key="a"))
TIERS = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
POLICIES = st.lists(st.sampled_from(list(EvictionPolicy)), min_size=3, max_size=3)


class TreeHistory(RuleBasedStateMachine):
    """Prompts over two page contents, often replayed, cut or extended, so that they share and split."""

    @initialize(
        spans=st.sampled_from(SPAN_SETS),
        page_size=st.sampled_from([1, 2, 16, 64]),
        roomy=st.booleans(),
        policies=st.one_of(st.just([]), POLICIES),
    )
    def start(self, spans: tuple[int, ...], page_size: int, roomy: bool, policies: list[EvictionPolicy]) -> None:
        full = 40 if roomy else 14
        windowed = 20 if roomy else 6
        self.model = TreeModel(
            spans,
            page_size,
            {(tier, component): windowed if component else full for tier in Tier for component in range(len(spans))},
            EvictionConfig(
                device=tuple(policies[: len(spans)]),
                host=tuple(policies[::-1][: len(spans)]),
            ),
        )
        self.history: list[Prompt] = []

    def prompt(self, choice: tuple[int, float, list[int], int]) -> Prompt:
        """Return a new prompt or, as often, an old one cut and extended."""
        replay, share, pages, namespace = choice
        size = self.model.page_size
        if replay < len(self.history):
            old = self.history[-1 - replay]
            kept = int(old.pages_count * share)
            head = old.tokens[: kept * size * 4]
            media = {**media_between(old.media, 0, kept), **self.media(kept, pages[:3])}
            return Prompt(head + b"".join(self.page(p) for p in pages[:3]), size, old.seed, media=media)
        tokens = b"".join(self.page(p) for p in pages)
        return Prompt(tokens, size, NAMESPACES[namespace].seed, media=self.media(0, pages))

    def page(self, content: int) -> bytes:
        """Return a page of text, or of placeholders: those of contents 1 and 2 are the same."""
        return b"".join((min(content, 1) * 100 + i).to_bytes(4, "little") for i in range(self.model.page_size))

    def media(self, first: int, pages: list[int]) -> dict[int, tuple[MediaItem, ...]]:
        """Return what stands behind the pages of content 2, and of no other."""
        size = self.model.page_size
        return {page: (MediaItem(page * size, size, "cat"),) for page, each in enumerate(pages, first) if each == 2}

    PROMPTS = st.tuples(
        st.integers(0, 8),
        st.sampled_from([0.5, 0.75, 1.0, 1.0]),
        st.lists(st.integers(0, 2), min_size=0, max_size=8),
        st.sampled_from([0, 0, 0, 1]),
    )

    @rule(choice=PROMPTS)
    def match(self, choice: tuple[int, float, list[int], int]) -> None:
        self.model.match(self.prompt(choice))

    @rule(
        choice=PROMPTS,
        reuse=st.booleans(),
        floors=st.lists(st.integers(0, 6), min_size=2, max_size=2),
        priority=st.integers(-1, 2),
    )
    def insert(self, choice: tuple[int, float, list[int], int], reuse: bool, floors: list[int], priority: int) -> None:
        prompt = self.prompt(choice)
        self.history.append(prompt)
        self.model.insert(prompt, reuse, floors, priority)

    @rule(choice=PROMPTS, tier=TIERS, share=st.sampled_from([0.5, 1.0]))
    def lock(self, choice: tuple[int, float, list[int], int], tier: Tier, share: float) -> None:
        self.model.lock(self.prompt(choice), tier, share)

    @precondition(lambda self: self.model.held)
    @rule(which=st.integers(0, 20))
    def unlock(self, which: int) -> None:
        self.model.unlock(self.model.held[which % len(self.model.held)])

    @precondition(lambda self: self.model.held)
    @rule(which=st.integers(0, 20))
    def release_windows(self, which: int) -> None:
        self.model.tree.release_windows(self.model.held[which % len(self.model.held)].lock)

    @rule(tier=TIERS, component=st.integers(0, 2), count=st.sampled_from([1, 2, 3, 5, 40]))
    def evict(self, tier: Tier, component: int, count: int) -> None:
        self.model.evict(tier, component % len(self.model.spans), count)

    @rule(choice=PROMPTS)
    def begin_backup(self, choice: tuple[int, float, list[int], int]) -> None:
        self.model.begin(self.prompt(choice), Tier.DEVICE, Tier.HOST)

    @rule(choice=PROMPTS)
    def begin_load(self, choice: tuple[int, float, list[int], int]) -> None:
        self.model.begin(self.prompt(choice), Tier.HOST, Tier.DEVICE)

    @precondition(lambda self: self.model.moving)
    @rule(which=st.integers(0, 20), ok=st.sampled_from([True, True, True, False]))
    def finish(self, which: int, ok: bool) -> None:
        self.model.finish(self.model.moving[which % len(self.model.moving)], ok)

    @rule(choice=PROMPTS, floors=st.lists(st.integers(0, 6), min_size=2, max_size=2))
    def graft(self, choice: tuple[int, float, list[int], int], floors: list[int]) -> None:
        self.model.graft(self.prompt(choice), floors)

    @invariant()
    def sound(self) -> None:
        if "model" in vars(self):
            self.model.verify()

    def teardown(self) -> None:
        """Let everything go; evict everything; nothing may be left, not even a root."""
        if "model" not in vars(self):
            return
        model = self.model
        while model.moving:
            model.finish(model.moving[0], ok=len(model.moving) % 2 == 0)
        while model.held:
            model.unlock(model.held[0])
        for tier in Tier:
            model.evict(tier, 0, 10**6)
        model.verify()
        assert not model.tree.roots


@pytest.mark.timeout(1800)
def test_random_histories_agree_with_the_model_at_every_step() -> None:
    run_machine(
        TreeHistory,
        settings=settings(
            max_examples=examples(200, 2000),
            stateful_step_count=50,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
