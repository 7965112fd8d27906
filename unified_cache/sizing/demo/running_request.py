"""A running request: the prefix it locks, the pages it fills, and the cache object that the model reads.

    [0, lock.end)         pages of the tree, pinned by this request's lock
    [lock.end, ours_end)  pages of this request's own; the last may be filled in part
    [ours_end, ...)       pages that had no room: written to the sink, so they live in the cache object alone

Everything it holds is in the prefix, the lock and the pages, so that ``abort`` can give it back at any time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.pool import Slots
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.transformers import DevicePages, PrefixRestore, Stage
from unified_cache.sizing.demo.request import DemoRequest
from unified_cache.tree import Lock

__all__ = ["PrefillChunk", "RunningRequest"]

SINK = 0
"""Slot of the page that padding goes to."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens that the next forward runs for one request."""

    running: "RunningRequest"
    start: int
    end: int

    @property
    def tokens(self) -> list[int]:
        """Token ids."""
        return self.running.request.tokens[self.start : self.end]


class RunningRequest:
    """Slots, lock and model state of one running request.

    In each iteration the engine takes a ``chunk``, runs the model, writes its state to ``locs`` and
    calls ``note_computed``.
    """

    __slots__ = (
        "_cache",
        "_chunk_pages",
        "_fresh",
        "_keeps_answer",
        "_lock",
        "_pages",
        "_prefix",
        "_steps",
        "is_ready",
        "past",
        "request",
        "table",
        "tokens_done",
    )

    def __init__(
        self, request: DemoRequest, cache: UnifiedCache, pages: DevicePages, chunk_pages: int, *, keeps_answer: bool
    ) -> None:
        """Take a request; nothing is asked or allocated yet. Chunks of its prompt end at multiples of ``chunk_pages``.

        With ``keeps_answer`` the pages that decoding fills are kept like those of the prompt.
        """
        prompt = cache.prompt(request.tokens, request.namespace)
        self.request = request
        self._cache = cache
        self._pages = pages
        self._chunk_pages = chunk_pages
        self._keeps_answer = keeps_answer
        self._prefix = PrefixRestore(cache, prompt)
        self._steps = self._begin()
        self._lock: Lock | None = None
        self._fresh: list[Slots] = []
        self.is_ready = False
        """Whether what the tiers hold has come, so that there is a chunk to run."""
        self.past: DynamicCache = pages.new_cache()
        """The model's own cache object: stock models read nothing else."""
        self.table: list[Slots] = []
        """Device slots of all pages, by component; the sink for tombstones and for pages without room."""
        self.tokens_done = 0
        """Tokens whose state is in ``past``."""

    # ---- before the first forward ----------------------------------------------------------------------------

    def advance(self) -> None:
        """Continue to bring the cached prefix to the device, without waiting."""
        if not self.is_ready and next(self._steps, Stage.READY) is Stage.READY:
            self.is_ready = True

    def _begin(self) -> Iterator[Stage]:
        cache, request = self._cache, self.request
        yield from self._prefix.steps()
        self._lock, self._prefix.lock = self._prefix.lock, None
        assert self._lock is not None
        start = self._lock.end
        self.past = self._pages.restore([cache.slots(self._lock, number) for number in self._components], start)
        self.tokens_done = start * self._page_size
        request.reused = self._prefix.reused
        pages_count = len(request.tokens) // self._page_size
        self._fresh = [np.zeros(0, np.int32) for _ in self._components]
        self._allocate_pages(start, pages_count, [*self._prefix.ends, pages_count])

    # ---- one forward -----------------------------------------------------------------------------------------

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens of the prompt are left to compute."""
        return self.tokens_done < self.request.prompt_tokens

    def chunk(self) -> PrefillChunk:
        """Return what to run next: a chunk of the prompt, or the token generated last. Its last page has a slot."""
        start, page_size = self.tokens_done, self._page_size
        first_page, whole_pages = start // page_size, self.request.prompt_tokens // page_size
        if not self.is_prefilling:
            end = start + 1
        elif first_page < whole_pages:
            end_page = min((first_page // self._chunk_pages + 1) * self._chunk_pages, whole_pages)
            held = [slots[first_page - self._locked_end :] for slots in self._fresh]
            end = self._pages.chunk_end(first_page, end_page, held) * page_size
        else:
            end = self.request.prompt_tokens
        last_page = (end - 1) // page_size
        if last_page == self._locked_end + len(self._fresh[0]):
            if last_page > whole_pages:
                self._trim(last_page)
            self._allocate_pages(last_page, last_page + 1, [last_page + 1])
        return PrefillChunk(self, start, end)

    def locs(self, component: int, start: int, end: int) -> torch.Tensor:
        """Return where a component keeps tokens [start, end): ``slot * page_size + offset``, int64, on the CPU."""
        tokens = torch.arange(start, end)
        slots = torch.zeros(-(-end // self._page_size), dtype=torch.int64)
        held = self.table[component][: len(slots)]
        slots[: len(held)] = torch.from_numpy(held)
        return slots[tokens // self._page_size] * self._page_size + tokens % self._page_size

    def note_computed(self, chunk: PrefillChunk) -> None:
        """Record that a chunk is computed and written; insert the prompt's pages into the tree once all are whole."""
        was_prefilling = self.is_prefilling
        self.tokens_done = chunk.end
        if was_prefilling:
            self.request.computed_tokens += chunk.end - chunk.start
            if not self.is_prefilling:
                self._insert_pages(self.request.prompt_tokens // self._page_size)

    # ---- the end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Insert the pages that decoding has filled, if they are to be kept; give back the rest."""
        if self._keeps_answer and not self.is_prefilling:
            self._insert_pages(self.tokens_done // self._page_size)
        self.abort()

    def abort(self) -> None:
        """Give back everything; inserted pages stay cached. Idempotent."""
        self._prefix.abort()
        if self._fresh:
            self._cache.free(self._fresh)
            self._fresh = []
        if self._lock is not None:
            self._cache.release(self._lock)
            self._lock = None

    # ---- pages -----------------------------------------------------------------------------------------------

    def _allocate_pages(self, start: int, end: int, ends: Iterable[int]) -> None:
        """Get slots for pages [start, end), all or none, if they join on to those held."""
        if start == self._locked_end + len(self._fresh[0]):
            taken = self._cache.allocate(self._cache.pages_to_allocate(start, end, ends))
            if taken is not None:
                self._pages.clear(taken)
                self._fresh = [np.concatenate(pair) for pair in zip(self._fresh, taken, strict=True)]
        self._renew_table()

    def _trim(self, end: int) -> None:
        """Free the pages that no resume after ``end`` pages needs, because every window has moved past them.

        Once the windows have moved past all that the request's lock pins, it releases those of the lock, too.
        """
        cache = self._cache
        spans = [component.span for component in self._pages.layout.components[1:]]
        if self._lock is not None and end - self._locked_end >= max(spans, default=SPAN_ALL):
            cache.release_windows(self._lock)
        count = self._locked_end + len(self._fresh[0])
        ends = cache.config.retention.ends(end, 0, self._page_size)
        cache.trim(self._fresh, cache.pages_to_allocate(self._locked_end, count, ends))

    def _insert_pages(self, end: int) -> None:
        """Insert whole pages up to ``end`` into the tree, as far as they have slots; the lock pins them after that."""
        end = min(end, self._locked_end + len(self._fresh[0]))
        prompt = self._cache.prompt(self.request.tokens, self.request.namespace).head(end)
        count = prompt.pages_count - self._locked_end
        if count > 0 and self._lock is not None:
            self._lock = self._cache.insert(prompt, [slots[:count] for slots in self._fresh], self._lock)
            self._fresh = [slots[count:] for slots in self._fresh]
            self._renew_table()

    def _renew_table(self) -> None:
        assert self._lock is not None
        self.table = []
        for number, fresh in zip(self._components, self._fresh, strict=True):
            window = self._cache.slots(self._lock, number)
            gap = np.full(self._locked_end - len(window), SINK, np.int32)
            self.table.append(np.maximum(np.concatenate((gap, window, fresh)), SINK))

    @property
    def _locked_end(self) -> int:
        return 0 if self._lock is None else self._lock.end

    @property
    def _page_size(self) -> int:
        return self._pages.layout.page_size

    @property
    def _components(self) -> range:
        return range(len(self._pages.layout.components))
