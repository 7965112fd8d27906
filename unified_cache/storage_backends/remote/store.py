"""The client of the service: one store behind one or more servers, over gRPC.

    grpc://HOST:PORT[,HOST:PORT...][?timeout_s=10&channels=2&token_file=FILE]
    grpcs://...[?ca_file=FILE&cert_file=FILE&key_file=FILE&server_name=NAME]

Each page belongs to one server, by rendezvous hashing over the servers' names, so that their memories add up; where
that one fails, the next stands in. Servers may share one store, or have one each: then a page put while its server was
away is a miss once it is back.

Bytes are believed as little as any store's: wrap it in ``VerifiedStorage``, as an engine does.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby, zip_longest
from threading import Lock
from typing import NamedTuple

import grpc
from google.protobuf.message import Message
from xxhash import xxh3_64_intdigest

from unified_cache.core.errors import ConfigError, InputError, StorageError
from unified_cache.core.page import PageKey
from unified_cache.core.seal import Label
from unified_cache.core.sizes import PART_BYTES
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire import Call, decoded, labels_in, named_runs, parsed, parts_of
from unified_cache.storage_backends.common.bounded_call import CallsInFlight, time_left_s
from unified_cache.storage_backends.common.names import check_scan
from unified_cache.storage_backends.protocol import (
    NETWORK_BYTES,
    Answer,
    Capability,
    Level,
    PageIO,
    Scan,
    Store,
    StoredObject,
    page_bytes,
)
from unified_cache.storage_backends.remote.answers import ScatterReader, answers_of
from unified_cache.storage_backends.remote.server import (
    Server,
    is_passing,
    storage_error,
    wants_hello,
)
from unified_cache.storage_backends.remote.url import RemoteOptions, parse_rest

PAGES_PER_CALL = 4096
"""Pages named in one request, where the server takes as many: their names fit into a message."""

CALLS_AHEAD = 2
"""Calls of one request under way at a time, for each server."""

ONE_MESSAGE_PARTS = 3
"""A put of no more bytes than so many parts is one message, which fits what a server takes: a stream of two costs half
as much processor time again, on top of a thread of gRPC's."""

FREED_BYTES = (32 << 20) - (64 << 10)
"""Size of a block that is asked of malloc and freed: from then on glibc's keeps twice as much of what is freed. Before,
it gives each message back to the system, whose page faults are a third of this client's time."""

Exchange = Generator[None, None, None]
"""One call to one server: begins it, yields, then waits for it and records its answers.

Raises ``grpc.RpcError`` or ``InputError`` where it failed, and what reading the pages of a put raises.
"""


class RequestTime:
    """Time that all calls of one request may take together, and what is left of it for the next one."""

    def __init__(self, clock: Callable[[], float], timeout_s: float, total_s: float) -> None:
        """``timeout_s`` is that of one call, ``total_s`` of all; less where the caller has less."""
        self._clock = clock
        self._timeout_s = timeout_s
        self._ends_s = clock() + min(total_s, time_left_s())

    def left_s(self) -> float:
        """Return the seconds until the request is over; 0 once it is."""
        return max(0.0, self._ends_s - self._clock())

    def timeout_s(self) -> float:
        """Return the seconds that the next try may take."""
        return min(self._timeout_s, self.left_s())


class ServerBatch(NamedTuple):
    """Pages of one call to one server."""

    server: Server
    numbers: list[int]
    """Positions in what was asked for."""
    time: RequestTime
    """Of the request that it is a part of."""
    is_only: bool = False
    """Whether nothing else is asked for meanwhile, so that the waiting caller may as well make the call."""

    def ask(self, call: Call, request: Message) -> Callable[[], bytes]:
        """Begin a call of one message each way, as ``Server.ask`` does."""
        return self.server.ask(call, request.SerializeToString(), self.time.timeout_s(), is_only=self.is_only)


class GatedMessages:
    """Messages of one put, made from its pages when they are asked for: by a thread of gRPC's, until it is over.

    gRPC ends a call without waiting for that thread, which may be at a message then. The waiting caller closes these:
    no message is under way after that, none is made any more, and nothing refers to the pages. Thread-safe.
    """

    def __init__(self, messages: Generator[bytes, None, None]) -> None:
        self._messages = messages
        self._guard = Lock()

    def __iter__(self) -> "GatedMessages":
        return self

    def __next__(self) -> bytes:
        with self._guard:
            return next(self._messages)

    def close(self) -> None:
        """Wait for the message that is being made, about a MiB, and make no other."""
        with self._guard:
            self._messages.close()


