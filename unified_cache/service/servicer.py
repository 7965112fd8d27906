"""The calls of the contract over one store: each is checked, carried out and answered here.

A request that makes no sense is an ``InputError``; one of an identity for which nobody said Hello is ``Refused``.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, repeat

import grpc
from google.protobuf.message import Message

from unified_cache.core.errors import InputError
from unified_cache.core.seal import FORMAT_VERSION, HEADER_BYTES, Label, relabelled, verify_buffers
from unified_cache.core.settings.service import Role
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import (
    SERVICE,
    Call,
    Chunk,
    Parsed,
    check_digests,
    decoded,
    labels_of,
    mark,
    parsed,
    parts_of,
    put_begun,
)
from unified_cache.service.access.gate import AdmittedCall, ServiceGate
from unified_cache.service.access.registry import Registration, Registry, listed_after
from unified_cache.service.limits import Limits
from unified_cache.service.store.tenants import TenantStore, named_page
from unified_cache.storage_backends.common.names import check_label
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, page_bytes
from unified_cache.storage_backends.remote.answers import reason_of, reasons_of

CURSOR_CHARS_MAX = 256
"""A scan's cursor is the name of an object, in every store so far."""

_CURSOR = re.compile(r"[\x21-\x7e]*")


@dataclass(frozen=True, slots=True)
class NamedRun:
    """Pages of one registered identity and one pool."""

    registration: Registration
    pool: str
    keys: Sequence[bytes]
    claimed_bytes: int
    """Length of each page as the client has it; 0 where only names matter."""

    @property
    def object_bytes(self) -> int:
        """Length of each page by its layout."""
        return self.registration.object_bytes[self.pool]

    @property
    def labels(self) -> list[Label]:
        """Pages as the client calls them."""
        return labels_of(self.registration.manifest.identity, self.keys, self.pool)

    @property
    def stored(self) -> list[Label]:
        """The same pages as the store calls them."""
        return labels_of(self.registration.stored.identity, self.keys, self.pool)


def named(
    runs: Iterable[pb.PageRun],
    tenant: str,
    registry: Registry,
    limits: Limits,
    *,
    any_pool: bool = False,
) -> list[NamedRun]:
    """Resolve runs of pages, with ``any_pool`` also of pools that no layout has."""
    found: list[NamedRun] = []
    pages_count = 0
    for run in runs:
        pages_count += len(run.keys)
        if not run.keys or pages_count > limits.pages_max:
            raise InputError(f"a request names 1 to {limits.pages_max} pages, and a run at least one")
        identity, keys, pool = run.identity, list(run.keys), run.pool
        check_digests((identity, *keys), "a digest")
        registration = registry.find(tenant, identity)
        if any_pool:
            check_label(Label(identity, keys[0], pool))
        elif pool not in registration.object_bytes:
            raise InputError(f"a pool is one of {', '.join(registration.object_bytes)}, found {pool!r}")
        found.append(NamedRun(registration, pool, keys, run.object_bytes))
    return found


def checked_cursor(cursor: str) -> str:
    """Return where a scan goes on."""
    if len(cursor) > CURSOR_CHARS_MAX or not _CURSOR.fullmatch(cursor):
        raise InputError("a cursor is what the last scan returned")
    return cursor


def all_stored(runs: Iterable[NamedRun]) -> list[Label]:
    """Return the pages of all runs as the store calls them."""
    return list(chain.from_iterable(run.stored for run in runs))


KEPT_SHARE_MIN = 0.5
"""Of a message, the part that content must fill to be kept as a view of it: less would keep the rest alive."""


