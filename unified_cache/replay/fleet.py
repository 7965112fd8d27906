"""Several engines of a replay, each with its own device and host memory, over one store or a store each."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from unified_cache.replay.missed import MissCounter
from unified_cache.replay.plan import ReplayPlan
from unified_cache.replay.player import Player
from unified_cache.replay.result import Hits
from unified_cache.replay.trace import TraceRequest
from unified_cache.storage_backends.memory import keys_only_storage
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.url import check_storage_url, open_storage

__all__ = ["Fleet", "served_hits"]


class Fleet:
    """Engines that take requests in turn (round robin), as from a load balancer that does not know their caches.

    Use it in a ``with`` block.
    """

    def __init__(
        self, players: list[Player], store_bytes: int | None, doors: ExitStack, misses: MissCounter | None = None
    ) -> None:
        """Take the players, and the stack that closes them and their stores."""
        self.players = players
        self.store_bytes = store_bytes
        """Cap on the bytes of all engines in storage together; None for no cap."""
        self.misses = misses
        """Counts the missed tokens of all players; None where nobody asks for reasons."""
        self._doors = doors
        self._served = 0

    @classmethod
    def sharing(cls, plan: ReplayPlan) -> Self:
        """Open the store of ``plan``, and its engines over it.

        Raises:
            ConfigError: memory does not suffice, or the storage URL names nothing.
            StorageError: the store cannot be opened.

        """
        with ExitStack() as doors:
            store = _open_store(plan)
            if store is not None:
                doors.callback(store.close)
            misses = MissCounter(plan.layout.components[0].name) if plan.explains else None
            players = [doors.enter_context(Player.open(plan, store, misses)) for _ in range(plan.engines)]
            store_bytes = None if store is None else store.capability().bytes_max
            return cls(players, store_bytes, doors.pop_all(), misses)

    @classmethod
    def private(cls, plan: ReplayPlan, store_bytes: int | None) -> Self:
        """Open the engines of ``plan`` without bytes, each over an equal part of ``store_bytes``.

        Their hits are the same as with bytes.
        """
        part = None if store_bytes is None else store_bytes // plan.engines
        alone = plan.without_bytes()
        with ExitStack() as doors:
            stores = [keys_only_storage(part, plan.objects()) for _ in range(plan.engines)]
            players = [doors.enter_context(Player.open(alone, store)) for store in stores]
            return cls(players, store_bytes, doors.pop_all())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._doors.close()

    def serve(self, request: TraceRequest) -> Hits:
        """Let the next engine serve a request, after every transfer of the engine before it has ended.

        Raises:
            StorageError, CopyError: a transfer failed.

        """
        self.players[self._served % len(self.players) - 1].wait_all()
        player = self.players[self._served % len(self.players)]
        self._served += 1
        return player.serve(request)

    def wait_all(self) -> None:
        """Wait until every transfer is over.

        Raises:
            StorageError, CopyError: one failed.

        """
        for player in self.players:
            player.wait_all()


def served_hits(plan: ReplayPlan, requests: Sequence[TraceRequest]) -> list[Hits]:
    """Serve requests by caches of a plan; return the pages handed back of each.

    Raises:
        ConfigError: memory does not suffice, or the storage URL names nothing.
        StorageError, CopyError: a transfer failed.

    """
    with Fleet.sharing(plan) as fleet:
        hits = [fleet.serve(request) for request in requests]
        fleet.wait_all()
    return hits


def _open_store(plan: ReplayPlan) -> StorageBackend | None:
    """Open the store of ``plan``; for a run without bytes check its URL and open a keys-only store of the same cap.

    Raises:
        ConfigError: the URL names nothing.
        StorageError: the store cannot be opened.

    """
    if plan.storage is None:
        return None
    if plan.with_bytes:
        return open_storage(plan.storage, bytes_max=plan.storage_bytes)
    check_storage_url(plan.storage)
    return keys_only_storage(plan.storage_bytes, plan.objects())
