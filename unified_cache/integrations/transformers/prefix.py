"""Beginning of every request: the cached prefix of its prompt is brought to the device and locked there."""

from collections.abc import Iterator
from dataclasses import dataclass

from unified_cache.cache import UnifiedCache
from unified_cache.controller import Operation, OperationState
from unified_cache.integrations.transformers.stage import Stage
from unified_cache.page import Prompt
from unified_cache.tree import Lock

__all__ = ["PrefixRestore", "Reused"]


@dataclass(frozen=True, slots=True)
class Reused:
    """Tokens of a prompt that were not computed again, by the tier that they came from."""

    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.device_tokens + self.host_tokens + self.storage_tokens


class PrefixRestore:
    """Brings the longest prefix of a prompt that any tier holds to the device, and counts the tokens of each tier."""

    __slots__ = ("_cache", "_operation", "_prompt", "ends", "lock", "reused")

    def __init__(self, cache: UnifiedCache, prompt: Prompt) -> None:
        self._cache = cache
        self._prompt = prompt
        self._operation: Operation | None = None
        self.lock: Lock | None = None
        """Pins the prefix, once it is there. Whoever takes it sets it to None; else ``abort`` releases it."""
        self.reused = Reused()
        self.ends: frozenset[int] = frozenset()
        """Ends, in pages, at which later requests can resume; see ``UnifiedCache.checkpoint_ends``."""

    def steps(self) -> Iterator[Stage]:
        """Start what is to be moved; yield as long as it moves. The owner polls the cache between two steps."""
        cache, prompt = self._cache, self._prompt
        at_first = cache.match(prompt)
        on_device, in_memory = at_first.device_end, at_first.host_end
        if in_memory < prompt.reusable_pages:
            yield from self._awaiting(cache.prefetch(prompt), Stage.FETCH)
        found = cache.match(prompt)
        if found.host_end > found.device_end:
            yield from self._awaiting(cache.load(prompt), Stage.LOAD)
        found = cache.match(prompt)
        self.ends = frozenset(cache.checkpoint_ends(found))
        self.lock = cache.lock(found)
        end = self.lock.end
        device, memory = min(on_device, end), min(in_memory, end)
        stored = end - memory
        self.reused = Reused(*(count * prompt.page_size for count in (device, memory - device, stored)))

    def _awaiting(self, operation: Operation | None, stage: Stage) -> Iterator[Stage]:
        """Yield while a transfer is under way. What one does not bring that fails or was declined is computed."""
        self._operation = operation
        while operation is not None and operation.state is OperationState.RUNNING:
            yield stage
        self._operation = None

    def abort(self) -> None:
        """Cancel what moves and release what is pinned. Twice is once."""
        if self._operation is not None:
            self._cache.cancel(self._operation)
            self._operation = None
        if self.lock is not None:
            self._cache.release(self.lock)
            self.lock = None
