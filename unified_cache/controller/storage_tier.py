"""One backend holding pages of one identity: what a page's objects are called, and where their bytes lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.config import StorageGuard
from unified_cache.controller.guard import guarded
from unified_cache.errors import ConfigError, StorageTimeoutError
from unified_cache.memory import PageMemory
from unified_cache.page import PageKey, Prompt
from unified_cache.pool import Identity, ModelLayout, Part, PoolSpec
from unified_cache.seal import Label
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import PageIO, StorageBackend
from unified_cache.storage_backends.verified import VerifiedStorage

__all__ = ["StorageTier"]


@dataclass(frozen=True, slots=True)
class StorageTier:
    """The L3 of one cache. Pool suffixes come from the layout's pools; pools without bytes have no objects."""

    backend: VerifiedStorage
    layout: ModelLayout
    identity: bytes
    """``Identity.digest``."""
    memory: PageMemory

    @classmethod
    def open(
        cls,
        store: StorageBackend,
        guard: StorageGuard | None,
        layout: ModelLayout,
        identity: Identity,
        memory: PageMemory,
    ) -> "StorageTier":
        """Take a store over and announce the layout to it; it is guarded unless ``guard`` is None, and verified.

        Raises:
            ConfigError: the layout has nothing with bytes that all prefixes share, which a look-up could go by.
            StorageError: the store does not take the layout.
        """
        first = layout.components[0]
        if not any(pool.page_bytes for pool in first.pools):
            raise ConfigError(f"storage needs a pool with bytes in {first.name}, found none")
        backend = VerifiedStorage(store if guard is None else guarded(store, guard))
        backend.register(manifest_of(identity, layout), memory.slabs())
        return cls(backend, layout, identity.digest(layout), memory)

    def close(self) -> list[str]:
        """Close the store; name the calls that it does not return from in time."""
        try:
            self.backend.close()
        except StorageTimeoutError as error:
            return [str(error)]
        return []

    def pools(self, component: int) -> tuple[PoolSpec, ...]:
        """Return the pools of a component that have objects."""
        return tuple(pool for pool in self.layout.components[component].pools if pool.page_bytes)

    def labels(self, keys: Sequence[PageKey], pool: PoolSpec) -> list[Label]:
        """Name the objects of one pool for these pages."""
        identity, name = self.identity, pool.name
        return [Label(identity, key, name) for key in keys]

    def pages(self, prompt: Prompt, parts: Sequence[Part]) -> list[tuple[int, int, PageIO]]:
        """List every object of ``parts``, KV before sidecars, as (part, index in part, page to read or write).

        The host slots are the parts' ``target``.
        """
        by_component = {part.component: number for number, part in enumerate(parts)}
        listed: list[tuple[int, int, PageIO]] = []
        keys = prompt.keys
        for component, pool in self.layout.transfer_order:
            if component not in by_component or not pool.page_bytes:
                continue
            number = by_component[component]
            pages = parts[number].pages.tolist()
            slots = parts[number].target.tolist()
            labels = self.labels([keys[page] for page in pages], pool)
            for index, (page, slot, label) in enumerate(zip(pages, slots, labels, strict=True)):
                parent = keys[page - 1] if page else None
                listed.append((number, index, PageIO(label, parent, self.memory.buffers(pool, slot))))
        return listed


def whole_pages(
    parts: Sequence[Part], listed: Sequence[tuple[int, int, PageIO]], ok: Sequence[bool]
) -> list[npt.NDArray[np.bool_]]:
    """Tell by part which pages are whole: a page counts only when every pool of its component has it."""
    whole = [np.ones(len(part), np.bool_) for part in parts]
    for (number, index, _), present in zip(listed, ok, strict=True):
        if not present:
            whole[number][index] = False
    return whole
