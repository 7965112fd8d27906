"""The jobs of operations: bytes moved between tiers, on a worker's thread; of a load, layer by layer.

An engine computes on the first layers of a load while the last are still on their way: see ``LayerwiseLoad``.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from threading import Condition, Lock
from types import TracebackType

import numpy as np
import numpy.typing as npt

from unified_cache.controller.copies.gpu import Copied
from unified_cache.controller.memory import PageMemory
from unified_cache.controller.operation import Operation
from unified_cache.controller.storage_tier import ListedObject, PoolOrder, StorageTier, whole_pages
from unified_cache.core.errors import CacheError, CopyError, InputError, StorageError, WaitTimeoutError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PageCopies, Pages, Slots, Tier, all_pages
from unified_cache.core.seal import Label
from unified_cache.storage_backends.common.bounded_call import on_its_own
from unified_cache.storage_backends.protocol import BATCH_BYTES, BATCH_OBJECTS, Answer, Level, PageIO
from unified_cache.storage_backends.wrappers.layer import Method

logger = logging.getLogger(__name__)

Layer = tuple[str, int]
"""Pool and number of a layer in it."""


class LayerProgress:
    """Progress of a worker, which copies inside of ``with progress:``, through a load's layers; any thread may ask."""

    __slots__ = ("_changed", "_copied", "_ended", "_error", "_layers_counts", "_place")

    def __init__(self, layers_counts: Mapping[str, int], order: Sequence[Layer]) -> None:
        """Expect the layers of ``order`` one after the other; ``layers_counts`` has every pool of the model."""
        self._layers_counts = layers_counts
        self._place = {layer: number for number, layer in enumerate(order)}
        self._copied: list[Copied] = []
        """Of the layers that come first in the order: where their copies end."""
        self._ended = False
        self._error: BaseException | None = None
        self._changed = Condition(Lock())

    def __enter__(self) -> "LayerProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._ended = True
            self._error = error
            self._changed.notify_all()

    def record(self, copied: Copied) -> None:
        """Record where the copy of the next layer ends."""
        with self._changed:
            self._copied.append(copied)
            self._changed.notify_all()

    def has(self, pool: str, layer: int) -> bool:
        """Return whether ``wait`` would return at once."""
        place = self._find(pool, layer)
        with self._changed:
            return place < len(self._copied)

    def wait(self, pool: str, layer: int, timeout_s: float) -> None:
        """See ``LayerwiseLoad.wait``."""
        place = self._find(pool, layer)
        if place < 0:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._ended or place < len(self._copied), timeout_s)
            if place >= len(self._copied):
                if self._ended:
                    raise CopyError(f"layer {layer} of {pool} was not loaded: {self._error}") from self._error
                raise WaitTimeoutError(f"layer {layer} of {pool} has not arrived after {timeout_s} s")
            copied = self._copied[place]
        copied.wait()

    def _find(self, pool: str, layer: int) -> int:
        """Return the place of a layer in the order; -1 if nothing of it had to be brought."""
        count = self._layers_counts.get(pool, 0)
        if not 0 <= layer < count:
            raise InputError(f"expected a layer of {dict(self._layers_counts)}, found layer {layer} of {pool}")
        return self._place.get((pool, layer), -1)


@dataclass(frozen=True, slots=True, eq=False)
class LayerwiseLoad:
    """Pages of a load on which an engine computes before they are in the tree.

    From ``begin_layerwise`` to ``end_layerwise`` the load keeps all its slots and pins, whatever becomes of it: done,
    failed, cancelled or late, nothing is published and nothing given back before ``end_layerwise``. So the slots stay
    the load's, and hold the pages as far as ``wait`` has said so; the engine reads them and never writes. When the load
    has failed, ``poll`` reports it at once: what was computed from then on is not to be used.
    """

    operation: Operation
    end: int
    """Pages of the prompt that can be resumed from once all layers are there."""
    slots: tuple[Slots, ...]
    """By component: device slots of pages [window(end), end), on their way or there before. The engine's own arrays.

    The page map does not lead to what is on its way: where a component is mapped, take its slots from here.
    """
    parts: tuple[PageCopies, ...]
    """What of it is on its way."""
    progress: LayerProgress

    def arrived(self, pool: str, layer: int) -> bool:
        """Return whether ``wait`` would return at once; ``layer`` is the pool's own number of its tensor.

        Raises:
            InputError: the pool has no such layer.
        """
        return self.progress.has(pool, layer)

    def wait(self, pool: str, layer: int, timeout_s: float) -> None:
        """Wait until a layer of the pages is there; from any thread.

        On a GPU it waits until the copy is under way, and has what this thread gives its stream from now on come
        after it.

        Raises:
            InputError: the pool has no such layer.
            CopyError: the load has failed before it came to that layer.
            WaitTimeoutError: it has not come to it within ``timeout_s``.
        """
        self.progress.wait(pool, layer, timeout_s)


