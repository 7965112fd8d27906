""" "Bit-exact", as scenarios that any store can be put under: a restored prefix, and one never evicted.

The comparison runs the same stock model over its own untouched cache object, in the same chunks, without any code of
ours; then both go on for ``STEPS`` greedy tokens. All logits on the way must be equal, bit by bit.
"""

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from multiprocessing import get_context

import torch
from transformers import DynamicCache, PreTrainedModel

from tests.support.budget import examples
from unified_cache import CacheConfig, Identity, Retention, UnifiedCache, open_storage
from unified_cache.controller import Workers
from unified_cache.core.config import WritePolicy
from unified_cache.core.pool import Hits
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel, Sequence, Stage
from unified_cache.integrations.transformers.pages import logits_of
from unified_cache.testing.tiny_models import TINY_MODELS, VOCABULARY, tiny_model

FAMILIES = tuple(TINY_MODELS)
STEPS_MAX = 64
"""Greedy tokens after a prompt where they are the point: more than any window holds of small pages."""
STEPS = examples(12, STEPS_MAX)
"""The same elsewhere: within them any flipped bit shows, and a page is filled that a prompt began."""
MISSING_TOKENS = 7
"""Tokens that the last page of an unaligned prompt lacks: fewer than ``STEPS``; no group of rows ends there."""
PAGES = 4
"""Whole pages of a prompt: more than any window touches."""
ROOMY, TIGHT = 40, 7
"""Pages of a tier that holds every prompt of a scenario, and of one that holds about one."""
SETTLE_S = 30.0
PROCESS_TIMEOUT_S = 240
EVERYWHERE = Retention(tail_tokens=1 << 20)
"""States and windows at every page boundary."""


@dataclass(frozen=True)
class L3:
    """A store to run scenarios over. Whoever makes one sees to it that the URL can be opened while it is in use."""

    url: str
    is_shared: bool
    """Whether another process finds what this one stored, and a reopened store what the closed one held."""


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of the tiers, and what is kept."""

    device_pages: int = ROOMY
    host_pages: int = ROOMY
    retention: Retention = field(default_factory=Retention)
    chunk_pages: int = 1


@cache
def model_of(family: str) -> PreTrainedModel:
    torch.set_num_threads(1)  # how a sum is split among threads shows in its last bits
    return tiny_model(family)


@cache
def kept_by(family: str) -> KeptState:
    return KeptState.of(model_of(family), TINY_MODELS[family].page_size)


def page_size_of(family: str) -> int:
    return TINY_MODELS[family].page_size


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def prompt_of(family: str, seed: int, *, is_aligned: bool) -> tuple[int, ...]:
    page_size = page_size_of(family)
    return tokens_of(seed, PAGES * page_size + (0 if is_aligned else page_size - MISSING_TOKENS))


@contextmanager
def engine(
    family: str, l3: L3 | None = None, shape: CacheSizes = CacheSizes(), workers: Workers | None = None
) -> Iterator[PrefixCachedModel]:
    kept = kept_by(family)
    components = len(kept.layout.components)
    config = CacheConfig(
        device_pages=(shape.device_pages,) * components,
        host_pages=(shape.host_pages,) * components,
        retention=shape.retention,
        write=WritePolicy.THROUGH,
    )
    pages = kept.allocate(config.device_pages)
    storage = None if l3 is None else open_storage(l3.url)
    with UnifiedCache.open(
        kept.layout, config, pages.pools, identity=Identity(family), storage=storage, workers=workers
    ) as opened:
        chunk_tokens = shape.chunk_pages * kept.layout.page_size
        yield PrefixCachedModel(model_of(family), opened, pages, chunk_tokens=chunk_tokens)


# ---- the model's own cache -----------------------------------------------------------------------------------


def forward(family: str, past: DynamicCache, tokens: tuple[int, ...]) -> torch.Tensor:
    return logits_of(model_of(family), past, torch.tensor([tokens]))


def new_past(family: str) -> DynamicCache:
    return DynamicCache(config=model_of(family).config)


def page_ends(family: str, count: int, start: int = 0) -> list[int]:
    """Return ``start``, every page boundary after it, and the end of a prompt of ``count`` tokens."""
    return sorted({*range(start, count, page_size_of(family)), count})


def run_on(
    family: str, past: DynamicCache, tokens: tuple[int, ...], ends: list[int], steps: int = STEPS
) -> list[torch.Tensor]:
    """Compute the chunks of a prompt that end at ``ends``, the first of them where ``past`` does; go on greedily."""
    for start, end in pairwise(ends):
        logits = forward(family, past, tokens[start:end])
    return greedily(logits, lambda token: forward(family, past, (token,)), steps)


def greedily(logits: torch.Tensor, feed: Callable[[int], torch.Tensor], steps: int) -> list[torch.Tensor]:
    """Feed a model its own greedy tokens, from those logits on; return all logits."""
    found = [logits]
    for _ in range(steps):
        found.append(feed(int(found[-1].argmax())))
    return found


@cache
def _untouched(family: str, tokens: tuple[int, ...]) -> tuple[DynamicCache, list[torch.Tensor]]:
    """Return the model's own cache of a prompt, and its logits so far, which more steps are added to."""
    past = new_past(family)
    return past, run_on(family, past, tokens, page_ends(family, len(tokens)), 0)


