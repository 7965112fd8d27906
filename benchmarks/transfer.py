"""Time to first token under each transfer policy, with storage slowed to shares of the rate that breaks even.

That is the rate at which reading a prefix takes as long as computing it: the prefix's bytes by the time that this
machine takes to compute it, which is measured first. The policies take turns, each with a cache and a store of its own;
before each turn device and host are empty. ``fastest`` has served some shorter prompts and some that nobody has, as any
engine that runs has: it is told no speed.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from time import perf_counter_ns

import numpy as np

from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved
from benchmarks.plan import BenchmarkPlan
from benchmarks.ttft import VOCABULARY, prompts_sharing, small_model
from unified_cache import CacheConfig, Identity, UnifiedCache
from unified_cache.config import WritePolicy
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, PageIO
from unified_cache.transfer_policy import TransferPolicy

__all__ = ["transfer_figures"]

PREFIX_TOKENS = 1024
PAGES = 64
"""Pages that device and host have room for each."""

SHARES = (0.1, 0.3, 1.0, 3.0)
"""Of the break-even rate."""

RATIO_MAX = 1.05
"""Largest accepted time under ``fastest``, as a share of the better of the other two."""

OVERLAPPED = "fastest, head computed meanwhile"

LEARNED_TOKENS = (128, 256, 512, 768)
SETTLE_S = 120.0


class SlowedStorage(MemoryStorage):
    """Memory whose reads take at least a time for each byte."""

    def __init__(self, byte_s: float) -> None:
        super().__init__()
        self._byte_s = byte_s

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read, and wait until the time for these bytes is over."""
        began_s = time.monotonic()
        answers = super().get(pages)
        read_bytes = sum(len(buffer) for page in pages for buffer in page.buffers)
        time.sleep(max(0.0, began_s + self._byte_s * read_bytes - time.monotonic()))
        return answers


def transfer_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Time the first token under each policy, at each share of the break-even rate."""
    kept = small_model()
    prompts = prompts_sharing(PREFIX_TOKENS)
    with ExitStack() as open_until_done:
        computing = _engine(kept, TransferPolicy.NEVER, 0.0, open_until_done, overlaps=False)
        _first_token_ns(computing, next(prompts))
        computed_s = statistics.median(_first_token_ns(computing, next(prompts)) for _ in range(3)) / 1e9
    prefix_bytes = kept.layout.page_bytes * PREFIX_TOKENS // kept.layout.page_size
    for share in SHARES:
        byte_s = computed_s / prefix_bytes / share
        with ExitStack() as open_until_done:
            engines = {
                policy.value: _engine(kept, policy, byte_s, open_until_done, overlaps=False)
                for policy in TransferPolicy
            }
            engines[OVERLAPPED] = _engine(kept, TransferPolicy.FASTEST, byte_s, open_until_done, overlaps=True)
            for engine in engines.values():
                _store_prefix(engine, next(prompts))
            _learn(engines[TransferPolicy.FASTEST.value], next(prompts))
            subjects = [_subject(engine, prompts) for engine in engines.values()]
            taken = interleaved(subjects, plan.effort.ttft_rounds)
        spreads = {name: Spread.of([ns / 1e6 for ns in values]) for name, values in zip(engines, taken, strict=True)}
        better = min(spreads[policy.value].median for policy in (TransferPolicy.ALWAYS, TransferPolicy.NEVER))
        section = f"TTFT by transfer policy, {PREFIX_TOKENS:,} tokens stored, read at {share:g} of break-even"
        note = f"break-even at {prefix_bytes / computed_s / 2**20:.0f} MiB/s"
        for name, spread in spreads.items():
            held = Comparison("the better of always and never", better, spread.median / better, at_most=RATIO_MAX)
            compared = (held,) if name in (TransferPolicy.FASTEST.value, OVERLAPPED) else ()
            yield Figure(section, name, "ms", spread, compared, note=note)


def _engine(
    kept: KeptState, policy: TransferPolicy, byte_s: float, until: ExitStack, *, overlaps: bool
) -> PrefixCachedModel:
    config = CacheConfig((PAGES,), (PAGES,), write=WritePolicy.ON_CALL, guard=None, transfer=policy)
    pages = kept.allocate(config.device_pages)
    store = SlowedStorage(byte_s)
    cache = until.enter_context(
        UnifiedCache.open(kept.layout, config, pages.pools, identity=Identity("transfer"), storage=store)
    )
    return PrefixCachedModel(kept.model, cache, pages, overlaps=overlaps)


def _store_prefix(engine: PrefixCachedModel, prompt: list[int]) -> None:
    engine.prefill(prompt).finish()
    engine.cache.backup(engine.cache.prompt(prompt[:PREFIX_TOKENS]))
    engine.cache.wait_all(SETTLE_S)


def _learn(engine: PrefixCachedModel, prompt: list[int]) -> None:
    """Have an engine serve prompts that storage has the most of, and others that nobody has."""
    random = np.random.default_rng(9)
    for tokens in (*LEARNED_TOKENS, *LEARNED_TOKENS, PREFIX_TOKENS):
        engine.cache.reset()
        engine.prefill([*prompt[:tokens], *prompt[-8:]]).finish()
        engine.cache.reset()
        engine.prefill(random.integers(0, VOCABULARY, tokens).tolist()).finish()


def _subject(engine: PrefixCachedModel, prompts: Iterator[list[int]]) -> Subject:
    return lambda: _first_token_ns(engine, next(prompts))


def _first_token_ns(engine: PrefixCachedModel, prompt: list[int]) -> int:
    """Return the nanoseconds until the first token of an answer is known, from an empty device and host."""
    engine.cache.wait_all(SETTLE_S)
    engine.cache.reset()
    started = perf_counter_ns()
    with engine.prefill(prompt) as sequence:
        assert sequence.logits is not None
        int(sequence.logits.argmax())
        return perf_counter_ns() - started