def cut(server: Server, numbers: Sequence[int], time: RequestTime, *, is_only: bool) -> Iterator[ServerBatch]:
    """Cut the pages of one server, the only one or one of several, into calls."""
    pages_max = min(PAGES_PER_CALL, server.agreed.pages_max if server.agreed is not None else PAGES_PER_CALL)
    is_only = is_only and len(numbers) <= pages_max
    for start in range(0, len(numbers), pages_max):
        yield ServerBatch(server, list(numbers[start : start + pages_max]), time, is_only)


def put_messages(pages: Sequence[PageIO], level: Level, part_bytes: int) -> Generator[bytes, None, None]:
    """Yield the start of a put with the first of its pages, then the others."""
    wanted = pb.DURABLE if level is Level.DURABLE else pb.CACHED
    start = pb.PutPart(start=pb.PutStart(level=wanted, runs=sized_runs(pages))).SerializeToString()
    yield from parts_of(((b"", page.buffers) for page in pages), part_bytes, start)


def _part_bytes(server: Server) -> int:
    return min(PART_BYTES, server.agreed.part_bytes if server.agreed is not None else PART_BYTES)


def sized_runs(pages: Sequence[PageIO]) -> list[pb.PageRun]:
    """Name pages with their lengths."""
    return [
        pb.PageRun(identity=identity, pool=pool, keys=[page.label.key for page in run], object_bytes=object_bytes)
        for (identity, pool, object_bytes), run in groupby(pages, _run_of)
    ]


def _run_of(page: PageIO) -> tuple[bytes, str, int]:
    return page.label.identity, page.label.pool, page_bytes(page)