class BackupJob:
    """Copy pages device to host, KV before sidecars, and seal each as soon as its pool is complete."""

    uses_storage = False

    def __init__(
        self,
        memory: PageMemory,
        layout: ModelLayout,
        owners: Mapping[str, bytes],
        prompt: Prompt,
        parts: Sequence[PageCopies],
        *,
        is_urgent: bool = False,
    ) -> None:
        """``is_urgent`` where a request waits for it: a prefetch that goes on from what the device holds."""
        self.is_urgent = is_urgent
        self._memory = memory
        self._layout = layout
        self._owners = owners
        self._prompt = prompt
        self._parts = {part.component: part for part in parts}
        self._ordered = memory.ordered(Tier.HOST)

    def run(self) -> bool:
        """Copy, then seal."""
        with self._ordered:
            for component, pool in self._layout.transfer_order:
                part = self._parts.get(component)
                if part is not None:
                    self._memory.backup(pool, part.source, part.target)
                    owner, keys = self._owners[pool.name], self._prompt.keys
                    labels = [Label(owner, keys[page], pool.name) for page in part.pages.tolist()]
                    self._memory.seal(pool, part.target, labels)
        return True

    def stop(self) -> None:
        """Go on: half a copy is of no use, and the end is near."""


class LoadJob:
    """Copy pages host to device layer by layer, all pools side by side by relative depth; KV before sidecars."""

    uses_storage = False
    is_urgent = True

    def __init__(self, memory: PageMemory, layout: ModelLayout, parts: Sequence[PageCopies]) -> None:
        """Make it on the owner's thread: it comes after what the device has been given by now."""
        self._memory = memory
        self._parts = {part.component: part for part in parts}
        self._ordered = memory.ordered(Tier.DEVICE)
        layers_counts = {pool.name: memory.layers_count(pool) for pool in layout.pools}
        self._order = [
            (layer / layers_counts[pool.name], component, pool, layer)
            for component, pool in layout.transfer_order
            if component in self._parts
            for layer in range(layers_counts[pool.name])
        ]
        self._order.sort(key=itemgetter(0))
        self.progress = LayerProgress(layers_counts, [(pool.name, layer) for _, _, pool, layer in self._order])

    def run(self) -> bool:
        """Copy."""
        with self.progress, self._ordered:
            for _, component, pool, layer in self._order:
                part = self._parts[component]
                self.progress.record(self._memory.load_layer(pool, layer, part.source, part.target))
        return True

    def stop(self) -> None:
        """Go on: half a copy is of no use, and the end is near."""


def next_batch(listed: Sequence[ListedObject]) -> list[PageIO]:
    """Return the first objects that go together in one call: one at least, and as many as BATCH_BYTES allows.

    Of the host's slab each is one buffer of bytes.
    """
    batch: list[PageIO] = []
    left_bytes = BATCH_BYTES
    for _, _, page in listed:
        left_bytes -= sum(map(len, page.buffers))
        if left_bytes < 0 and batch:
            break
        batch.append(page)
    return batch