class PageAssembler:
    """Assembly of the parts of one put into whole pages, in the order in which they were announced.

    It holds the pieces of one page at a time.
    """

    def __init__(self, runs: Sequence[NamedRun]) -> None:
        """Raises ``InputError`` where pages are announced with another length than theirs."""
        self._announced: list[tuple[Label, Label, int]] = []
        """Of each page the label as the client has it, and as its header will, that of the store, and its length."""
        for run in runs:
            if run.claimed_bytes != run.object_bytes:
                raise InputError(f"a page of pool {run.pool} has {run.object_bytes} bytes, found {run.claimed_bytes}")
            self._announced += zip(run.labels, run.stored, repeat(run.object_bytes), strict=False)
        self._done_count = 0
        self._offset = 0
        self._pieces: list[memoryview] = []
        self._held_bytes = 0

    @property
    def next_bytes(self) -> int:
        """Length of the page under way, or to come; 0 where all have come."""
        return self._announced[self._done_count][2] if self._done_count < len(self._announced) else 0

    def take(self, part: Chunk) -> Iterator[PageIO]:
        """Yield the pages that a part completes, as the store calls them.

        Raises:
            InputError: a gap, an overlap, more than was announced, or a page whose seal does not hold.
        """
        if part.offset != self._offset:
            raise InputError(f"a part begins where the last one ended, at {self._offset}, found {part.offset}")
        content = part.content
        if not content:
            raise InputError("a part of a put has content")
        if len(content) < KEPT_SHARE_MIN * memoryview(content.obj).nbytes:
            content = memoryview(bytes(content))
        for piece in self._pieces_in(content):
            label, stored, object_bytes = self._announced[self._done_count]
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            self._offset += len(piece)
            if self._held_bytes == object_bytes:
                yield self._whole(label, stored)

    def check_complete(self) -> None:
        """Raise ``InputError`` unless every page has come."""
        if self._done_count < len(self._announced):
            raise InputError(f"expected {len(self._announced)} pages, found {self._done_count} whole ones")

    def _pieces_in(self, content: memoryview) -> Iterator[memoryview]:
        """Cut the content of a part at the ends of pages."""
        start, held_bytes = 0, self._held_bytes
        for number in range(self._done_count, len(self._announced)):
            if start == len(content):
                return
            end = min(len(content), start + self._announced[number][2] - held_bytes)
            yield content[start:end]
            start, held_bytes = end, 0
        if start < len(content):
            raise InputError(f"found more than the {len(self._announced)} pages announced")

    def _whole(self, label: Label, stored: Label) -> PageIO:
        flaw = verify_buffers(self._pieces, label)
        if flaw is not None:
            raise InputError(f"page {self._done_count} does not verify: {flaw.value}")
        buffers = named_page(page_in(self._pieces), stored)
        self._pieces = []
        self._held_bytes = 0
        self._done_count += 1
        return PageIO(stored, buffers)


