"""The store of a cache that may be away when the cache opens: attached as soon as every rank of it has its own."""

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from unified_cache.controller.ranks.group import RankGroup, together
from unified_cache.controller.storage_tier import StorageTier
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import CacheError, StorageError
from unified_cache.storage_backends.common.breaker import Backoff
from unified_cache.storage_backends.common.call_threads import call_within
from unified_cache.storage_backends.common.opening import StoreOpening
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.guard import DECLARATION_S
from unified_cache.storage_backends.wrappers.layer import Method


class StoreArrival:
    """Opens a cache's store beside its owner, again after pauses, until every rank has its own; the owner asks.

    A store that is away is one whose opening failed in a way that passes by itself, or goes on. Any other failure is
    raised when the cache opens; later it is logged, and tried again.
    """

    __slots__ = ("_given", "_opening", "_ranks")

    def __init__(
        self,
        opened: Callable[[], StorageTier],
        given: Store | None,
        config: GuardConfig,
        ranks: RankGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``opened`` opens the store, or takes over the one that was ``given``."""
        pauses = Backoff(config.breaker_pause_s, config.breaker_pause_s_max)
        self._opening = StoreOpening(opened, lambda tier: tier.close(config.deadline_s), pauses, clock)
        self._given = given
        self._ranks = ranks

    def begin(self) -> StorageTier | None:
        """Try for ``DECLARATION_S`` at most; return the tier once every rank has its own.

        Raises:
            CacheError: what keeps the store away does not pass by itself; RankError on the other ranks.
        """
        self._opening.reach(DECLARATION_S)
        failure = self._opening.failure
        with together(self._ranks, "taking a store over"):
            if failure is not None and not (isinstance(failure, StorageError) and failure.retryable):
                raise failure if isinstance(failure, CacheError) else StorageError(str(failure), retryable=False)
        return self.poll()

    def poll(self) -> StorageTier | None:
        """Try again where that is due, without waiting; return the tier once every rank has its own.

        Raises:
            RankLostError: as ``RankGroup.agree``.
        """
        tier = self._opening.reach(0.0)
        return tier if self._ranks.agree(np.array([tier is not None], np.bool_))[0] else None

    def end(self, timeout_s: float) -> StorageTier | None:
        """Try no more; return the tier, which is the caller's to close, or close a store that was given."""
        tier = self._opening.close()
        if tier is None and self._given is not None:
            with suppress(StorageError):
                call_within(timeout_s, Method.CLOSE.value, self._given.close)
        return tier

    def leave(self, timeout_s: float) -> None:
        """Try no more, and close what was opened here; a store that was given stays its owner's."""
        tier = self._opening.close()
        if tier is not None and self._given is None:
            tier.close(timeout_s)
