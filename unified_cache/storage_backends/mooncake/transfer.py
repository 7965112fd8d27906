"""Pages written to and read from a Mooncake cluster, in calls of a size that it likes, past nodes that fail."""

import time
from collections.abc import Callable, Sequence

from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.mooncake.client import MooncakeClient, NativeCall, ObjectBuffers, batches
from unified_cache.storage_backends.mooncake.endpoints import ReplicaLocation
from unified_cache.storage_backends.mooncake.native import ResultCode
from unified_cache.storage_backends.protocol import Answer

__all__ = ["MooncakeIo"]

PUTS = "puts"
"""Stands for the node that the next put goes to: the master chooses, nobody tells which one it was."""

FULL_PAUSES_S = (0.01, 0.04)
"""A full cluster evicts in the background: so long it is given, once a call, before what has no room is declined."""

QUOTA_EXCEEDED = -1700
"""A tenant's own lack of room."""

_NO_ROOM = frozenset({ResultCode.NO_ROOM, QUOTA_EXCEEDED})
_UNREADABLE = frozenset({ResultCode.TRANSFER_FAILED, ResultCode.CHECKSUM_MISMATCH, ResultCode.NOT_READY})


class MooncakeIo:
    """Puts and gets over a client. Thread-safe."""

    def __init__(self, client: MooncakeClient, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._sleep = sleep

    # ---- put -------------------------------------------------------------------------------------------------

    def write(
        self, objects: Sequence[ObjectBuffers], known: dict[str, ReplicaLocation], *, grouped: bool
    ) -> list[Answer]:
        """Store objects; ``known`` are those of them that the cluster has. STORED for each that it has in the end.

        ``grouped`` has the objects of one page evicted together, at a price of some percent.

        A result of 0 says little: it is that of a key which another writer has reserved, too. So what was written is
        asked for, first pages last: they are the most recent ones then.
        """
        foreign = {item.name for item in objects if item.name in known and not _fits(item, known[item.name])}
        if foreign:
            self._client.remove(list(foreign))
        fresh = [item for item in objects if item.name not in known or item.name in foreign]
        accepted, declined = self._write_all(fresh, grouped=grouped) if fresh else ([], set())
        names = [item.name for item in reversed(accepted)]
        whole = {name for name, exists in zip(names, self._client.exist_aged(names), strict=True) if exists}
        self._client.locations.forget(names)
        whole |= known.keys() - foreign
        return [
            Answer.STORED if item.name in whole else Answer.DECLINED if item.name in declined else Answer.UNAVAILABLE
            for item in objects
        ]

    def _write_all(self, objects: Sequence[ObjectBuffers], *, grouped: bool) -> tuple[list[ObjectBuffers], set[str]]:
        """Put batch after batch, none after a failed transfer; return what was accepted, and names that had no room."""
        endpoints = self._client.endpoints
        pauses = list(FULL_PAUSES_S)
        accepted: list[ObjectBuffers] = []
        declined: set[str] = set()
        node = self._client.choice.node()
        for batch, put in [(batch, self._put(batch, node, grouped=grouped)) for batch in batches(objects)]:
            if not endpoints.is_up(PUTS):
                break
            with endpoints.asking(PUTS):
                codes = put()
            if any(codes):
                codes = self._put_again(batch, codes, pauses, grouped=grouped)
                if ResultCode.TRANSFER_FAILED in codes:
                    self._client.choice.avoid(node)
                accepted += [item for item, code in zip(batch, codes, strict=True) if not code]
                declined |= {item.name for item, code in zip(batch, codes, strict=True) if code in _NO_ROOM}
                self._judge_put(set(codes) - {0})
            else:
                accepted += batch
                endpoints.succeeded(PUTS)
        return accepted, declined

    def _put_again(
        self, batch: Sequence[ObjectBuffers], codes: list[int], pauses: list[float], *, grouped: bool
    ) -> list[int]:
        """Put those that had no room again after each of the pauses that are left; return the codes after that."""
        while pauses and not _NO_ROOM.isdisjoint(codes):
            self._sleep(pauses.pop(0))
            declined = [at for at, code in enumerate(codes) if code in _NO_ROOM]
            again = self._put([batch[at] for at in declined], "", grouped=grouped)()
            for at, code in zip(declined, again, strict=True):
                codes[at] = code
        return codes

    def _judge_put(self, failed: set[int]) -> None:
        if ResultCode.TRANSFER_FAILED in failed:
            self._client.endpoints.failed(PUTS)
        else:
            self._client.endpoints.succeeded(PUTS)
        strange = failed - _NO_ROOM - {ResultCode.TRANSFER_FAILED}
        if strange:
            raise StorageError(f"Mooncake refused a put (codes {sorted(strange)})", retryable=False)

    def _put(self, batch: Sequence[ObjectBuffers], node: str, *, grouped: bool) -> NativeCall:
        config = self._client.put_config([_page_of(item.name) for item in batch] if grouped else (), node=node)
        return self._client.putting(batch, config)

    # ---- get -------------------------------------------------------------------------------------------------

    def read(self, objects: Sequence[ObjectBuffers]) -> dict[int, Answer]:
        """Fill buffers; return the answer for each item by its number.

        Node by node, so that one which fails takes no page of another with it, and the first pages last. An object of
        another size is removed.
        """
        endpoints = self._client.endpoints
        answers: dict[int, Answer] = {}
        by_endpoint: dict[str, list[ObjectBuffers]] = {}
        for item, endpoint in self._found(objects, answers):
            answers[item.number] = Answer.UNAVAILABLE
            by_endpoint.setdefault(endpoint, []).append(item)
        for endpoint, held in by_endpoint.items():
            for batch, get in [(batch, self._client.getting(batch)) for batch in batches(held[::-1])]:
                if not endpoints.is_up(endpoint):
                    break
                with endpoints.asking(endpoint):
                    answers |= self._read(batch, get, endpoint)
        return answers

    def _found(self, objects: Sequence[ObjectBuffers], answers: dict[int, Answer]) -> list[tuple[ObjectBuffers, str]]:
        """Return those objects that can be read, and whom from; note the answers for the others."""
        client = self._client
        names = [item.name for item in objects]
        known = client.locations.find(names)
        unreadable = client.locations.absent(names)
        out: set[str] = set()
        foreign: list[str] = []
        unsure = [item for item in objects if item.name not in known or not _fits(item, known[item.name])]
        if unsure:
            unsure_names = [item.name for item in reversed(unsure)]
            asked = client.locate(unsure_names)
            foreign = [item.name for item in unsure if item.name in asked and not _fits(item, asked[item.name])]
            if foreign:
                client.remove(foreign)
            out.update(foreign, set(unsure_names).difference(asked))
            known |= asked
        for item in objects:
            if item.name in foreign:
                answers[item.number] = Answer.FLAWED
            elif item.name in out:
                answers[item.number] = Answer.MISS
            elif item.name in unreadable:
                answers[item.number] = Answer.UNAVAILABLE
        return [(item, known[item.name].endpoint) for item in objects if item.number not in answers]

    def _read(self, batch: Sequence[ObjectBuffers], get: NativeCall, endpoint: str) -> dict[int, Answer]:
        client = self._client
        codes = get()
        if codes == [item.object_bytes for item in batch]:
            client.endpoints.succeeded(endpoint)
            return {item.number: Answer.HIT for item in batch}
        read = list(zip(batch, codes, strict=True))
        answers = {item.number: _answer(item, code) for item, code in read}
        missed = [(item, code) for item, code in read if not answers[item.number]]
        client.locations.forget([item.name for item, _ in missed])
        failed = {code for _, code in missed}
        client.locations.make_absent(item.name for item, code in missed if code in _UNREADABLE)
        if ResultCode.TRANSFER_FAILED in failed:
            client.endpoints.failed(endpoint)
        damaged = [item.name for item, code in missed if code == ResultCode.CHECKSUM_MISMATCH]
        if damaged:
            client.remove(damaged)
        expired = [item for item, code in missed if code == ResultCode.LEASE_EXPIRED]
        if len(expired) > 1:
            # Together they took longer than their lease; each half has a lease of its own.
            middle = len(expired) // 2
            for half in (expired[:middle], expired[middle:]):
                answers |= self._read(half, self._client.getting(half), endpoint)
        return answers


def _answer(item: ObjectBuffers, code: int) -> Answer:
    if code == item.object_bytes:
        return Answer.HIT
    if code == ResultCode.CHECKSUM_MISMATCH:
        return Answer.FLAWED
    return Answer.UNAVAILABLE if code in _UNREADABLE or code == ResultCode.LEASE_EXPIRED else Answer.MISS


def _fits(item: ObjectBuffers, location: ReplicaLocation) -> bool:
    """Return whether an object has the size of a page; of what lies on disks alone, nobody knows."""
    return location.object_bytes in (0, item.object_bytes)


def _page_of(name: str) -> str:
    """Name what is evicted together: the objects of one page."""
    return name.partition(".")[0]
