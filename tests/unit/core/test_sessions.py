"""Hints of an engine about its sessions: what goes last then, and for how long."""

import random
from pathlib import Path

import numpy as np
import pytest

from tests.support.cache import WholePromptCache, toy_layout
from tests.support.clock import ManualClock
from tests.support.documents import code_blocks
from tests.support.operations import present
from unified_cache.controller import InlineWorkers
from unified_cache.controller.memory import NoBytes
from unified_cache.core.config import CacheConfig, EvictionConfig, EvictionPolicy
from unified_cache.core.pool import Identity
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import Lock, preferences

ROOT = Path(__file__).resolve().parents[3]
PAGES = 40


class NamedSessions:
    """A cache on the device alone that serves requests with the names of their sessions."""

    def __init__(self, policy: EvictionPolicy = EvictionPolicy.ADAPTIVE, preferred_share: float = 0.25) -> None:
        self.clock = ManualClock()
        layout = toy_layout((SPAN_ALL,), 1)
        eviction = EvictionConfig(device=(policy,), preferred_share=preferred_share)
        config = CacheConfig((PAGES,), (0,), eviction=eviction)
        self.cache = WholePromptCache(layout, config, NoBytes(), InlineWorkers(), Identity("m"), clock=self.clock)

    def begin(self, tokens: list[int], session: str | None = None) -> tuple[list[int], Lock]:
        return tokens, self.cache.lock(self.cache.match(self.cache.prompt(tokens, session=session)))

    def end(self, tokens: list[int], lock: Lock) -> None:
        cache = self.cache
        prompt = cache.prompt(tokens)
        if prompt.pages_count > lock.end:
            slots = present(cache.allocate([np.ones(prompt.pages_count - lock.end, np.bool_)]))
            lock = cache.insert(prompt, slots, lock)
        cache.release(lock)
        cache.check()

    def serve(self, tokens: list[int], session: str | None = None) -> int:
        """Serve a request; return its hits."""
        _, lock = self.begin(tokens, session)
        hits = lock.end
        self.end(tokens, lock)
        return hits

    def held(self, tokens: list[int]) -> int:
        return self.cache._ledger.tree.peek(self.cache.prompt(tokens)).device_end


PROMPTS = [[100 * session + page for page in range(6)] for session in range(6)]


@pytest.mark.parametrize("policy", [EvictionPolicy.LRU, EvictionPolicy.ADAPTIVE, EvictionPolicy.PRIORITY])
def test_a_session_that_comes_back_is_kept_until_the_time_that_was_named(policy: EvictionPolicy) -> None:
    served = NamedSessions(policy)
    for number, prompt in enumerate(PROMPTS):
        served.serve(prompt, f"s{number}")
    assert served.cache.session_returns("s0", within_s=5)
    for number in range(4):
        served.clock.now_s += 1
        served.serve([1_000 * number + 7_000 + page for page in range(30)])
        assert served.held(PROMPTS[0]) == 6
    served.clock.now_s += 1
    served.serve([60_000 + page for page in range(PAGES - 6)])
    assert served.held(PROMPTS[0]) == 0, "there was room beside it, were it kept"


def test_what_was_kept_for_a_session_is_as_other_pages_once_it_is_back() -> None:
    served = NamedSessions(EvictionPolicy.LRU)
    served.serve(PROMPTS[0], "s0")
    assert served.cache.session_returns("s0", within_s=1_000)
    assert served.serve([*PROMPTS[0], 50], "s0") == 6
    served.serve([60_000 + page for page in range(20)])
    served.serve([70_000 + page for page in range(20)])
    assert served.held(PROMPTS[0]) == 0


def test_a_clock_that_jumps_back_takes_back_what_was_said_and_one_that_stands_keeps_a_bounded_share() -> None:
    served = NamedSessions(EvictionPolicy.LRU)
    served.clock.now_s = 100.0
    for number in range(3):
        served.serve(PROMPTS[number], f"s{number}")
    assert [served.cache.session_returns(f"s{number}", within_s=5) for number in range(3)] == [True, False, False]
    served.clock.now_s = 50.0
    served.serve([60_000 + page for page in range(PAGES - 12)])
    assert served.held(PROMPTS[0]) == 0


def test_unknown_names_change_nothing() -> None:
    served = NamedSessions()
    served.serve(PROMPTS[0], "s0")
    assert not served.cache.session_returns("s1", within_s=1)
    served.cache.reset()
    assert not served.cache.session_returns("s0", within_s=1), "a reset forgets sessions"


def test_names_alone_change_no_victim() -> None:
    served = [NamedSessions(), NamedSessions()]
    rng = random.Random(9)
    requests = [
        [rng.randrange(9), *range(rng.randrange(1, 9)), *range(100, 100 + rng.randrange(4))] for _ in range(400)
    ]
    for tokens in requests:
        assert served[0].serve(tokens) == served[1].serve(tokens, f"s{tokens[0]}")


def test_sessions_that_are_known_are_bounded_and_hold_no_tokens_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preferences, "SESSIONS_MAX", 5)
    served = NamedSessions()
    for number in range(60):
        served.serve([100 * number + page for page in range(6)], f"s{number}")
    known = served.cache._ledger.tree._sessions._ends
    assert list(known) == [f"s{number}" for number in range(55, 60)]
    monkeypatch.setattr(preferences, "SESSIONS_MAX", 100)
    for number in range(30):
        served.serve([100 * number + page for page in range(6)], f"s{number}")
    assert all(not node.key for node in known.values() if node.dead)
    assert sum(node.dead for node in known.values()) > 10


def test_the_hints_of_the_document_on_policies_are_taken() -> None:
    served = NamedSessions()
    served.serve(PROMPTS[0], "chat-17")
    text = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    (block,) = [block.text for block in code_blocks(text) if block.text.startswith("prompt = cache.prompt(token_ids")]
    exec(block, {"cache": served.cache, "token_ids": PROMPTS[0]})
    assert served.cache._ledger.tree._sessions._expected.keys() == {"chat-17"}
