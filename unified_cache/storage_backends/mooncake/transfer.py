"""Pages written to and read from a Mooncake cluster, in calls of a size that it likes, past nodes that fail."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from unified_cache.errors import StorageError
from unified_cache.storage_backends.mooncake.buffers import Piece, batches
from unified_cache.storage_backends.mooncake.client import Client
from unified_cache.storage_backends.mooncake.endpoints import Place
from unified_cache.storage_backends.mooncake.native import Code

__all__ = ["Moves"]

Call = Callable[[], list[int]]
"""A call of the client with all that it takes. Those of a run are made ready before the first one: after it, the
processor's caches hold pages, and each line of ours costs several times as much."""

PUTS = "puts"
"""Stands for the node that the next put goes to: the master chooses, nobody tells which one it was."""

FULL_PAUSES_S = (0.01, 0.04)
"""A full cluster evicts in the background: so long it is given, once a call, before what has no room is declined."""

QUOTA_EXCEEDED = -1700
"""A tenant's own lack of room."""

_NO_ROOM = frozenset({Code.NO_ROOM, QUOTA_EXCEEDED})
_UNREADABLE = frozenset({Code.TRANSFER_FAILED, Code.CHECKSUM_MISMATCH, Code.NOT_READY})


class Moves:
    """Puts and gets over a client. Thread-safe."""

    def __init__(self, client: Client, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._sleep = sleep

    # ---- put -------------------------------------------------------------------------------------------------

    def write(self, pieces: Sequence[Piece], known: dict[str, Place], *, grouped: bool) -> list[bool]:
        """Store objects; ``known`` are those of them that the cluster has. True for each that it has in the end.

        ``grouped`` has the objects of one page evicted together, at a price of some percent.

        A result of 0 says little: it is that of a key which another writer has reserved, too. So what was written is
        asked for, first pages last: they are the most recent ones then.
        """
        foreign = {piece.name for piece in pieces if piece.name in known and not _fits(piece, known[piece.name])}
        if foreign:
            self._client.remove(list(foreign))
        fresh = [piece for piece in pieces if piece.name not in known or piece.name in foreign]
        accepted = self._write_all(fresh, grouped=grouped) if fresh else []
        names = [piece.name for piece in reversed(accepted)]
        whole = {name for name, exists in zip(names, self._client.exist_aged(names), strict=True) if exists}
        self._client.places.forget(names)
        return [piece.name in whole or (piece.name in known and piece.name not in foreign) for piece in pieces]

    def _write_all(self, pieces: Sequence[Piece], *, grouped: bool) -> list[Piece]:
        """Put batch after batch; return what was accepted. After a failed transfer no more is tried for a while."""
        endpoints = self._client.endpoints
        pauses = list(FULL_PAUSES_S)
        accepted: list[Piece] = []
        for batch, put in [(batch, self._put(batch, grouped=grouped)) for batch in batches(pieces)]:
            if not endpoints.is_up(PUTS):
                break
            with endpoints.asking(PUTS):
                codes = put()
            if any(codes):
                codes = self._put_again(batch, codes, pauses, grouped=grouped)
                accepted += [piece for piece, code in zip(batch, codes, strict=True) if not code]
                self._judge_put(set(codes) - {0})
            else:
                accepted += batch
                endpoints.succeeded(PUTS)
        return accepted

    def _put_again(self, batch: Sequence[Piece], codes: list[int], pauses: list[float], *, grouped: bool) -> list[int]:
        """Put those that had no room again after each of the pauses that are left; return the codes after that."""
        while pauses and not _NO_ROOM.isdisjoint(codes):
            self._sleep(pauses.pop(0))
            declined = [at for at, code in enumerate(codes) if code in _NO_ROOM]
            again = self._put([batch[at] for at in declined], grouped=grouped)()
            for at, code in zip(declined, again, strict=True):
                codes[at] = code
        return codes

    def _judge_put(self, failed: set[int]) -> None:
        if Code.TRANSFER_FAILED in failed:
            self._client.endpoints.failed(PUTS)
        else:
            self._client.endpoints.succeeded(PUTS)
        strange = failed - _NO_ROOM - {Code.TRANSFER_FAILED}
        if strange:
            raise StorageError(f"Mooncake refused a put (codes {sorted(strange)})", retryable=False)

    def _put(self, batch: Sequence[Piece], *, grouped: bool) -> Call:
        config = self._client.put_config([_page_of(piece.name) for piece in batch] if grouped else ())
        if batch[0].is_whole:
            return partial(self._client.put, *_columns(batch), config)
        return partial(self._client.put_pieces, *_columns_of_pieces(batch), config)

    # ---- get -------------------------------------------------------------------------------------------------

    def read(self, pieces: Sequence[Piece]) -> set[int]:
        """Fill buffers; return the numbers of those that were filled.

        Node by node, so that one which fails takes no page of another with it, and the first pages last. An object of
        another size is removed.
        """
        endpoints = self._client.endpoints
        by_endpoint: dict[str, list[Piece]] = {}
        for piece, endpoint in self._found(pieces):
            by_endpoint.setdefault(endpoint, []).append(piece)
        hits: set[int] = set()
        for endpoint, held in by_endpoint.items():
            for batch, get in [(batch, self._get(batch)) for batch in batches(held[::-1])]:
                if not endpoints.is_up(endpoint):
                    break
                with endpoints.asking(endpoint):
                    hits |= self._read(batch, get, endpoint)
        return hits

    def _found(self, pieces: Sequence[Piece]) -> list[tuple[Piece, str]]:
        """Return those pieces that can be read, and whom from."""
        client = self._client
        names = [piece.name for piece in pieces]
        known = client.places.find(names)
        out = client.places.absent(names)
        unsure = [piece for piece in pieces if piece.name not in known or not _fits(piece, known[piece.name])]
        if unsure:
            unsure_names = [piece.name for piece in reversed(unsure)]
            asked = client.locate(unsure_names)
            foreign = [piece.name for piece in unsure if piece.name in asked and not _fits(piece, asked[piece.name])]
            if foreign:
                client.remove(foreign)
            out.update(foreign, set(unsure_names).difference(asked))
            known |= asked
        return [(piece, known[piece.name].endpoint) for piece in pieces if piece.name not in out]

    def _read(self, batch: Sequence[Piece], get: Call, endpoint: str) -> set[int]:
        client = self._client
        codes = get()
        if codes == [piece.object_bytes for piece in batch]:
            client.endpoints.succeeded(endpoint)
            return {piece.number for piece in batch}
        answers = list(zip(batch, codes, strict=True))
        hits = {piece.number for piece, code in answers if code == piece.object_bytes}
        missed = [(piece, code) for piece, code in answers if piece.number not in hits]
        client.places.forget([piece.name for piece, _ in missed])
        failed = {code for _, code in missed}
        client.places.make_absent(piece.name for piece, code in missed if code in _UNREADABLE)
        if Code.TRANSFER_FAILED in failed:
            client.endpoints.failed(endpoint)
        damaged = [piece.name for piece, code in missed if code == Code.CHECKSUM_MISMATCH]
        if damaged:
            client.remove(damaged)
        expired = [piece for piece, code in missed if code == Code.LEASE_EXPIRED]
        if len(expired) > 1:
            # Together they took longer than their lease; each half has a lease of its own.
            middle = len(expired) // 2
            for half in (expired[:middle], expired[middle:]):
                hits |= self._read(half, self._get(half), endpoint)
        return hits

    def _get(self, batch: Sequence[Piece]) -> Call:
        if batch[0].is_whole:
            return partial(self._client.get, *_columns(batch))
        return partial(self._client.get_pieces, *_columns_of_pieces(batch))


def _fits(piece: Piece, place: Place) -> bool:
    """Tell whether an object has the size of a page; of what lies on disks alone, nobody knows."""
    return place.object_bytes in (0, piece.object_bytes)


def _page_of(name: str) -> str:
    """Name what is evicted together: the objects of one page."""
    return name.partition(".")[0]


def _columns(batch: Sequence[Piece]) -> tuple[list[str], list[int], list[int]]:
    """Return names, pointers and sizes of objects of one buffer each."""
    return (
        [piece.name for piece in batch],
        [piece.pointers[0] for piece in batch],
        [piece.object_bytes for piece in batch],
    )


def _columns_of_pieces(batch: Sequence[Piece]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Return names, pointers and sizes of objects of several buffers each."""
    return [piece.name for piece in batch], [piece.pointers for piece in batch], [piece.sizes for piece in batch]
