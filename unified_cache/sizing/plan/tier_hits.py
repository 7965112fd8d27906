"""Hits of one combination of tier sizes: for each request how far its prompt could be resumed, tier by tier."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import Hits
from unified_cache.sizing.plan.lru_stack import LruStack
from unified_cache.sizing.plan.resume_points import NEVER, ResumePoints, StoreFootprint
from unified_cache.sizing.plan.trace_pages import Counts, TracePages
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.storage_backends.protocol import BATCH_OBJECTS

PASSES_MAX = 8
"""Passes kept: each holds some 100 bytes for every run of pages asked for again."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Payload moved for each request, in true bytes, shapes (requests,)."""

    loaded_from_host: Counts
    """From host memory to the device, where nothing is read from storage."""
    loaded: Counts
    """From host memory to the device, with what storage adds."""
    fetched: Counts
    """From storage to host memory."""
    fetched_objects: Counts
    """The same in objects, one for each pool of a page."""
    written: int
    """Into storage, by all requests together."""
    written_objects: int


@dataclass(frozen=True, slots=True)
class TierEnds:
    """Pages of each prompt that can be resumed from the device, with host memory, and with storage too.

    Shapes (requests,), each at least the one before.
    """

    device: Counts
    host: Counts
    storage: Counts
    moved: Moved

    def hits(self) -> Hits:
        """Return the pages handed back, all prompts together."""
        return Hits.of_ends(*(int(ends.sum()) for ends in (self.device, self.host, self.storage)))


@dataclass(frozen=True, slots=True)
class TracePass:
    """Findings of one pass over the trace, its prompts cut or not."""

    stack: LruStack
    points: ResumePoints | None
    """None for full attention alone, which can be resumed anywhere."""


