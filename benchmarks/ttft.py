"""Time to first token of a prompt whose first 4,096 tokens a tier holds, against computing all of it.

The model is a stock one of random weights, large enough that computing the prefix takes a second or more, with 16 KiB
of KV a token. Recomputing and the tiers take turns; before each turn the prefix lies in the tier that is measured and
in none above it. Every question is another one, so nothing but the prefix is shared.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from tempfile import TemporaryDirectory
from time import perf_counter_ns

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved
from benchmarks.plan import BenchmarkPlan
from unified_cache import CacheConfig, Identity, UnifiedCache, open_storage
from unified_cache.core.config import WritePolicy
from unified_cache.core.hits import Hits
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel

PREFIX_TOKENS = 4096
QUESTION_TOKENS = 32
PAGE_SIZE = 64
VOCABULARY = 4096
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=8192,
)
KV_BYTES_MIN = 16 << 10
"""Smallest KV of one token, in all layers."""
RECOMPUTE_S_MIN = 1.0
DEVICE_PAGES, HOST_PAGES = 96, 1024
SETTLE_S = 60.0

RATIOS_MAX = {"L1": 0.10, "L2": 0.12, "file L3": 0.25}
"""Largest accepted time from each tier, as a share of the time that recomputing takes."""


def ttft_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Time the first token from each tier."""
    with ExitStack() as open_until_done, TemporaryDirectory(dir=plan.storage_dir) as directory:
        kept = small_model()
        cold = _engine(kept, None, open_until_done)
        warm = _engine(kept, f"file:{directory}", open_until_done)
        prompts = prompts_sharing(PREFIX_TOKENS)
        warm.prefill(next(prompts)).finish()
        subjects: dict[str, Subject] = {
            "recompute": lambda: _recomputed(cold, next(prompts)),
            "L1": lambda: _from_device(warm, next(prompts)),
            "L2": lambda: _from_host(warm, next(prompts)),
            "file L3": lambda: _from_storage(warm, next(prompts)),
        }
        taken = interleaved(list(subjects.values()), plan.effort.ttft_rounds)
    spreads = [Spread.of([ns / 1e6 for ns in values]) for values in taken]
    recompute = spreads[0].median
    section = f"TTFT, {PREFIX_TOKENS:,} of {PREFIX_TOKENS + QUESTION_TOKENS:,} tokens shared"
    note = f"{kept.layout.page_bytes / PAGE_SIZE / 1024:g} KiB of KV a token, {torch.get_num_threads()} threads"
    at_least = Comparison("a second", 1e3, recompute / 1e3, at_least=RECOMPUTE_S_MIN)
    yield Figure(section, "recompute", "ms", spreads[0], (at_least,), note=note)
    for name, spread in zip(list(subjects)[1:], spreads[1:], strict=True):
        held = Comparison("recompute", recompute, spread.median / recompute, at_most=RATIOS_MAX[name])
        yield Figure(section, f"from {name}", "ms", spread, (held,))


def small_model() -> KeptState:
    """Return the model, of the same random weights each time, with the layout of what it keeps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(CONFIG).train(mode=False)
    kept = KeptState.of(model, PAGE_SIZE)
    assert kept.layout.page_bytes >= KV_BYTES_MIN * PAGE_SIZE
    return kept


def _engine(kept: KeptState, storage: str | None, until: ExitStack) -> PrefixCachedModel:
    host_pages = HOST_PAGES if storage else 0
    config = CacheConfig((DEVICE_PAGES,), (host_pages,), write=WritePolicy.THROUGH if storage else WritePolicy.ON_CALL)
    pages = kept.allocate(config.device_pages)
    store = open_storage(storage) if storage else None
    cache = until.enter_context(
        UnifiedCache.open(kept.layout, config, pages.pools, identity=Identity("ttft"), storage=store)
    )
    return PrefixCachedModel(kept.model, cache, pages)


def prompts_sharing(prefix_tokens: int) -> Iterator[list[int]]:
    """Yield prompts that share their first tokens and end in a question of their own."""
    prefix = np.random.default_rng(0).integers(0, VOCABULARY, prefix_tokens).tolist()
    for seed in count(1):
        yield prefix + np.random.default_rng(seed).integers(0, VOCABULARY, QUESTION_TOKENS).tolist()


def _recomputed(engine: PrefixCachedModel, prompt: list[int]) -> int:
    engine.cache.reset()
    return _timed(engine, prompt, Hits())


def _from_device(engine: PrefixCachedModel, prompt: list[int]) -> int:
    engine.cache.wait_all(SETTLE_S)
    return _timed(engine, prompt, Hits(device=PREFIX_TOKENS))


def _from_host(engine: PrefixCachedModel, prompt: list[int]) -> int:
    engine.cache.wait_all(SETTLE_S)
    taken = engine.cache.allocate([np.ones(DEVICE_PAGES, np.bool_)])
    assert taken is not None
    engine.cache.free(taken)
    return _timed(engine, prompt, Hits(host=PREFIX_TOKENS))


def _from_storage(engine: PrefixCachedModel, prompt: list[int]) -> int:
    engine.cache.wait_all(SETTLE_S)
    engine.cache.reset()
    return _timed(engine, prompt, Hits(storage=PREFIX_TOKENS))


def _timed(engine: PrefixCachedModel, prompt: list[int], expected: Hits) -> int:
    """Return the nanoseconds until the first token of an answer is known."""
    started = perf_counter_ns()
    with engine.prefill(prompt) as sequence:
        assert sequence.logits is not None
        int(sequence.logits.argmax())
        elapsed = perf_counter_ns() - started
        assert sequence.reused == expected, f"expected {expected}, found {sequence.reused}"
    return elapsed
