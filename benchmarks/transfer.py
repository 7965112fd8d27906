"""Time to first token under each transfer policy, with storage slowed to shares of the rate that breaks even.

That is the rate at which reading a prefix takes as long as computing it: the prefix's bytes by the time that this
machine takes to compute it, which is measured first. The policies take turns, each with a cache and a store of its own;
before each turn device and host are empty. ``fastest`` has served some shorter prompts and some that nobody has, as any
engine that runs has: it is told no speed.

The engine has one thread and goes by ``WorkTime``, so that other work on the machine makes nothing slower: what is
compared are the times of one round, and the figure is the median of their ratios.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from threading import Lock

import numpy as np

from benchmarks.measure import Comparison, Figure, Spread, Subject, interleaved
from benchmarks.plan import BenchmarkPlan
from benchmarks.ttft import VOCABULARY, prompts_sharing, small_model
from tests.support.one_thread import one_thread
from unified_cache import CacheConfig, Identity, UnifiedCache
from unified_cache.controller import ThreadWorkers
from unified_cache.controller.memory import TieredMemory
from unified_cache.core.config import TransferPolicy, WritePolicy
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, PageIO

__all__ = ["transfer_figures"]

PREFIX_TOKENS = 1024
PAGES = 64
"""Pages that device and host have room for each."""

SHARES = (0.1, 0.3, 1.0, 3.0)
"""Of the break-even rate."""

RATIO_MAX = 1.05
"""Largest accepted time under ``fastest``, as a share of the better of the other two."""

FIXED = (TransferPolicy.ALWAYS.value, TransferPolicy.NEVER.value)
"""What others are held against."""

LEARNED_TOKENS = (128, 256, 512, 768)
SETTLE_S = 120.0


class WorkTime:
    """Time that passes while this process computes, and by whatever is waited for: that of a machine left alone.

    Nothing sleeps. What runs on two threads at once takes the sum of both.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._waited_s = 0.0

    def now(self) -> float:
        """Return the seconds since some moment."""
        with self._guard:
            return time.process_time() + self._waited_s

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        with self._guard:
            self._waited_s += seconds


class SlowedStorage(MemoryStorage):
    """Memory whose reads take at least a time for each byte."""

    def __init__(self, byte_s: float, engine_time: WorkTime) -> None:
        super().__init__()
        self._byte_s = byte_s
        self._time = engine_time

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read, and wait until the time for these bytes is over."""
        began_s = self._time.now()
        answers = super().get(pages)
        read_bytes = sum(len(buffer) for page in pages for buffer in page.buffers)
        self._time.wait(max(0.0, began_s + self._byte_s * read_bytes - self._time.now()))
        return answers


def transfer_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Time the first token under each policy, at each share of the break-even rate."""
    with one_thread():
        yield from _compared(WorkTime(), plan.effort.transfer_rounds)


def _compared(engine_time: WorkTime, rounds: int) -> Iterator[Figure]:
    """Time the first token under each policy, and compare ``fastest`` with the better of the others."""
    kept = small_model()
    prompts = prompts_sharing(PREFIX_TOKENS)
    with ExitStack() as open_until_done:
        never = _engine(kept, TransferPolicy.NEVER, 0.0, engine_time, open_until_done)
        times_ns = [_first_token_ns(never, engine_time, next(prompts)) for _ in range(4)]
        computed_s = statistics.median(times_ns[1:]) / 1e9
    prefix_bytes = kept.layout.page_bytes * PREFIX_TOKENS // kept.layout.page_size
    for share in SHARES:
        with ExitStack() as open_until_done:
            byte_s = computed_s / prefix_bytes / share
            subjects: dict[str, Subject] = {}
            for policy in TransferPolicy:
                engine = _engine(kept, policy, byte_s, engine_time, open_until_done)
                _store_prefix(engine, next(prompts))
                if policy is TransferPolicy.FASTEST:
                    _learn(engine, next(prompts))
                subjects[policy.value] = _subject(engine, engine_time, prompts)
            taken = dict(zip(subjects, interleaved(list(subjects.values()), rounds), strict=True))
        better = min(FIXED, key=lambda name: statistics.median(taken[name]))
        section = f"TTFT by transfer policy, {PREFIX_TOKENS:,} tokens stored, read at {share:g} of break-even"
        note = f"break-even at {prefix_bytes / computed_s / 2**20:.0f} MiB/s; {type(engine_time).__name__}"
        for name, values in taken.items():
            held = _held(values, taken[better])
            compared = () if name in FIXED else (held,)
            yield Figure(section, name, "ms", Spread.of([ns / 1e6 for ns in values]), compared, note=note)


def _held(values: Sequence[int], better: Sequence[int]) -> Comparison:
    """Compare times with those of the same rounds."""
    ratio = statistics.median(each / other for each, other in zip(values, better, strict=True))
    return Comparison("the better of always and never", statistics.median(better) / 1e6, ratio, at_most=RATIO_MAX)


def _engine(
    kept: KeptState, policy: TransferPolicy, byte_s: float, engine_time: WorkTime, until: ExitStack
) -> PrefixCachedModel:
    config = CacheConfig((PAGES,), (PAGES,), write=WritePolicy.ON_CALL, guard=None, transfer=policy)
    pages = kept.allocate(config.device_pages)
    store = SlowedStorage(byte_s, engine_time)
    memory = TieredMemory.fitting(kept.layout, config, pages.pools)
    workers = ThreadWorkers.start(storage=config.storage_workers)
    cache = until.enter_context(
        UnifiedCache(kept.layout, config, memory, workers, Identity("transfer"), clock=engine_time.now)
    )
    cache.attach(store)
    return PrefixCachedModel(kept.model, cache, pages, clock=engine_time.now)


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


def _subject(engine: PrefixCachedModel, engine_time: WorkTime, prompts: Iterator[list[int]]) -> Subject:
    return lambda: _first_token_ns(engine, engine_time, next(prompts))


def _first_token_ns(engine: PrefixCachedModel, engine_time: WorkTime, prompt: list[int]) -> int:
    """Return the nanoseconds until the first token of an answer is known, from an empty device and host."""
    engine.cache.wait_all(SETTLE_S)
    engine.cache.reset()
    started_s = engine_time.now()
    with engine.prefill(prompt) as sequence:
        assert sequence.logits is not None
        int(sequence.logits.argmax())
        return round((engine_time.now() - started_s) * 1e9)