def batch_pages(layout: ModelLayout) -> int:
    """Return how many pages of all pools together go in one call; one at least."""
    objects = sum(pool.page_bytes > 0 for pool in layout.pools)
    return max(1, min(BATCH_OBJECTS // max(objects, 1), BATCH_BYTES // max(layout.page_bytes, 1)))


FIRST_CALL_OBJECTS = 8
"""Objects of a first call before a deadline. A stop keeps what calls have brought that are over, so the call under way
at the deadline is lost to its request, and a whole batch of a slow store may take longer than the request waits."""

CALLS_MIN = 8
"""Calls that a wait should have time for, so that the one that a stop loses is a small part of them."""


class CallSizes:
    """Objects of each call of one read before its deadline, so that little is under way then.

    Nothing is known of a store but what the calls of this read took. A call has twice as many objects as the one before
    if the wait has room for CALLS_MIN such calls, and then fewer if it would end late, should each object take as long.
    Where the probe has shown that the wait has room for fewer calls, the first one is a whole batch.
    """

    __slots__ = ("_clock", "_respond_by_s", "_wait_s", "is_late", "objects")

    def __init__(self, clock: Callable[[], float], wait_s: float, respond_by_s: float, probe_s: float) -> None:
        self._clock = clock
        self._wait_s = wait_s
        self._respond_by_s = respond_by_s
        is_slow = probe_s * CALLS_MIN > wait_s
        self.objects = BATCH_OBJECTS if is_slow else min(FIRST_CALL_OBJECTS, BATCH_OBJECTS)
        """Of the next call, at most."""
        self.is_late = False
        """Whether the deadline is over: no other call begins, though the owner may look later."""

    @classmethod
    def within(cls, operation: Operation, probe_s: float, clock: Callable[[], float]) -> "CallSizes | None":
        """Return those of an operation's read; None if it has no deadline."""
        if operation.respond_by_s == math.inf:
            return None
        return cls(clock, operation.respond_by_s - operation.started_s, operation.respond_by_s, probe_s)

    @contextmanager
    def timed(self, objects: int) -> Iterator[None]:
        """Set the size of the next call by what the ``with`` block takes, a call of so many objects."""
        began_s = self._clock()
        yield
        now_s = self._clock()
        taken_s, left_s = now_s - began_s, self._respond_by_s - now_s
        self.is_late = left_s <= 0
        if taken_s * CALLS_MIN <= self._wait_s:
            self.objects = min(2 * objects, BATCH_OBJECTS)
        while self.objects > 1 and taken_s * self.objects > left_s * objects:
            self.objects //= 2


class BatchedJob:
    """A job that writes objects of a transfer's parts in some pools to storage, or reads them, batch by batch."""

    uses_storage = True

    def __init__(
        self,
        storage: StorageTier,
        prompt: Prompt,
        parts: Sequence[PageCopies],
        order: PoolOrder,
        sizes: CallSizes | None = None,
    ) -> None:
        self._storage = storage
        self._prompt = prompt
        self._parts = parts
        self._order = order
        self._sizes = sizes
        """Objects of each call; None for as many as BATCH_OBJECTS allows."""
        self._listed: list[ListedObject] | None = None
        """As ``StorageTier.pages`` lists them."""
        self._done: list[Answer] = []
        """By object, of those listed first: the store's answer."""
        self._begun_count = 0
        """Objects, of those listed first, that a call has named, whether it has returned or raised."""
        self._stopped = False

    @property
    def whole(self) -> list[Pages]:
        """By part: True where every object of the page was moved, or is there. Nothing, until it has run."""
        if self._listed is None:
            return [np.zeros(len(part), np.bool_) for part in self._parts]
        done = list(self._done)  # a worker goes on
        done += [Answer.UNAVAILABLE] * (len(self._listed) - len(done))
        return whole_pages(self._parts, self._listed, done)

    def answered(self, answer: Answer) -> list[Pages]:
        """Return a mask by part of the pages for which the store gave that answer for any object."""
        pages = [np.zeros(len(part), np.bool_) for part in self._parts]
        for (number, index, _), reported in zip(self._listed or (), self._done, strict=False):
            if reported is answer:
                pages[number][index] = True
        return pages

    def _move(self, call: Callable[[list[PageIO]], list[Answer]]) -> Iterator[None]:
        """Call the store batch by batch until all are moved, one raises, or the job is stopped; yield between two."""
        listed = self._listed = self._storage.pages(self._prompt, self._parts, self._order)
        while len(self._done) < len(listed) and not self._stopped:
            start = len(self._done)
            objects_max = BATCH_OBJECTS if self._sizes is None else self._sizes.objects
            batch = next_batch(listed[start : start + objects_max])
            self._begun_count = start + len(batch)
            self._done += call(batch)
            if len(self._done) < len(listed):
                yield

    def _take_back(self) -> None:
        """Remove what was or may have been moved, and count nothing as moved."""
        assert self._listed is not None
        labels = [page.label for _, _, page in self._listed[: self._begun_count]]
        self._done = []
        for start in range(0, len(labels), BATCH_OBJECTS):
            self._storage.backend.remove(labels[start : start + BATCH_OBJECTS])

    def stop(self) -> None:
        """Call the store no more."""
        self._stopped = True


class StoreJob(BatchedJob):
    """Write sealed host pages to storage, page by page, as far as this rank is the one to write them."""

    is_urgent = False

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[PageCopies], level: Level) -> None:
        super().__init__(storage, prompt, parts, storage.write_order)
        self._level = level
        self._turns = self._put_in_turns()

    def run(self) -> bool:
        """Put a batch; where the store is cleared meanwhile, nothing stays."""
        return next(self._turns, True)

    def _put_in_turns(self) -> Iterator[bool]:
        epoch = self._storage.epoch
        with epoch.put(self) as allowed:
            try:
                if allowed:
                    self._send_hints()
                    for _ in self._move(self._put):
                        yield False
            except GeneratorExit:  # nobody runs it any more
                raise
            except BaseException:  # what the store took before it failed must not outlive a clear either
                self._take_back_if_superseded()
                raise
            self._take_back_if_superseded()

    def _send_hints(self) -> None:
        """Send recency hints first, so that the store evicts other pages for those that are put."""
        hints = self._storage.hints
        if hints is None:
            return
        waiting = deque(hints.take_all())
        with suppress(StorageError):  # a page is older there than it should be; the put says what is wrong
            while waiting:
                self._storage.touch(waiting[0])
                hints.record_hinted(waiting.popleft())
        for used in waiting:  # each would wait for the store as long again
            hints.record_dropped(used)

    def _take_back_if_superseded(self) -> None:
        """Remove what was put where the store was cleared meanwhile, also long after this put was given up."""
        epoch = self._storage.epoch
        if epoch.is_superseded(self):
            try:
                with on_its_own():
                    self._take_back()
            except CacheError as error:
                logger.warning("the store is left alone until it is cleared again, what was put after that: %s", error)
                raise
            epoch.take_back(self)

    def _put(self, pages: list[PageIO]) -> list[Answer]:
        answers = self._storage.backend.put(pages, self._level)
        self._storage.answers.add(Method.PUT, answers)
        return answers


class ClearJob:
    """Remove from storage whatever lies there under the identities that this rank stores for."""

    uses_storage = True
    is_urgent = False

    def __init__(self, storage: StorageTier) -> None:
        self._backend = storage.backend
        self._owners = sorted({storage.owners[pool.name] for _, pool in storage.write_order})
        self._stopped = False
        self.removed_count = 0
        """Objects."""

    def run(self) -> bool:
        """Clear identity by identity."""
        for owner in self._owners:
            if not self._stopped:
                self.removed_count += self._backend.clear(owner)
        return True

    def stop(self) -> None:
        """Clear no further identity."""
        self._stopped = True


class ProbeJob:
    """Ask storage which pages it has, all components and pools in one call."""

    uses_storage = True
    is_urgent = True

    def __init__(
        self,
        storage: StorageTier,
        prompt: Prompt,
        pages: Sequence[npt.NDArray[np.int64]],
        clock: Callable[[], float],
    ) -> None:
        """Ask for ``pages[c]`` of component ``c``."""
        self._storage = storage
        self._clock = clock
        self.call_s = 0.0
        """Seconds that the call took, once it has returned."""
        self._prompt = prompt
        self._pages = pages
        self._stopped = False
        self.present: list[Pages] = [np.zeros(len(asked), np.bool_) for asked in pages]
        """By component: whether storage has each page asked for, in every pool. None, until it has run."""

    def run(self) -> bool:
        """Ask once."""
        if self._stopped or self._storage.epoch.is_waiting:
            return True
        storage, keys = self._storage, self._prompt.keys
        labels: list[Label] = []
        for component, pool in storage.read_order:
            labels += storage.labels([keys[page] for page in self._pages[component].tolist()], pool)
        began_s = self._clock()
        found = storage.backend.exists(labels)
        self.call_s = self._clock() - began_s
        storage.answers.add(Method.EXISTS, found)
        answers = np.array([answer is Answer.HIT for answer in found], np.bool_)
        self.present = list(map(all_pages, map(len, self._pages)))
        end = 0
        for component, _ in storage.read_order:
            start, end = end, end + len(self._pages[component])
            self.present[component] &= answers[start:end]
        return True

    def among(self, pages: Sequence[npt.NDArray[np.int64]]) -> list[Pages]:
        """Return a mask by component of ``pages`` that were asked for and that storage has."""
        found: list[Pages] = []
        for wanted, asked, present in zip(pages, self._pages, self.present, strict=True):
            is_there = np.zeros(self._prompt.pages_count, np.bool_)
            is_there[asked[present]] = True
            found.append(is_there[wanted])
        return found

    def stop(self) -> None:
        """Ask nothing, if that has not begun."""
        self._stopped = True


class FetchJob(BatchedJob):
    """Read pages from storage straight into host slots, page by page; each is verified by the backend."""

    is_urgent = True

    def __init__(
        self, storage: StorageTier, prompt: Prompt, parts: Sequence[PageCopies], sizes: CallSizes | None
    ) -> None:
        super().__init__(storage, prompt, parts, storage.read_order, sizes)

    def run(self) -> bool:
        """Get."""
        for _ in self._move(self._get):
            pass
        return True

    def calls(self) -> Iterator[None]:
        """Get call by call; yield between two."""
        return self._move(self._get)

    def _get(self, pages: list[PageIO]) -> list[Answer]:
        if self._sizes is None:
            answers = self._storage.backend.get(pages)
        else:
            with self._sizes.timed(len(pages)):
                answers = self._storage.backend.get(pages)
            self._stopped |= self._sizes.is_late
        self._storage.answers.add(Method.GET, answers)
        return answers
