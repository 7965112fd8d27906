"""The clairvoyant bound is what the best choice of pages to keep would hit, found by trying them all."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan.traces import conversations
from unified_cache.sizing.plan.clairvoyant import FutureUses
from unified_cache.sizing.plan.lru_stack import LruStack
from unified_cache.sizing.plan.trace_pages import TracePages
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest

Path = tuple[int, ...]


def best_hits(prompts: list[Path], memory_pages: int) -> int:
    """Try every set of pages that could be kept after every request; hits are whole prefixes."""
    reached: dict[frozenset[Path], int] = {frozenset(): 0}
    for prompt in prompts:
        pages = [prompt[: end + 1] for end in range(len(prompt))]
        after: dict[frozenset[Path], int] = {}
        for kept, hits in reached.items():
            end = next((index for index, page in enumerate(pages) if page not in kept), len(pages))
            there = sorted(kept | set(pages))
            for left in combinations(there, min(memory_pages, len(there))):  # to keep more never hurts
                state = frozenset(left)
                after[state] = max(after.get(state, 0), hits + end)
        reached = after
    return max(reached.values())


def trace_of(prompts: list[Path]) -> TracePages:
    """Number prefixes, as the ids of a trace do."""
    numbers: dict[Path, int] = {}
    requests = [
        TraceRequest(
            float(at),
            len(prompt) * BLOCK_TOKENS,
            1,
            tuple(numbers.setdefault(prompt[: end + 1], len(numbers)) for end in range(len(prompt))),
        )
        for at, prompt in enumerate(prompts)
    ]
    return TracePages.of(requests, BLOCK_TOKENS, padded=True)


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.integers(0, 4))
def test_the_bound_is_that_of_trying_everything(prompts: list[Path], memory_pages: int) -> None:
    told = int(FutureUses.of(trace_of(prompts)).ends(memory_pages).sum())
    assert told == best_hits(prompts, memory_pages)


def test_no_size_of_lru_exceeds_it_and_all_memory_reaches_the_same() -> None:
    trace = TracePages.of(conversations(seed=5, count=150, sessions=12), 128, padded=False)
    future, stack = FutureUses.of(trace), LruStack.of(trace)
    sizes = (0, 1, 10, 50, 200, 1000, trace.distinct_count)
    pairs = [(stack.hit_pages(size), int(future.ends(size).sum())) for size in sizes]
    assert all(lru <= bound for lru, bound in pairs)
    assert any(lru < bound for lru, bound in pairs)
    assert pairs[-1][0] == pairs[-1][1]