def untouched(family: str, tokens: tuple[int, ...], steps: int = STEPS) -> list[torch.Tensor]:
    """Return the logits of a prompt's last token and of every greedy token after it."""
    past, found = _untouched(family, tokens)
    while len(found) <= steps:
        found.append(forward(family, past, (int(found[-1].argmax()),)))
    return found[: steps + 1]


def is_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Compare logits bit by bit, and with them what is greedily chosen."""
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# ---- ours ----------------------------------------------------------------------------------------------------


def go_on(sequence: Sequence, steps: int = STEPS) -> list[torch.Tensor]:
    """Feed a request that is ready its own greedy tokens; return all logits."""
    assert sequence.logits is not None
    return greedily(sequence.logits, sequence.feed, steps)


def serve(engine: PrefixCachedModel, tokens: tuple[int, ...]) -> None:
    """Leave a prompt in the cache, and all that is written of it where it belongs."""
    engine.prefill(tokens).finish()
    engine.cache.wait_all(SETTLE_S)


def assert_at_rest(engine: PrefixCachedModel) -> None:
    """Once all that was begun has ended, nothing is locked and every slot is free or the tree's."""
    cache = engine.cache
    cache.wait_all(SETTLE_S)
    cache.check()
    assert not cache._locks
    assert not any(lane.out for lane in cache.stats().occupancy)


def serve_exactly(engine: PrefixCachedModel, family: str, tokens: tuple[int, ...], steps: int = STEPS) -> Hits:
    """Serve a prompt and go on; every bit must be what the untouched cache gives. Return what was reused."""
    sequence = engine.prefill(tokens)
    assert is_equal(go_on(sequence, steps), untouched(family, tokens, steps))
    sequence.abort()
    engine.cache.wait_all(SETTLE_S)
    engine.cache.check()
    assert sequence.computed_tokens + sequence.reused.total == len(tokens)
    return sequence.reused


def crowd_out(engine: PrefixCachedModel, family: str) -> None:
    """Serve other prompts until tight tiers hold nothing else.

    Where storage has them already, what the device evicts for the second is copied to a host that is evicting, too.
    """
    for seed in (901, 902, 903):
        serve(engine, prompt_of(family, seed, is_aligned=False))


def all_but_last(tokens: tuple[int, ...], family: str) -> int:
    """Return the most tokens of a prompt that can be reused: whole pages, and not the last token."""
    return (len(tokens) - 1) // page_size_of(family) * page_size_of(family)


# ---- scenarios without a store -------------------------------------------------------------------------------


