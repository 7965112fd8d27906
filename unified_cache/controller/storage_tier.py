"""One backend holding pages of one identity: what a page's objects are called, and where their bytes lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.memory import PageMemory
from unified_cache.page import Prompt
from unified_cache.pool import ModelLayout, Part, PoolSpec
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import PageIO
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

    def pools(self, component: int) -> tuple[PoolSpec, ...]:
        """Return the pools of a component that have objects."""
        return tuple(pool for pool in self.layout.components[component].pools if pool.page_bytes)

    def label(self, prompt: Prompt, page: int, pool: PoolSpec) -> Label:
        """Name one object."""
        return Label(self.identity, prompt.keys[page], pool.name)

    def pages(self, prompt: Prompt, parts: Sequence[Part]) -> list[tuple[int, int, PageIO]]:
        """List every object of ``parts``, KV before sidecars, as (part, index in part, page to read or write).

        The host slots are the parts' ``target``.
        """
        by_component = {part.component: number for number, part in enumerate(parts)}
        listed: list[tuple[int, int, PageIO]] = []
        for component, pool in self.layout.transfer_order:
            if component not in by_component or not pool.page_bytes:
                continue
            number = by_component[component]
            part = parts[number]
            for index, (page, slot) in enumerate(zip(part.pages.tolist(), part.target.tolist(), strict=True)):
                page_io = PageIO(
                    self.label(prompt, page, pool), prompt.parent_key(page), self.memory.buffers(pool, slot)
                )
                listed.append((number, index, page_io))
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
