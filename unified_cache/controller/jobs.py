"""The jobs of operations: bytes moved between tiers, on a worker's thread."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from unified_cache.controller.operation import JobQueue
from unified_cache.controller.storage_tier import PoolOrder, StorageTier, whole_pages
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import ModelLayout, Pages, Part
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Level, PageIO

__all__ = ["BackupJob", "FetchJob", "LoadJob", "ProbeJob", "StoreJob"]

STORAGE_BATCH_OBJECTS = 128
"""Objects per call to a store: between two calls a job can be stopped, and what came before stays."""


class BackupJob:
    """Copy pages device to host, KV before sidecars, and seal each as soon as its pool is complete."""

    queue = JobQueue.COPY

    def __init__(
        self,
        memory: PageMemory,
        layout: ModelLayout,
        owners: Mapping[str, bytes],
        prompt: Prompt,
        parts: Sequence[Part],
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._owners = owners
        self._prompt = prompt
        self._parts = {part.component: part for part in parts}

    def run(self) -> None:
        """Copy, then seal."""
        keys = self._prompt.keys
        for component, pool in self._layout.transfer_order:
            part = self._parts.get(component)
            if part is not None:
                self._memory.backup(pool, part.source, part.target)
                labels = [Label(self._owners[pool.name], keys[page], pool.name) for page in part.pages.tolist()]
                self._memory.seal(pool, part.target, labels)

    def stop(self) -> None:
        """Go on: half a copy is worth nothing, and the end is near."""


class LoadJob:
    """Copy pages host to device, KV before sidecars."""

    queue = JobQueue.COPY

    def __init__(self, memory: PageMemory, layout: ModelLayout, parts: Sequence[Part]) -> None:
        self._memory = memory
        self._layout = layout
        self._parts = {part.component: part for part in parts}

    def run(self) -> None:
        """Copy."""
        for component, pool in self._layout.transfer_order:
            part = self._parts.get(component)
            if part is not None:
                self._memory.load(pool, part.source, part.target)

    def stop(self) -> None:
        """Go on: half a copy is worth nothing, and the end is near."""


class StorageBatches:
    """Objects of a transfer's parts in some pools, written to or read from storage batch by batch."""

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[Part], order: PoolOrder) -> None:
        self._storage = storage
        self._prompt = prompt
        self._parts = parts
        self._order = order
        self._listed: list[tuple[int, int, PageIO]] | None = None
        self._done: list[bool] = []
        """Of the objects listed first: whether each was moved."""
        self._stopped = False

    @property
    def whole(self) -> list[Pages]:
        """By part: True where every object of the page was moved. Nothing, until it has run."""
        if self._listed is None:
            return [np.zeros(len(part), np.bool_) for part in self._parts]
        done = self._done + [False] * (len(self._listed) - len(self._done))
        return whole_pages(self._parts, self._listed, done)

    def move(self, call: Callable[[list[PageIO]], list[bool]]) -> None:
        """Call the store for one batch after the other, until all are moved, one raises, or somebody stops it."""
        listed = self._listed = self._storage.pages(self._prompt, self._parts, self._order)
        while len(self._done) < len(listed) and not self._stopped:
            start = len(self._done)
            self._done += call([page for _, _, page in listed[start : start + STORAGE_BATCH_OBJECTS]])

    def stop(self) -> None:
        """Call the store no more."""
        self._stopped = True


class StoreJob:
    """Write sealed host pages to storage, KV before sidecars, as far as this rank is the one to write them."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[Part], level: Level) -> None:
        self._storage = storage
        self._level = level
        self._batches = StorageBatches(storage, prompt, parts, storage.write_order)

    @property
    def stored(self) -> list[Pages]:
        """By part: True where every object that this rank writes is stored at that level. Nothing, until it has run."""
        return self._batches.whole

    def run(self) -> None:
        """Put."""
        self._batches.move(lambda pages: self._storage.backend.put(pages, self._level))

    def stop(self) -> None:
        """Put no further batch."""
        self._batches.stop()


class ProbeJob:
    """Ask storage which pages it has, all components and pools in one call."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, pages: Sequence[npt.NDArray[np.int64]]) -> None:
        """Ask for ``pages[c]`` of component ``c``."""
        self._storage = storage
        self._prompt = prompt
        self._pages = pages
        self._stopped = False
        self.present: list[Pages] = [np.zeros(len(asked), np.bool_) for asked in pages]
        """By component: whether storage has each page asked for, in every pool. None, until it has run."""

    def run(self) -> None:
        """Ask once."""
        if self._stopped:
            return
        storage, keys = self._storage, self._prompt.keys
        asked = [[keys[page] for page in pages.tolist()] for pages in self._pages]
        pools = [storage.pools(component) for component in range(len(asked))]
        labels = [
            label
            for specs, named in zip(pools, asked, strict=True)
            for pool in specs
            for label in storage.labels(named, pool)
        ]
        answers = np.array(storage.backend.exists(labels), np.bool_)
        end = 0
        for component, specs in enumerate(pools):
            present = np.ones(len(asked[component]), np.bool_)
            for _ in specs:
                start, end = end, end + len(present)
                present &= answers[start:end]
            self.present[component] = present

    def stop(self) -> None:
        """Ask nothing, if that has not begun."""
        self._stopped = True


class FetchJob:
    """Read pages from storage straight into host slots, KV before sidecars; each is verified by the backend."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[Part]) -> None:
        self._storage = storage
        self._batches = StorageBatches(storage, prompt, parts, storage.read_order)

    @property
    def arrived(self) -> list[Pages]:
        """By part: True where every pool's object of the page came whole. Nothing, until it has run."""
        return self._batches.whole

    def run(self) -> None:
        """Get."""
        self._batches.move(self._storage.backend.get)

    def stop(self) -> None:
        """Get no further batch."""
        self._batches.stop()