def page_in(pieces: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """Return the page that lies in pieces of messages, at least a header long, its header apart."""
    if len(pieces) == 1:  # as most do
        return pieces[0][:HEADER_BYTES], pieces[0][HEADER_BYTES:]
    header = b"".join(piece[:HEADER_BYTES] for piece in pieces[:HEADER_BYTES])[:HEADER_BYTES]
    payload: list[memoryview] = []
    skip = HEADER_BYTES
    for piece in pieces:
        if len(piece) > skip:
            payload.append(piece[skip:])
        skip = max(0, skip - len(piece))
    return (memoryview(header), *payload)


ABSENT, IN_STORE = 0, 2
"""Bytes of a reply for a page that is not in the store, and for one that is."""

PageAnswer = tuple[bytes, Sequence[memoryview]]
"""``mark`` of one page, and its bytes where it was found, named as the caller does."""


class CacheService:
    """The request path of a server. Owns the store; closing it closes that. Thread-safe.

    ``ask_drain`` is called when an administrator asks the server to end.
    """

    def __init__(
        self,
        store: TenantStore,
        gate: ServiceGate,
        limits: Limits,
        ask_drain: Callable[[], object],
    ) -> None:
        self._limits = limits
        self._store = store
        self._registry = Registry(limits)
        self._gate = gate
        self._ask_drain = ask_drain

    def rpc_methods(self) -> grpc.GenericRpcHandler:
        """Return what a ``grpc.Server`` is given; its options are ``Limits.channel_options``.

        All are registered as streams of requests, also those of one message, which is the same on the wire: gRPC then
        hands a call over as soon as its headers have come, so it is admitted, counted and timed from there on.
        """
        unary = self._unary
        single = {
            Call.HELLO.value: unary(Call.HELLO, Role.READER, pb.HelloRequest, self._hello),
            Call.EXISTS.value: unary(Call.EXISTS, Role.READER, pb.ExistsRequest, self._exists),
            Call.PUT.value: self._put,
            Call.TOUCH.value: unary(Call.TOUCH, Role.READER, pb.TouchRequest, self._touch),
            Call.REMOVE.value: unary(Call.REMOVE, Role.WRITER, pb.RemoveRequest, self._remove),
            Call.SCAN.value: unary(Call.SCAN, Role.READER, pb.ScanRequest, self._scan),
            Call.IDENTITIES.value: unary(Call.IDENTITIES, Role.READER, pb.IdentitiesRequest, self._identities),
            Call.CLEAR.value: unary(Call.CLEAR, Role.WRITER, pb.ClearRequest, self._clear),
            Call.DRAIN.value: unary(Call.DRAIN, Role.ADMIN, pb.DrainRequest, self._drain),
        }
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.stream_unary_rpc_method_handler(answer) for name, answer in single.items()
        }
        methods[Call.GET.value] = grpc.stream_stream_rpc_method_handler(self._get)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _unary(
        self, method: Call, needs: Role, kind: type[Parsed], answer: Callable[[AdmittedCall, Parsed], Message]
    ) -> Callable[[Iterator[bytes], grpc.ServicerContext], bytes]:
        """Return a method of one message each way."""

        def respond(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            with self._gate.admitted(method, needs, context) as call:
                request = parsed(kind, call.first(messages))
                reply = answer(call, request).SerializeToString()
                call.bytes_out = len(reply)
                return reply

        return respond

    def _hello(self, call: AdmittedCall, request: pb.HelloRequest) -> pb.HelloReply:
        if request.HasField("manifest"):
            registered = self._registry.add(call.caller, request.manifest)
            call.about = _described(registered)
        capability = self._store.capability()
        return pb.HelloReply(
            format_version=FORMAT_VERSION,
            tenant=call.tenant,
            durable=capability.durable,
            part_bytes=self._limits.part_bytes,
            pages_max=self._limits.pages_max,
            store=capability.name,
            stored_bytes=self._store.usage.held_bytes(call.tenant),
            identities_count=len(self._registry.of(call.tenant)),
        )

    def _exists(self, call: AdmittedCall, request: pb.ExistsRequest) -> pb.ExistsReply:
        answers = self._store.exists(call.tenant, all_stored(self._named(call.tenant, request.runs)))
        return pb.ExistsReply(found=bytes(answer is Answer.HIT for answer in answers), reasons=reasons_of(answers))

    def _get(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Generator[bytes, None, None]:
        with self._gate.admitted(Call.GET, Role.READER, context) as call:
            request = parsed(pb.GetRequest, call.first(messages))
            runs = self._named(call.tenant, request.runs)
            call.hold(self._batch_bytes(runs))
            for part in parts_of(self._found(call, runs), self._limits.part_bytes):
                call.bytes_out += len(part)
                yield part
                call.moved()

    def _batch_bytes(self, runs: Sequence[NamedRun]) -> int:
        """Return the memory that one batch of these pages takes: at least one page, however large."""
        return max([self._limits.batch_bytes, *(run.object_bytes for run in runs)])

    def _found(self, call: AdmittedCall, runs: Sequence[NamedRun]) -> Iterator[PageAnswer]:
        """Read pages a bounded number of bytes at a time; those of another length than theirs are misses."""
        hit = mark(IN_STORE, 0)
        for run in runs:
            if run.claimed_bytes != run.object_bytes:
                yield bytes(len(run.keys)), ()
                continue
            labels, stored = run.labels, run.stored
            step = max(1, self._limits.batch_bytes // run.object_bytes)
            for start in range(0, len(stored), step):
                found = self._store.read(call.tenant, stored[start : start + step], run.object_bytes)
                for label, (answer, page) in zip(labels[start : start + step], found, strict=True):
                    if answer is Answer.HIT:
                        page[:HEADER_BYTES] = relabelled(page[:HEADER_BYTES].tobytes(), label)
                        yield hit, (page,)
                    else:
                        yield mark(ABSENT, reason_of(answer)), ()
                call.moved()

    def _put(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._gate.admitted(Call.PUT, Role.WRITER, context) as call:
            start, first = put_begun(call.first(messages))
            if start.level not in pb.Level.values():
                raise InputError(f"a level is one of {', '.join(pb.Level.keys())}, found {start.level}")
            level = Level.DURABLE if start.level == pb.DURABLE else Level.CACHED
            runs = self._named(call.tenant, start.runs)
            call.hold(self._batch_bytes(runs))
            manifests = {run.registration.stored.identity: run.registration.stored for run in runs}
            together = dict.fromkeys(all_stored(runs))
            kept: list[Answer] = []
            arrivals = PageAssembler(runs)
            parts = chain((first,) if first.content else (), map(decoded, call.received(messages)))
            for batch in self._batches(arrivals, parts):
                kept += self._store.put(call.tenant, batch, level, manifests, together)
            # A page that the store did not answer for is declined, with that reason.
            stored = bytes(IN_STORE if answer else ABSENT for answer in kept)
            return pb.PutReply(stored=stored, reasons=reasons_of(kept)).SerializeToString()

    def _batches(self, arrivals: PageAssembler, parts: Iterable[Chunk]) -> Iterator[list[PageIO]]:
        """Yield pages as they arrive; what has arrived and the page under way are a bounded number of bytes."""
        batch: list[PageIO] = []
        batch_bytes = 0
        for part in parts:
            for page in arrivals.take(part):
                batch.append(page)
                batch_bytes += page_bytes(page)
                if batch_bytes + arrivals.next_bytes > self._limits.batch_bytes:
                    yield batch
                    batch, batch_bytes = [], 0
        arrivals.check_complete()
        yield batch

    def _touch(self, call: AdmittedCall, request: pb.TouchRequest) -> pb.TouchReply:
        self._store.touch(call.tenant, all_stored(self._named(call.tenant, request.runs)))
        return pb.TouchReply()

    def _remove(self, call: AdmittedCall, request: pb.RemoveRequest) -> pb.RemoveReply:
        runs = named(request.runs, call.tenant, self._registry, self._limits, any_pool=True)
        removed_count = self._store.remove(call.tenant, all_stored(runs))
        return pb.RemoveReply(removed_count=removed_count)

    def _scan(self, call: AdmittedCall, request: pb.ScanRequest) -> pb.ScanReply:
        check_digests((request.identity,), "an identity")
        cursor = checked_cursor(request.cursor)
        registration = self._registry.find(call.tenant, request.identity)
        listed = self._store.scan(registration.stored.identity, cursor)
        reply = pb.ScanReply(cursor=listed.cursor)
        for (pool, object_bytes), objects in groupby(
            listed.objects, lambda stored: (stored.label.pool, stored.object_bytes)
        ):
            keys = [label.key for label, _ in objects]
            reply.runs.append(pb.PageRun(identity=request.identity, pool=pool, keys=keys, object_bytes=object_bytes))
        return reply

    def _identities(self, call: AdmittedCall, request: pb.IdentitiesRequest) -> pb.IdentitiesReply:
        if request.after:
            check_digests((request.after,), "an identity")
        named_by_writers = [registration.manifest for registration in self._registry.registered(call.tenant)]
        return listed_after(request.after, call.tenant, named_by_writers, self._store.manifests())

    def _clear(self, call: AdmittedCall, request: pb.ClearRequest) -> pb.ClearReply:
        # A caller that may remove every page of an identity may clear it.
        if request.identity:
            check_digests((request.identity,), "an identity")
            chosen = [self._registry.find(call.tenant, request.identity)]
            call.about = _described(chosen[0])
        else:
            call.about = "every identity"
            self._gate.check_role(call.caller, Role.ADMIN, Call.CLEAR)
            chosen = self._registry.of(call.tenant)
        removed_count = 0
        for registration in chosen:
            removed_count += self._store.clear(call.tenant, registration.stored.identity)
            self._registry.forget(call.tenant, registration.manifest.identity)
            call.moved()
        call.about = f"{call.about}: {removed_count} pages"
        return pb.ClearReply(removed_count=removed_count)

    def _drain(self, call: AdmittedCall, request: pb.DrainRequest) -> pb.DrainReply:
        self._ask_drain()
        return pb.DrainReply()

    def _named(self, tenant: str, runs: Sequence[pb.PageRun]) -> list[NamedRun]:
        return named(runs, tenant, self._registry, self._limits)


def _described(registration: Registration) -> str:
    """Name an identity for the audit log."""
    return f"identity {registration.manifest.identity.hex()} of {registration.manifest.model}"
