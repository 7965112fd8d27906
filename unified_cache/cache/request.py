"""One request of an engine, from what the tiers hold of its prompt to what it leaves there."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from numbers import Integral
from typing import Self

import numpy as np

from unified_cache.cache.calls import RequestCalls
from unified_cache.controller import NotStarted, Operation, OperationState, TransferKind
from unified_cache.core.errors import ClosedError, InputError, StateError, check_kind
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Hits, Slots
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import Lock

__all__ = ["Request"]


class Request:
    """A prompt that an engine serves; ``UnifiedCache.bring`` begins it, leaving its ``with`` block ends it.

        [0, lock.end)         pages of the tree, pinned for this request
        [lock.end, own_end)   pages of its own: ``allocate`` gave them slots, ``insert`` hands them to the tree

    ``advance`` once after each ``poll`` until it returns True, or ``wait``. Then read what ``slots`` names, compute the
    rest into what ``allocate`` returns, and ``insert``. Calls out of turn raise ``StateError``. One that is dropped and
    not closed is closed by the next ``poll`` or ``bring``, with a warning.
    """

    __slots__ = ("_cache", "_ends", "_lock", "_operation", "_own", "_priority", "_steps", "hits", "prompt")

    def __init__(self, cache: RequestCalls, prompt: Prompt, deadline_s: float, priority: int) -> None:
        """Take a prompt; nothing is asked or started before the first ``advance``."""
        self.prompt = prompt
        """The prompt; once more was inserted, the longer one."""
        self.hits = Hits()
        """Pages of its prefix that need not be computed, by the tier that they came from; known once it is pinned."""
        self._cache = cache
        self._ends: tuple[int, ...] = ()
        self._lock: Lock | None = None
        self._operation: Operation | None = None
        self._own = [np.empty(0, np.int32) for _ in cache.layout.components]
        self._priority = priority
        self._steps = self._bring(deadline_s)

    # ---- what the tiers hold ---------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Take the next step if bytes have come; return whether the prefix is pinned on the device. Never waits."""
        if self._lock is None:
            next(self._steps, None)
        return self._lock is not None

    def wait(self, timeout_s: float) -> list[Operation]:
        """Wait until the prefix is pinned on the device; return the transfers, anybody's, that are over, as ``poll``.

        Raises:
            WaitTimeoutError: it is not after ``timeout_s``; what moves goes on.
            RankLostError: as ``UnifiedCache.poll``.
        """
        check_kind(timeout_s, int | float, "timeout_s as a number of seconds")
        over: list[Operation] = []
        end_s = time.monotonic() + timeout_s
        while not self.advance():
            if self._operation is None:
                raise StateError(
                    "expected a request that is under way, found one that is closed; bring its prompt again"
                )
            over += self._cache.wait_all(end_s - time.monotonic(), until=self._operation)
        return over

    def _bring(self, deadline_s: float) -> Iterator[None]:
        """Move what lies further down; yield while it moves. What fails to come, or was declined, is computed."""
        cache, prompt, priority = self._cache, self.prompt, self._priority
        found = cache.match(prompt, priority)
        if found.host_end < prompt.reusable_pages:
            yield from self._moving(cache.prefetch(prompt, deadline_s))
            found = cache.match(prompt, priority)
        if found.host_end > found.device_end:
            yield from self._moving(cache.load(prompt))
            found = cache.match(prompt, priority)
        self._ends = cache.checkpoint_ends(found)
        self._lock = cache.lock(found)
        self.hits = self._lock.hits

    def _moving(self, started: Operation | NotStarted) -> Iterator[None]:
        if started:
            self._operation = started
            while started.state is OperationState.RUNNING:
                yield
            self._operation = None

    @property
    def moving(self) -> TransferKind | None:
        """PREFETCH while storage is read, LOAD while host memory is copied, None otherwise."""
        return None if self._operation is None else self._operation.kind

    @property
    def lock(self) -> Lock:
        """The lock on all pages of the tree that this request has, those that it inserted among them."""
        if self._lock is None:
            raise StateError("expected the prefix pinned: after wait, or an advance that is True, and before close")
        return self._lock

    def slots(self, component: int = 0) -> Slots:
        """Return the device slots of the pinned pages: all for Full, for others those of the window that ends there."""
        return self._cache.slots(self.lock, component)

    # ---- its own pages ---------------------------------------------------------------------------------------

    @property
    def own(self) -> list[Slots]:
        """Device slots of the pages [lock.end, own_end), an array per component, -1 where it keeps none."""
        return self._own

    @property
    def own_end(self) -> int:
        """End, in pages, of what is pinned and of its own."""
        return self.lock.end + len(self._own[0])

    def allocate(self, end: int | None = None, ends: Iterable[int] | None = None) -> list[Slots] | None:
        """Get slots for the pages from ``own_end`` to ``end``, those of the prompt unless given; evicts what is short.

        ``ends`` are where later requests may resume, those of ``UnifiedCache.checkpoint_ends`` unless given; windows
        and states are kept for these alone. Returns the new slots as ``UnifiedCache.allocate`` does. None, and nothing
        was taken, if pins leave too little room: wait, or compute without keeping.
        """
        end = self.prompt.pages_count if end is None else end
        masks = self._cache.pages_to_allocate(self.own_end, end, self._ends if ends is None else ends)
        taken = self._cache.allocate(masks)
        if taken is not None:
            self._own = [np.concatenate(pair) for pair in zip(self._own, taken, strict=True)]
        return taken

    def trim(self, end: int) -> None:
        """Free those of its own windows and states that no resume at ``end`` pages or later needs.

        Once its own pages fill every window, what it resumed from becomes evictable too: it must not read that again.
        """
        check_kind(end, Integral, "end as a number of pages")
        spans = [component.span for component in self._cache.layout.components[1:]]
        if end - self.lock.end >= max(spans, default=SPAN_ALL):
            self._cache.release_windows(self.lock)
        ends = self._cache.config.retention.ends(end, 0, self._cache.layout.page_size)
        self._cache.trim(self._own, self._cache.pages_to_allocate(self.lock.end, self.own_end, ends))

    def insert(self, prompt: Prompt | None = None) -> None:
        """Hand its own pages to the tree: other requests hit them from now on, and they stay pinned for this one.

        ``prompt`` is the longer one once its answer has filled more pages. Pages without a slot end what is inserted,
        and pages past the prompt stay its own. Inserting nothing new changes nothing.

        Raises:
            InputError, SlotError: it is no prompt that goes on from this one, or see ``UnifiedCache.insert``; nothing
                was changed.
        """
        lock, prompt = self.lock, self.prompt if prompt is None else prompt
        check_kind(prompt, Prompt, "a prompt that goes on from this one")
        if not prompt.begins_as(self.prompt):
            raise InputError("a request inserts its own prompt, or one that goes on from it, found another")
        prompt = prompt.head(min(prompt.pages_count, self.own_end))
        count = prompt.pages_count - lock.end
        if count > 0:
            self._lock = self._cache.insert(prompt, [slots[:count] for slots in self._own], lock, self._priority)
            self._own = [slots[count:] for slots in self._own]
            self.prompt = max(self.prompt, prompt, key=lambda each: each.pages_count)

    # ---- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what moves, free its own pages, release the lock; what was inserted stays cached. Twice is once."""
        self._steps = iter(())
        with suppress(ClosedError):  # a closed cache has nothing to take back
            if self._operation is not None:
                self._cache.cancel(self._operation)
                self._operation = None
            if self._lock is not None:
                self._cache.free(self._own)
                self._own = [slots[:0] for slots in self._own]
                self._cache.release(self._lock)
                self._lock = None

    def __del__(self) -> None:
        if self._lock is not None or self._operation is not None:
            self._cache.dropped.append(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