def from_the_device(family: str, *, is_aligned: bool) -> None:
    tokens = prompt_of(family, 1, is_aligned=is_aligned)
    with engine(family) as ours:
        assert serve_exactly(ours, family, tokens, 1) == Hits()
        assert serve_exactly(ours, family, tokens, STEPS_MAX) == Hits(device=all_but_last(tokens, family))


def from_the_host(family: str, *, is_aligned: bool) -> None:
    tokens = prompt_of(family, 1, is_aligned=is_aligned)
    with engine(family, shape=CacheSizes(device_pages=TIGHT)) as ours:
        serve(ours, tokens)
        crowd_out(ours, family)
        reused = serve_exactly(ours, family, tokens)
        assert reused.total == reused.host == all_but_last(tokens, family)


def inside_a_longer_prefix(family: str, *, is_aligned: bool) -> None:
    shared = 2 * page_size_of(family)
    tokens = prompt_of(family, 1, is_aligned=True)[:shared] + prompt_of(family, 2, is_aligned=is_aligned)[shared:]
    with engine(family, shape=CacheSizes(retention=EVERYWHERE)) as ours:
        serve(ours, prompt_of(family, 1, is_aligned=is_aligned))
        assert serve_exactly(ours, family, tokens) == Hits(device=shared)


def after_a_branch(family: str, *, is_aligned: bool) -> None:
    """The second visitor of a branch leaves there what the third one needs."""
    shared = 3 * page_size_of(family)
    prompts = [prompt_of(family, seed, is_aligned=is_aligned) for seed in (1, 2, 3)]
    first, second, third = (prompts[0][:shared] + prompt[shared:] for prompt in prompts)
    with engine(family) as ours:
        serve(ours, first)
        serve_exactly(ours, family, second, 1)
        assert serve_exactly(ours, family, third) == Hits(device=shared)


def the_next_turn(family: str, *, is_aligned: bool) -> None:
    """A turn goes on from pages that decoding filled, whose state was captured between two tokens."""
    page_size = page_size_of(family)
    tokens = prompt_of(family, 1, is_aligned=is_aligned)
    past = new_past(family)
    for start, end in pairwise(page_ends(family, len(tokens))):
        token = int(forward(family, past, tokens[start:end]).argmax())
    boundary, spoken = past, list(tokens)
    for _ in range(page_size - len(tokens) % page_size + 1):
        spoken.append(token)
        token = int(forward(family, past, (token,)).argmax())
        if len(spoken) % page_size == 0:
            boundary = copy.deepcopy(past)
    turn = (*spoken, token, *tokens_of(7, page_size))
    resumed = len(spoken) // page_size * page_size

    with engine(family) as ours:
        generation = ours.generate(tokens, tokens_max=len(spoken) - len(tokens) + 1)
        assert [*tokens, *generation] == [*spoken, token]
        with ours.prefill(turn) as sequence:
            assert sequence.reused == Hits(device=resumed)
            expected = run_on(family, boundary, turn, page_ends(family, len(turn), resumed))
            assert is_equal(go_on(sequence), expected)
        ours.cache.check()


def in_larger_chunks(family: str, *, is_aligned: bool) -> None:
    """What is kept does not depend on how a prefill is cut, and a resume is exact from wherever it may begin."""
    page_size = page_size_of(family)
    tokens = prompt_of(family, 1, is_aligned=is_aligned)
    with engine(family, shape=CacheSizes(chunk_pages=3)) as ours:
        cold = chunk_ends(ours, tokens[: 2 * page_size + 1])
        assert cold[-2:] == [2 * page_size, 2 * page_size + 1]
        rest = chunk_ends(ours, tokens)
        with ours.prefill(tokens) as sequence:
            resumed = sequence.reused.total
            found = go_on(sequence)
        ends = [0, *cold[:-1], *(end for end in rest if end <= resumed), len(tokens)]
        assert is_equal(found, run_on(family, new_past(family), tokens, ends))
        assert resumed == all_but_last(tokens, family)