class LruHits:
    """Hits of a trace in tiers that evict the least recently used first, of any sizes, from a few passes over it.

    Full attention alone is exact. A pass serves all sizes whose device and host hold the longest prompt; each smaller
    size takes a pass of its own, since prompts are cut to what the device can hold.
    """

    def __init__(self, trace: TracePages) -> None:
        """``trace`` has pages of the size that the plans have which are asked about."""
        self.trace = trace
        self._passes: dict[int, TracePass] = {}
        self._engines: dict[int, list[LruHits]] = {}
        """By the number of engines: what each of them serves."""

    def ends(self, plan: ReplayPlan) -> TierEnds:
        """Return the hits under a plan."""
        self._check(plan)
        if plan.engines > 1:
            return self._several_ends(plan)
        device, memory = plan.config.device_pages, _memory_pages(plan)
        seen = self._pass(plan, device[0])
        resumed = seen.points
        if resumed is None:
            device_ends, memory_ends = seen.stack.ends(device[0]), seen.stack.ends(memory[0])
        else:
            alive = _alive(resumed, memory, self._store_bytes(plan))
            device_ends = _last(resumed, alive & _in_memory(resumed, device))
            memory_ends = np.maximum(device_ends, _last(resumed, alive & _in_memory(resumed, memory)))
        # A tier holds as much of Full as its stack, but at least what is resumed from it.
        device_full = np.maximum(device_ends, seen.stack.ends(device[0]))
        memory_full = np.maximum(memory_ends, seen.stack.ends(memory[0]))
        return self._with_storage(plan, (device_ends, memory_ends), (device_full, memory_full))

    def _with_storage(
        self, plan: ReplayPlan, memory_ends: tuple[Counts, Counts], full: tuple[Counts, Counts]
    ) -> TierEnds:
        """Return the hits of device and memory with what storage adds; ``full`` is as for ``_moved``."""
        total_ends = memory_ends[1]
        if plan.storage is not None:
            total_ends = np.maximum(total_ends, self._stored_ends(plan))
        ends = (*memory_ends, total_ends)
        return TierEnds(*ends, self._moved(plan, ends, full))

    def _several_ends(self, plan: ReplayPlan) -> TierEnds:
        """Return the hits of full attention in engines that take the requests in turn, over one store.

        Each has a stack of its own. All of them give the store whatever they serve: it has one stack, of all requests.
        """
        count = plan.engines
        if count not in self._engines:
            shares = range(min(count, self.trace.requests_count))
            self._engines[count] = [LruHits(self.trace.dealt_to(number, count)) for number in shares]
        alone = replace(plan, engines=1, storage=None, storage_bytes=None)
        device_ends, memory_ends = np.zeros((2, self.trace.requests_count), np.int64)
        for number, share in enumerate(self._engines[count]):
            ends = share.ends(alone)
            device_ends[number::count], memory_ends[number::count] = ends.device, ends.host
        return self._with_storage(plan, (device_ends, memory_ends), (device_ends, memory_ends))

    def _check(self, plan: ReplayPlan) -> None:
        """Refuse a plan that this trace does not answer for."""
        if plan.layout.page_size != self.trace.page_size:
            raise ConfigError(
                f"the pages of the trace have {self.trace.page_size} tokens, found {plan.layout.page_size}"
            )
        if plan.engines > 1 and len(plan.layout.components) > 1:
            raise ConfigError(
                f"a plan for windows or states is that of one engine, found {plan.engines}: replay --engines runs them"
            )

    def _stored_ends(self, plan: ReplayPlan) -> Counts:
        """Return how far prompts could be resumed with what storage has, as far as the device or the host can take it.

        A prompt longer than the host goes to storage, and from there to the device, in pieces.
        """
        seen, memory = self._pass(plan, plan.config.device_pages[0]), _memory_pages(plan)
        store_bytes = self._store_bytes(plan)
        if seen.points is None:
            batch_pages, page_bytes = _batch_pages(plan), plan.stored_bytes()[0]
            ends = seen.stack.stored_ends(min(store_bytes // page_bytes, NEVER), batch_pages)
            fetched: Counts = np.minimum(ends, memory[0])
            return fetched
        points = seen.points
        full = (points.full < memory[0]) | (points.store_full <= store_bytes)
        ok = full & _alive(points, memory, store_bytes) & (points.end <= memory[0])
        for component, pages in enumerate(memory[1:]):
            in_memory = (points.window_pages[component] < pages) & (points.full_since < memory[0])
            ok &= in_memory | (points.store_window_bytes[component] < store_bytes)
        return _last(points, ok)

    def _moved(self, plan: ReplayPlan, ends: tuple[Counts, Counts, Counts], full: tuple[Counts, Counts]) -> Moved:
        """Count what is copied and read where every hit is used; Full as far as a tier lacks it, windows whole.

        ``full`` is how many pages of Full the device and all of memory hold of each prompt.
        """
        device_ends, memory_ends, total_ends = ends
        device_full, memory_full = full
        components = plan.true_layout.components
        page_bytes = [each.page_bytes for each in components]
        page_objects = [sum(pool.page_bytes > 0 for pool in each.pools) for each in components]
        spans = [each.span for each in components[1:]]

        def missing(of_pages: Sequence[int], target: Counts, held_full: Counts, held: Counts) -> Counts:
            total: Counts = np.maximum(target - held_full, 0) * of_pages[0]
            for span, of_page in zip(spans, of_pages[1:], strict=True):
                total += np.where(target > held, np.minimum(target, span), 0) * of_page
            return total

        from_host = missing(page_bytes, memory_ends, device_full, device_ends)
        if plan.storage is None:
            nothing = np.zeros_like(from_host)
            return Moved(from_host, from_host, nothing, nothing, 0, 0)
        loaded = missing(page_bytes, total_ends, device_full, device_ends)
        fetched, fetched_objects = (
            missing(each, total_ends, memory_full, memory_ends) for each in (page_bytes, page_objects)
        )
        store_pages = self._store_bytes(plan) // max(plan.stored_bytes()[0], 1)
        cut = plan.config.device_pages[0]
        stored_before = self._pass(plan, cut).stack.hit_pages(min(store_pages, NEVER))
        pages_counts = np.minimum(self.trace.pages_counts, cut)
        written_pages = [int(pages_counts.sum()) - stored_before]
        tail_pages = max(1, -(-plan.config.retention.tail_tokens // plan.layout.page_size))
        for span in spans:
            kept = np.minimum(pages_counts, span + tail_pages - 1) + plan.config.retention.branches * span
            written_pages.append(int(np.minimum(kept, pages_counts).sum()))
        written, written_objects = (
            sum(pages * of_page for pages, of_page in zip(written_pages, each, strict=True))
            for each in (page_bytes, page_objects)
        )
        return Moved(from_host, loaded, fetched, fetched_objects, written, written_objects)

    def _store_bytes(self, plan: ReplayPlan) -> int:
        if plan.storage is None:
            return 0
        return NEVER if plan.storage_bytes is None else plan.storage_bytes

    def _pass(self, plan: ReplayPlan, pages_max: int) -> TracePass:
        """Return the pass over prompts cut to ``pages_max`` pages."""
        cut = min(pages_max, self.trace.longest_pages)
        if cut not in self._passes:
            if len(self._passes) == PASSES_MAX:
                del self._passes[next(iter(self._passes))]
            trace = self.trace.cut(cut)
            stack = LruStack.of(trace)
            spans = [component.span for component in plan.layout.components[1:]]
            stored = StoreFootprint(plan.stored_bytes(), _batch_pages(plan))
            points = ResumePoints.of(trace, stack, spans, plan.config.retention, stored) if spans else None
            self._passes[cut] = TracePass(stack, points)
        return self._passes[cut]


def _memory_pages(plan: ReplayPlan) -> tuple[int, ...]:
    """Return by component the pages of device and host memory together: the larger has what the other has."""
    return tuple(max(pair) for pair in zip(plan.config.device_pages, plan.config.host_pages, strict=True))


def _batch_pages(plan: ReplayPlan) -> int:
    """Return the pages of Full that one call to a store takes."""
    objects = sum(pool.page_bytes > 0 for pool in plan.layout.components[0].pools)
    pages = max(1, BATCH_OBJECTS // max(objects, 1))  # no object of a page that only windows are kept of
    return min(pages, plan.config.host_pages[0] or pages)


def _alive(points: ResumePoints, memory: tuple[int, ...], store_bytes: int) -> npt.NDArray[np.bool_]:
    """Return for each point whether its windows were made, where memory knew of it, and stayed."""
    alive = points.full_ever < memory[0]
    for component, pages in enumerate(memory[1:]):
        alive &= points.window_pages_ever[component] < pages
    return (points.full_made < memory[0]) & (alive | (points.store_ever < store_bytes))


def _in_memory(points: ResumePoints, pages: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return for each point whether tiers of these pages hold all that a resume there needs."""
    held = (points.full < pages[0]) & (points.full_since < pages[0])
    for component, capacity in enumerate(pages[1:]):
        held &= points.window_pages[component] < capacity
    return held


def _last(points: ResumePoints, ok: npt.NDArray[np.bool_]) -> Counts:
    """Return for each request the last of its points that will do; 0 where none does."""
    ends = np.zeros(points.requests_count, np.int64)
    np.maximum.at(ends, points.request[ok], points.end[ok])
    return ends
