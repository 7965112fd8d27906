"""Notes of what becomes of the pages of a cache that are not kept, for ``explain``, as values of a ring.

Evictions are noted by the tree, where it drops pages, and what a store lets go by ``page_changes``. All else is noted
here, by whoever drops, declines or loses pages; where nothing is to be remembered, that costs one question.
"""

from collections.abc import Sequence

import numpy as np

from unified_cache.forgotten import ForgottenPages
from unified_cache.miss_reason import MissReason
from unified_cache.page import Prompt
from unified_cache.page_digests import DIGEST_BYTES, digests_where, key_digests, prompt_digests
from unified_cache.pool import PageNumbers, Slots, Tier
from unified_cache.tree import RadixTree

__all__ = ["PageFates"]


class PageFates:
    """Notes of one cache about pages that its tree or its storage does not keep. One thread, the cache's owner."""

    __slots__ = ("_components_count", "_has_host", "_tree", "ring")

    def __init__(self, tree: RadixTree, ring: ForgottenPages | None, *, has_host: bool) -> None:
        """Note what becomes of the pages of a tree in ``ring``, or nothing where there is none."""
        self._tree = tree
        self._components_count = len(tree.components)
        self._has_host = has_host
        self.ring = ring
        """Remembers what is noted; None where nothing is to be remembered."""

    @property
    def remembers(self) -> bool:
        """Whether what is noted is kept."""
        return self.ring is not None

    def note_duplicates(
        self, tier: Tier, prompt: Prompt, start: int, slots: Sequence[Slots], duplicates: Sequence[Slots]
    ) -> None:
        """Note which of the pages [start, pages_count), given in ``slots``, the tree had already."""
        if self.ring is None or not any(map(len, duplicates)):
            return
        digests = prompt_digests(prompt)[start * DIGEST_BYTES :]
        for component, (given, left) in enumerate(zip(slots, duplicates, strict=True)):
            lane = int(tier) * self._components_count + component
            self.ring.note(lane, digests_where(digests, np.isin(given, left)), MissReason.DUPLICATE)

    def note_unbacked(self, prompt: Prompt, reason: MissReason) -> None:
        """Note why pages of a prompt that the device holds and the host lacks were not copied to it."""
        if self.ring is None or not self._has_host:
            return
        found = self._tree.peek(prompt)
        digests = prompt_digests(prompt.head(found.tree_end))
        for component in range(self._components_count):
            device, host = (self._tree.slots(found, tier, component, 0, found.tree_end) for tier in Tier)
            lane = self._components_count + component
            self.ring.note(lane, digests_where(digests, (device >= 0) & (host < 0)), reason)

    def note_stored(self, component: int, prompt: Prompt, pages: PageNumbers, reason: MissReason) -> None:
        """Note what became of pages in storage, or on their way there.

        Of those that it took STORE_LOST: where it lacks them later without a report, it has lost them.
        """
        if self.ring is not None and len(pages):
            keys = prompt.keys
            lane = len(Tier) * self._components_count + component
            self.ring.note(lane, key_digests([keys[page] for page in pages.tolist()]), reason)

    def note_storage_cleared(self) -> None:
        """Note that what was stored has been cleared since."""
        if self.ring is not None:
            self.ring.rename(MissReason.STORE_LOST, MissReason.STORE_CLEARED)