def chunk_ends(engine: PrefixCachedModel, tokens: tuple[int, ...]) -> list[int]:
    """Serve a prompt; return where each chunk that was computed ended."""
    ends: list[int] = []
    with engine.start(tokens) as sequence:
        while (stage := sequence.step()) is not Stage.READY:
            if stage is Stage.COMPUTE:
                ends.append(sequence.reused.total + sequence.computed_tokens)
    engine.cache.wait_all(SETTLE_S)
    return ends


Scenario = Callable[..., None]

MEMORY_SCENARIOS: tuple[Scenario, ...] = (
    from_the_device,
    from_the_host,
    inside_a_longer_prefix,
    after_a_branch,
    the_next_turn,
    in_larger_chunks,
)


# ---- scenarios over a store ----------------------------------------------------------------------------------


def from_storage(family: str, l3: L3, *, is_aligned: bool) -> None:
    tokens = prompt_of(family, 1, is_aligned=is_aligned)
    with engine(family, l3, CacheSizes(device_pages=TIGHT, host_pages=TIGHT)) as ours:
        serve(ours, tokens)
        crowd_out(ours, family)
        reused = serve_exactly(ours, family, tokens)
        assert reused.total == reused.storage == all_but_last(tokens, family)


def from_memory_and_storage(family: str, l3: L3, *, is_aligned: bool) -> None:
    """Memory has where the prompt begins, storage alone how it goes on."""
    tokens = prompt_of(family, 1, is_aligned=is_aligned)
    head = tokens[: 2 * page_size_of(family) + 1]
    with engine(family, l3) as ours:
        serve(ours, tokens)
        ours.cache.reset()
        serve(ours, head)
        in_memory = len(head) - 1
        in_storage = all_but_last(tokens, family) - in_memory
        assert serve_exactly(ours, family, tokens) == Hits(device=in_memory, storage=in_storage)


def after_a_restart(family: str, l3: L3, *, is_aligned: bool) -> None:
    tokens = prompt_of(family, 1, is_aligned=is_aligned)
    with engine(family, l3) as ours:
        serve(ours, tokens)
    with engine(family, l3) as ours:
        assert serve_exactly(ours, family, tokens) == Hits(storage=all_but_last(tokens, family))


STORAGE_SCENARIOS: tuple[Scenario, ...] = (from_storage, from_memory_and_storage)
SHARED_STORAGE_SCENARIOS: tuple[Scenario, ...] = (after_a_restart,)
"""For stores whose pages outlive the process that stored them."""


# ---- another process -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptResult:
    """Result of a process for a prompt."""

    logits_digest: str
    storage_tokens: int


def digest(logits: list[torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for each in logits:
        hashed.update(each.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def outcome_of(family: str, l3: L3, tokens: tuple[int, ...]) -> PromptResult:
    with engine(family, l3) as ours, ours.prefill(tokens) as sequence:
        return PromptResult(digest(go_on(sequence)), sequence.reused.storage)


def outcomes(url: str) -> Mapping[str, PromptResult]:
    """Serve every family's prompt from what the store holds."""
    return {
        family: outcome_of(family, L3(url, is_shared=True), prompt_of(family, 1, is_aligned=False))
        for family in FAMILIES
    }


def resumes_in_a_fresh_process(l3: L3) -> None:
    """Serve a prompt of every family here; a process that never saw them goes on from the store alone, bit by bit."""
    prompts = {family: prompt_of(family, 1, is_aligned=False) for family in FAMILIES}
    for family, tokens in prompts.items():
        with engine(family, l3) as ours:
            serve(ours, tokens)
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        found = fresh.submit(outcomes, l3.url).result(PROCESS_TIMEOUT_S)
    assert found == {
        family: PromptResult(digest(untouched(family, tokens)), all_but_last(tokens, family))
        for family, tokens in prompts.items()
    }
