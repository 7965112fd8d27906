"""Liveness of backups: each page that a write policy means to store is stored in the end, or counted as given up."""

from collections.abc import Mapping

from tests.support.store_calls import ScriptedStorage
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import NotStarted, Operation, PageTally
from unified_cache.controller.backup import BackupRequest
from unified_cache.core.page import PageKey, Prompt
from unified_cache.core.pool import numbers_of
from unified_cache.core.seal import Label


class Liveness:
    """Remembers all pages that the policy of one cache asks to back up, and what the stores said that they have."""

    def __init__(self, cache: UnifiedCache, owners: Mapping[str, bytes]) -> None:
        self._cache = cache
        self._owners = owners
        self._request_of = cache._scheduler._request_of
        self._asked: dict[tuple[int, PageKey], None] = {}
        self._started = cache._scheduler.started
        self._on_host_alone: list[PageTally] = []
        """Backups that went no further than the host, since there was no store."""
        self.stores: list[ScriptedStorage] = []
        # To see each backup of the policy:
        cache._scheduler._request_of = self._ask  # type: ignore[method-assign]
        cache._scheduler.started = self._note  # type: ignore[method-assign]

    def _ask(self, prompt: Prompt) -> BackupRequest:
        request = self._request_of(prompt)
        for component in range(len(self._cache.layout.components)):
            pages = numbers_of(request.waiting(component)).tolist()
            self._asked.update(((component, prompt.keys[page]), None) for page in pages)
        return request

    def _note(self, request: BackupRequest, operation: Operation | NotStarted) -> None:
        if operation and self._cache._storage is None:
            self._on_host_alone.append(operation.tally)
        self._started(request, operation)

    def check(self) -> None:
        """Assert that nothing waits any more, that counts add up, and that no page is missing in silence."""
        backups = self._cache.stats().backups
        assert not backups.waiting_pages, f"backups wait for ever: {backups!r}"
        accounted = backups.arrived_pages + backups.already_pages + backups.lost_pages_count
        assert backups.asked_pages == accounted, f"counts do not add up: {backups!r}"
        known: set[Label] = set().union(*(store.known for store in self.stores))
        missing = 0
        for component, key in self._asked:
            pools = [pool for pool in self._cache.layout.components[component].pools if pool.page_bytes]
            missing += not all(Label(self._owners[pool.name], key, pool.name) in known for pool in pools)
        excused = backups.lost_pages_count + sum(tally.arrived + tally.already for tally in self._on_host_alone)
        assert missing <= excused, f"{missing} pages are lost in silence, {excused} are accounted for"