class RemoteStorage(Store):
    """Exchange sealed pages with servers. Exists, get and put are tried elsewhere where a server fails; remove is not.

    Pages that no server answers for are UNAVAILABLE where others of their batch were answered; where none was, the last
    error is raised. Thread-safe.

    Exists, get, put and touch are bounded: they take at most the timeout times servers, or what is left to the call
    that they are a part of. Only the thread that asked writes into pages that are got, and what reads the
    pages of a put is stopped before that returns.
    """

    def __init__(
        self, options: RemoteOptions, servers: Sequence[Server], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._servers = servers
        self._timeout_s = options.timeout_s
        self._clock = clock
        self._hash = RendezvousHash(options.servers)
        self._call_s_max = len(servers) * options.timeout_s
        self._manifests: dict[bytes, Manifest] = {}
        self._calls = CallsInFlight(f"the service at {','.join(options.servers)}")

    @classmethod
    def open(cls, options: RemoteOptions, clock: Callable[[], float] = time.monotonic) -> "RemoteStorage":
        """Open connections to servers; nothing is sent before the first call. The caller closes it."""
        bytes(FREED_BYTES)  # not touched
        return cls(options, [Server.connect(name, options, clock) for name in options.servers], clock)

    def capability(self) -> Capability:
        """Return the abilities of the service. Its cap is shared with others, and none of this client's own."""
        with self._calls:
            durable = all(reply.durable for reply in self._greet_all({}))
            return Capability(
                "remote",
                durable=durable,
                bytes_max=None,
                call_s_max=self._call_s_max,
                call_bytes=NETWORK_BYTES,
                bounded=True,
                shares_cap=True,
            )

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Send Hello for an identity to every server that answers; to the others before their first call."""
        with self._calls:
            self._greet_all({manifest.identity: manifest})
            self._manifests[manifest.identity] = manifest

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask each page's server; pages of identities that were not registered are UNAVAILABLE."""
        with self._calls:
            return self._exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers, from all servers at a time."""
        with self._calls:
            labels = [page.label for page in pages]
            hits = self._unanswered(labels)

            def exchange(batch: ServerBatch) -> Exchange:
                chosen = [pages[number] for number in batch.numbers]
                request = pb.GetRequest(runs=sized_runs(chosen)).SerializeToString()
                is_one = sum(map(page_bytes, chosen)) <= _part_bytes(batch.server)
                parts = batch.server.get(request, batch.time.timeout_s(), is_one=is_one, is_only=batch.is_only)
                yield
                reader = ScatterReader(chosen)
                try:
                    for message in parts:
                        reader.take(decoded(message))
                finally:
                    for number, hit in zip(batch.numbers, reader.hits, strict=True):
                        hits[number] = hit

            self._send_with_failover(labels, hits, Call.GET, exchange)
            return _complete(hits)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages, at all servers at a time. Raises InputError for an identity that was not registered."""
        with self._calls:
            for page in pages:
                if page.label.identity not in self._manifests:
                    raise InputError(f"register identity {page.label.identity.hex()} before its pages are put")
            stored: list[Answer | None] = [None] * len(pages)

            def exchange(batch: ServerBatch) -> Exchange:
                chosen = [pages[number] for number in batch.numbers]
                part_bytes = _part_bytes(batch.server)
                is_one = sum(map(page_bytes, chosen)) <= ONE_MESSAGE_PARTS * part_bytes
                parts = put_messages(chosen, level, ONE_MESSAGE_PARTS * part_bytes if is_one else part_bytes)
                with closing(GatedMessages(parts)) as messages:
                    sent = next(messages) if is_one else messages
                    answer = batch.server.put(sent, batch.time.timeout_s(), is_only=batch.is_only)
                    yield
                    reply = parsed(pb.PutReply, answer())
                yes, no = Answer.STORED, Answer.DECLINED
                kept = answers_of(reply.stored, reply.reasons, len(batch.numbers), yes=yes, no=no)
                for number, where in zip(batch.numbers, kept, strict=True):
                    stored[number] = where

            labels = [page.label for page in pages]
            self._send_with_failover(labels, stored, Call.PUT, exchange)
            return _complete(stored)

    def touch(self, labels: Sequence[Label]) -> None:
        """Make each page recent at its server; pages of identities that were not registered are left out."""
        with self._calls:
            touched = self._unanswered(labels)

            def exchange(batch: ServerBatch) -> Exchange:
                runs = named_runs(labels[number] for number in batch.numbers)
                request = pb.TouchRequest(runs=runs)
                answer = batch.ask(Call.TOUCH, request)
                yield
                answer()
                for number in batch.numbers:
                    touched[number] = Answer.HIT

            self._send_with_failover(labels, touched, Call.TOUCH, exchange)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove pages from every server: any may have stood in for another, and counts too. One that fails raises."""
        with self._calls:
            known = [label for label in labels if label.identity in self._manifests]
            removed_count = 0
            for server in self._servers:
                for start in range(0, len(known), PAGES_PER_CALL):
                    some = known[start : start + PAGES_PER_CALL]
                    request = pb.RemoveRequest(runs=named_runs(some))
                    manifests = {label.identity: self._manifests[label.identity] for label in some}
                    reply = server.answer(Call.REMOVE, request, pb.RemoveReply, manifests)
                    removed_count += reply.removed_count
            return removed_count

    def clear(self, identity: bytes) -> int:
        """Clear a registered identity at every server, then raise for those that failed; a page of two counts twice."""
        with self._calls:
            manifest = self._manifests.get(identity)
            if manifest is None:
                raise InputError(f"register identity {identity.hex()} before it is cleared")
            removed_count = 0
            failed: list[StorageError] = []
            for server in self._servers:
                request = pb.ClearRequest(identity=identity)
                try:
                    reply = server.answer(Call.CLEAR, request, pb.ClearReply, {identity: manifest})
                except StorageError as error:
                    failed.append(error)
                    continue
                server.forget_greetings()
                removed_count += reply.removed_count
            if failed:
                raise StorageError(
                    f"{len(failed)} of {len(self._servers)} servers were not cleared: {failed[0]}; clear again when "
                    f"they answer, or go on with the next generation of the identity",
                    retryable=True,
                ) from failed[0]
            return removed_count

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List pages by name, of each server those that belong to it: once each, whether they share a store or not.

        Raises InputError for an identity that was not registered: what a service has of it, it was not asked.
        """
        with self._calls:
            manifest = self._manifests.get(identity)
            if manifest is None:
                raise InputError(f"register identity {identity.hex()} before it is listed")
            check_scan(identity, cursor)
            found: list[StoredObject] = []
            end = ""
            for number, server in enumerate(self._servers):
                request = pb.ScanRequest(identity=identity, cursor=cursor)
                reply = server.answer(Call.SCAN, request, pb.ScanReply, {identity: manifest})
                try:
                    named = [(label, run.object_bytes) for run in reply.runs for label in labels_in(run)]
                except InputError as error:
                    raise storage_error(error, Call.SCAN, server) from error
                found += [StoredObject(*each) for each in named if self._hash.ranked(each[0].key)[0] == number]
                end = min(end, reply.cursor) if end and reply.cursor else end or reply.cursor
            # Of the server that names least in one reply the rest may come before what the others name.
            listed = sorted((each.label.page_name, each) for each in found)
            return Scan([each for name, each in listed if not end or name <= end], end)

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the identities of the caller that any server knows or has pages of, by digest, as clients name them.

        From then on they can be asked for here without being registered. One whose manifest nobody can read is not
        among them: whose it is, its manifest says.
        """
        with self._calls:
            found: dict[bytes, Manifest | None] = {}
            for server in self._servers:
                for manifest in _identities_of(server):
                    found[manifest.identity] = manifest
                    self._manifests.setdefault(manifest.identity, manifest)
            return found

    def close(self) -> None:
        """Wait for calls in flight, then close the connections."""
        if self._calls.close():
            for server in self._servers:
                server.close()

    def _exists(self, labels: Sequence[Label]) -> list[Answer]:
        found = self._unanswered(labels)

        def exchange(batch: ServerBatch) -> Exchange:
            runs = named_runs(labels[number] for number in batch.numbers)
            request = pb.ExistsRequest(runs=runs)
            answer = batch.ask(Call.EXISTS, request)
            yield
            reply = parsed(pb.ExistsReply, answer())
            yes, no = Answer.HIT, Answer.MISS
            answers = answers_of(reply.found, reply.reasons, len(batch.numbers), yes=yes, no=no)
            for number, there in zip(batch.numbers, answers, strict=True):
                found[number] = there

        self._send_with_failover(labels, found, Call.EXISTS, exchange)
        return _complete(found)

    def _unanswered(self, labels: Sequence[Label]) -> list[Answer | None]:
        """Return None for each page that a server has to answer for; nobody can be asked for other identities."""
        return [None if label.identity in self._manifests else Answer.UNAVAILABLE for label in labels]

    def _send_with_failover(
        self,
        labels: Sequence[Label],
        answers: list[Answer | None],
        call: Call,
        exchange: Callable[[ServerBatch], Exchange],
    ) -> None:
        """Get servers' answers for pages, until every server was asked.

        Once more than that: one that has forgotten an identity says so, and the next try brings it.
        """
        waiting = [number for number, answer in enumerate(answers) if answer is None]
        failed: StorageError | None = None
        time_left = RequestTime(self._clock, self._timeout_s, self._call_s_max)
        for tries_count in range(len(self._servers) + 1):
            if failed is not None and not time_left.left_s():
                break
            batches = self._batches(labels, waiting, tries_count, time_left)
            failed = self._send_round(call, batches, labels, exchange) or failed
            waiting = [number for number in waiting if answers[number] is None]
            if not waiting:
                return
        try:
            if failed is not None and len(waiting) == len(labels):
                raise failed
        finally:
            del failed  # its traceback holds this frame, which would hold it, and with it the caller's pages

    def _send_round(
        self,
        call: Call,
        batches: Iterable[ServerBatch],
        labels: Sequence[Label],
        exchange: Callable[[ServerBatch], Exchange],
    ) -> StorageError | None:
        """Make calls, a bounded number at a time, Hello before those that need it.

        Return why one failed, or raise where asking again makes no sense.
        """
        failed: StorageError | None = None
        started: deque[tuple[Server, Exchange]] = deque()
        try:
            for batch in batches:
                if len(started) == CALLS_AHEAD * len(self._servers):
                    failed = self._wait(call, *started.popleft()) or failed
                if not batch.time.left_s():
                    failed = failed or StorageError(
                        f"{batch.server.name}: {call.value}: no time is left", retryable=True
                    )
                    break
                identities = {labels[number].identity for number in batch.numbers}
                begun = exchange(batch)
                try:
                    if not batch.server.knows(identities):
                        manifests = {identity: self._manifests[identity] for identity in identities}
                        batch.server.greet(manifests, batch.time.timeout_s)
                    next(begun)
                except (grpc.RpcError, InputError) as error:
                    failed = _failure(call, batch.server, error)
                else:
                    started.append((batch.server, begun))
        finally:
            # Whatever happened: no call may go on moving bytes of buffers that are the caller's again.
            failed = self._wait_all(call, started) or failed
        return failed

    def _wait_all(self, call: Call, started: deque[tuple[Server, Exchange]]) -> StorageError | None:
        """Wait for every call, also where one raises; return why one failed where asking again makes sense."""
        failed: StorageError | None = None
        try:
            while started:
                failed = self._wait(call, *started.popleft()) or failed
        finally:
            if started:
                self._wait_all(call, started)
        return failed

    def _wait(self, call: Call, server: Server, begun: Exchange) -> StorageError | None:
        """Wait for a call; return why it failed, or raise where asking again, here or elsewhere, makes no sense."""
        try:
            next(begun, None)
        except (grpc.RpcError, InputError, OSError) as error:
            return _failure(call, server, error)
        server.breaker.record_success()
        return None

    def _batches(
        self,
        labels: Sequence[Label],
        waiting: list[int],
        tries_count: int,
        time_left: RequestTime,
    ) -> list[ServerBatch]:
        """Send each page to its own server, or to the first of its ranking that does not rest."""
        chosen: dict[int, list[int]] = {}
        if len(self._servers) == 1:
            chosen[0] = waiting
        else:
            resting = {number for number, server in enumerate(self._servers) if server.breaker.is_resting}
            for number in waiting:
                ranked = self._hash.ranked(labels[number].key)
                awake = (server for server in ranked if server not in resting)
                chosen.setdefault(next(awake, ranked[tries_count % len(ranked)]), []).append(number)
        is_only = len(chosen) == 1
        per_server = [cut(self._servers[number], some, time_left, is_only=is_only) for number, some in chosen.items()]
        return [batch for turn in zip_longest(*per_server) for batch in turn if batch is not None]

    def _greet_all(self, manifests: Mapping[bytes, Manifest]) -> list[pb.HelloReply]:
        """Send Hello to every server, to one that failed just now only where no other answers; return the replies."""
        resting = [server for server in self._servers if server.breaker.is_resting]
        failed: list[StorageError] = []
        for some in ([server for server in self._servers if server not in resting], resting):
            replies: list[pb.HelloReply] = []
            for server in some:
                try:
                    server.greet(manifests)
                except (grpc.RpcError, InputError) as error:
                    failed.append(_failure(Call.HELLO, server, error))
                    continue
                server.breaker.record_success()
                assert server.agreed is not None, "a server that was greeted has said what it is"
                replies.append(server.agreed)
            if replies:
                return replies
        raise StorageError(f"no server answers: {failed[0]}", retryable=True) from failed[0]


class RendezvousHash:
    """Rank servers by name for each page: every client ranks alike, and a server that goes moves its own pages only."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._seeds = [xxh3_64_intdigest(server.encode()) for server in servers]

    def ranked(self, key: PageKey) -> list[int]:
        """Return the servers by number, the page's own first, then who stands in for it."""
        seeds = self._seeds
        if len(seeds) == 1:
            return [0]
        return sorted(range(len(seeds)), key=lambda number: xxh3_64_intdigest(key, seeds[number]), reverse=True)


def _identities_of(server: Server) -> Iterator[Manifest]:
    """Yield the manifests of one server in the order of their digests, as clients name them."""
    after = b""
    while True:
        request = pb.IdentitiesRequest(after=after)
        reply = server.answer(Call.IDENTITIES, request, pb.IdentitiesReply)
        if not reply.manifests:
            return
        for manifest in reply.manifests:
            if manifest.identity <= after:
                raise StorageError(f"{server.name} must list identities in order, found one twice", retryable=False)
            after = manifest.identity
            yield manifest


def _complete(answers: Sequence[Answer | None]) -> list[Answer]:
    """Return UNAVAILABLE where no server gave an answer."""
    return [Answer.UNAVAILABLE if answer is None else answer for answer in answers]


def _failure(call: Call, server: Server, error: grpc.RpcError | InputError | OSError) -> StorageError:
    """Return why a call failed, and record it for the server; raise where asking again makes no sense."""
    if isinstance(error, grpc.RpcError) and wants_hello(error):
        server.forget_greetings()
    elif not isinstance(error, grpc.RpcError) or is_passing(error):
        server.breaker.record_failure()
    else:
        raise storage_error(error, call, server) from error
    return storage_error(error, call, server)


def _opened(rest: str, bytes_max: int | None, *, secure: bool) -> RemoteStorage:
    """Open ``grpc://HOST:PORT`` or, with TLS, ``grpcs://HOST:PORT``; see the module for what may follow."""
    if bytes_max is not None:
        raise ConfigError(f"a service has a cap of its own, found bytes_max {bytes_max}")
    return RemoteStorage.open(parse_rest(rest, secure=secure))


open_url = partial(_opened, secure=False)
open_secure_url = partial(_opened, secure=True)
