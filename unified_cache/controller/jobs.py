"""The jobs of operations: bytes moved between tiers, on a worker's thread."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from unified_cache.controller.operation import JobQueue
from unified_cache.controller.storage_tier import StorageTier, whole_pages
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import ModelLayout, Part
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Level, PageIO

__all__ = ["BackupJob", "FetchJob", "LoadJob", "ProbeJob", "StoreJob"]

STORAGE_BATCH_OBJECTS = 128
"""Objects per call to a store: between two calls a job can be stopped, and what came before stays."""


class BackupJob:
    """Copy pages device to host, KV before sidecars, and seal each as soon as its pool is complete."""

    queue = JobQueue.COPY

    def __init__(
        self, memory: PageMemory, layout: ModelLayout, identity: bytes, prompt: Prompt, parts: Sequence[Part]
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._identity = identity
        self._prompt = prompt
        self._parts = {part.component: part for part in parts}

    def run(self) -> None:
        """Copy, then seal."""
        keys = self._prompt.keys
        for component, pool in self._layout.transfer_order:
            part = self._parts.get(component)
            if part is not None:
                self._memory.backup(pool, part.source, part.target)
                labels = [Label(self._identity, keys[page], pool.name) for page in part.pages.tolist()]
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
    """Objects of a transfer's parts, written to or read from storage batch by batch, KV before sidecars."""

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[Part]) -> None:
        self._storage = storage
        self._prompt = prompt
        self._parts = parts
        self._listed: list[tuple[int, int, PageIO]] = []
        self._done: list[bool] = []
        """Of the objects listed first: whether each was moved."""
        self._stopped = False

    @property
    def whole(self) -> list[npt.NDArray[np.bool_]]:
        """By part, shape (pages,): True where every object of the page was moved. Nothing, until it has run."""
        if not self._listed:
            return [np.zeros(len(part), np.bool_) for part in self._parts]
        done = self._done + [False] * (len(self._listed) - len(self._done))
        return whole_pages(self._parts, self._listed, done)

    def move(self, call: Callable[[list[PageIO]], list[bool]]) -> None:
        """Call the store for one batch after the other, until all are moved, one raises, or somebody stops it."""
        self._listed = self._storage.pages(self._prompt, self._parts)
        while len(self._done) < len(self._listed) and not self._stopped:
            start = len(self._done)
            self._done += call([page for _, _, page in self._listed[start : start + STORAGE_BATCH_OBJECTS]])

    def stop(self) -> None:
        """Call the store no more."""
        self._stopped = True


class StoreJob:
    """Write sealed host pages to storage, KV before sidecars."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[Part], level: Level) -> None:
        self._storage = storage
        self._parts = parts
        self._level = level
        self._batches = StorageBatches(storage, prompt, parts)

    @property
    def stored(self) -> list[Part]:
        """Pages of which every object is stored at the level asked for. None, until it has run."""
        return [part.where(whole) for part, whole in zip(self._parts, self._batches.whole, strict=True)]

    def run(self) -> None:
        """Put."""
        self._batches.move(lambda pages: self._storage.backend.put(pages, self._level))

    def stop(self) -> None:
        """Put no further batch."""
        self._batches.stop()


class ProbeJob:
    """Ask storage which pages it has, all components and pools in one call."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, start: int) -> None:
        self._storage = storage
        self._prompt = prompt
        self._start = start
        self._stopped = False
        count = prompt.pages_count - start
        self.missing: list[npt.NDArray[np.bool_]] = [np.ones(count, np.bool_) for _ in storage.layout.components]
        """By component: True where storage lacks page ``start + i``. Everything, until it has run."""

    def run(self) -> None:
        """Ask once, for pages [start, pages_count)."""
        if self._stopped:
            return
        storage = self._storage
        keys = self._prompt.keys[self._start :]
        pools = [storage.pools(component) for component in range(len(storage.layout.components))]
        labels = [label for specs in pools for pool in specs for label in storage.labels(keys, pool)]
        present = np.array(storage.backend.exists(labels), np.bool_).reshape(-1, len(keys))
        row = 0
        for component, specs in enumerate(pools):
            self.missing[component] = np.logical_not(present[row : row + len(specs)].all(axis=0))
            row += len(specs)

    def stop(self) -> None:
        """Ask nothing, if that has not begun."""
        self._stopped = True


class FetchJob:
    """Read pages from storage straight into host slots, KV before sidecars; each is verified by the backend."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[Part]) -> None:
        self._storage = storage
        self._batches = StorageBatches(storage, prompt, parts)

    @property
    def arrived(self) -> list[npt.NDArray[np.bool_]]:
        """By part: True where every pool's object of the page came whole. Nothing, until it has run."""
        return self._batches.whole

    def run(self) -> None:
        """Get."""
        self._batches.move(self._storage.backend.get)

    def stop(self) -> None:
        """Get no further batch."""
        self._batches.stop()
