"""The jobs of operations: bytes moved between tiers, on a worker's thread."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from unified_cache.controller.operation import JobQueue
from unified_cache.controller.storage_tier import StorageTier, whole_pages
from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import ModelLayout, Part
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Level

__all__ = ["BackupJob", "FetchJob", "LoadJob", "ProbeJob", "StoreJob"]


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


class StoreJob:
    """Write sealed host pages to storage, KV before sidecars."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[Part], level: Level) -> None:
        self._storage = storage
        self._prompt = prompt
        self._parts = parts
        self._level = level
        self.stored: list[Part] = []
        """Pages of which every object is stored at the level asked for. None, until it has run."""

    def run(self) -> None:
        """Put all objects in one batch."""
        listed = self._storage.pages(self._prompt, self._parts)
        stored = self._storage.backend.put([page for _, _, page in listed], self._level)
        self.stored = [
            part.where(whole) for part, whole in zip(self._parts, whole_pages(self._parts, listed, stored), strict=True)
        ]


class ProbeJob:
    """Ask storage which pages it has, all components and pools in one call."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, start: int) -> None:
        self._storage = storage
        self._prompt = prompt
        self._start = start
        count = prompt.pages_count - start
        self.missing: list[npt.NDArray[np.bool_]] = [np.ones(count, np.bool_) for _ in storage.layout.components]
        """By component: True where storage lacks page ``start + i``. Everything, until it has run."""

    def run(self) -> None:
        """Ask once, for pages [start, pages_count)."""
        storage = self._storage
        keys = self._prompt.keys[self._start :]
        pools = [storage.pools(component) for component in range(len(storage.layout.components))]
        labels = [label for specs in pools for pool in specs for label in storage.labels(keys, pool)]
        present = np.array(storage.backend.exists(labels), np.bool_).reshape(-1, len(keys))
        row = 0
        for component, specs in enumerate(pools):
            self.missing[component] = np.logical_not(present[row : row + len(specs)].all(axis=0))
            row += len(specs)


class FetchJob:
    """Read pages from storage straight into host slots, KV before sidecars; each is verified by the backend."""

    queue = JobQueue.STORAGE

    def __init__(self, storage: StorageTier, prompt: Prompt, parts: Sequence[Part]) -> None:
        self._storage = storage
        self._prompt = prompt
        self._parts = parts
        self.arrived: list[npt.NDArray[np.bool_]] = [np.zeros(len(part), np.bool_) for part in parts]
        """By part: True where every pool's object of the page came whole. Nothing, until it has run."""

    def run(self) -> None:
        """Get all objects in one batch."""
        listed = self._storage.pages(self._prompt, self._parts)
        self.arrived = whole_pages(self._parts, listed, self._storage.backend.get([page for _, _, page in listed]))
