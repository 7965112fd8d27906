"""Clients of a mixed load: some use a service as engines do, those of one tenant misuse it in every way."""

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from threading import Event
from typing import cast

import grpc
from google.protobuf.message import Message

from tests.soak.tally import CallTally
from unified_cache.components import Full, SlidingWindow
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call, parts_of
from unified_cache.storage_backends.manifest import manifest_of

DEADLINE_S = 15.0
PAUSE_S = 0.2
"""Mean time between two calls of an engine."""
ROGUE_PAUSE_S = 0.01
RECONNECT_SHARE = 0.02
"""Share of calls after which a client connects again."""
PROMPTS, PAGES = 24, 16
PAYLOAD_BYTES = {"kv": 48 << 10, "swa": 16 << 10}
LAYOUT = ModelLayout(
    16,
    (
        Full((PoolSpec("kv", PAYLOAD_BYTES["kv"]),)),
        SlidingWindow(64, 16, (PoolSpec("swa", PAYLOAD_BYTES["swa"]),)),
    ),
)
MANIFEST = manifest_of(Identity("soak"), LAYOUT)
PART_BYTES = 1 << 18


def key(prompt: int, number: int) -> bytes:
    return hashlib.sha256(b"%d %d" % (prompt, number)).digest()


def page(tenant: str, name: bytes, pool: str) -> memoryview:
    """Make the page that a tenant has under a name that all tenants use."""
    seed = hashlib.sha256(tenant.encode() + name + pool.encode()).digest()
    content = memoryview(bytearray(HEADER_BYTES) + seed * (PAYLOAD_BYTES[pool] // len(seed)))
    seal_buffers((content,), Label(MANIFEST.identity, name, pool))
    return content


def run_of(pool: str, keys: Sequence[bytes]) -> pb.PageRun:
    object_bytes = HEADER_BYTES + PAYLOAD_BYTES[pool]
    return pb.PageRun(identity=MANIFEST.identity, pool=pool, keys=keys, object_bytes=object_bytes)


class ClientConnection:
    """One connection of one tenant; a tally counts every call on it."""

    def __init__(self, address: str, tenant: str, token: str, tally: CallTally, *, behaves: bool) -> None:
        self.tenant = tenant
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._tally = tally
        self._behaves = behaves
        self._channel = self._connected()

    def reconnect(self) -> None:
        self.close()
        self._channel = self._connected()

    def close(self) -> None:
        self._channel.close()

    def ask(self, call: Call, *messages: Message | bytes) -> list[bytes] | None:
        """Make a call of any number of messages; None where it was refused."""
        start_s = time.monotonic()
        reply, failed = None, None
        try:
            reply = list(self._begun(call, *messages))
        except grpc.RpcError as error:
            failed = cast("grpc.Call", error)
        self._tally.note(call, failed, start_s, time.monotonic(), behaves=self._behaves)
        return reply

    def abandon_get(self, request: pb.GetRequest) -> None:
        """Ask for pages, take the first message and go away; there is no answer to be told of."""
        parts = self._begun(Call.GET, request)
        try:
            next(parts, None)
        except grpc.RpcError:
            return
        finally:
            parts.cancel()

    def _begun(self, call: Call, *messages: Message | bytes) -> "grpc._CallIterator[bytes]":
        """Begin a call as one of streams, which on the wire all calls are."""
        begin: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(call.path)
        return begin(map(_bytes_of, messages), DEADLINE_S, self._metadata)

    def check(self, keys: Sequence[bytes], pool: str, messages: Sequence[bytes]) -> None:
        """Compare what came with what was put."""
        parts = [pb.GetPart.FromString(message) for message in messages]
        hits = b"".join(part.hits for part in parts)
        content = memoryview(b"".join(part.content for part in parts))
        for name, hit in zip(keys, hits, strict=True):
            if hit:
                expected = page(self.tenant, name, pool)
                self._tally.page(is_right=content[: len(expected)] == expected)
                content = content[len(expected) :]
        if content:
            self._tally.page(is_right=False)

    def _connected(self) -> grpc.Channel:
        return grpc.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)])


class SoakClient:
    """A client that looks up, gets, puts and now and then removes pages of its tenant's prompts."""

    def __init__(self, line: ClientConnection, rng: random.Random) -> None:
        self._line = line
        self._rng = rng

    def run_until_stopped(self, stopped: Event) -> None:
        """Say Hello, then call until it is told to stop."""
        hello = pb.HelloRequest(manifest=MANIFEST)
        while self._line.ask(Call.HELLO, hello) is None and not stopped.wait(PAUSE_S):
            pass
        moves = (self._get, self._put, self._exists, self._remove, self._stats)
        weights = (40, 25, 23, 2, 4)
        while not stopped.wait(self._rng.expovariate(1 / PAUSE_S)):
            self._rng.choices(moves, weights)[0]()
            if self._rng.random() < RECONNECT_SHARE:
                self._line.reconnect()
        self._line.close()

    def _keys(self) -> tuple[list[bytes], str]:
        prompt, start = self._rng.randrange(PROMPTS), self._rng.randrange(PAGES)
        keys = [key(prompt, number) for number in range(start, min(PAGES, start + self._rng.randrange(1, 6)))]
        return keys, self._rng.choice(tuple(PAYLOAD_BYTES))

    def _get(self) -> None:
        keys, pool = self._keys()
        messages = self._line.ask(Call.GET, pb.GetRequest(runs=[run_of(pool, keys)]))
        if messages is not None:
            self._line.check(keys, pool, messages)

    def _put(self) -> None:
        keys, pool = self._keys()
        level = self._rng.choice((pb.CACHED, pb.DURABLE))
        self._line.ask(Call.PUT, *put_of(self._line.tenant, keys, pool, level))

    def _exists(self) -> None:
        keys, pool = self._keys()
        self._line.ask(Call.EXISTS, pb.ExistsRequest(runs=[run_of(pool, keys)]))

    def _remove(self) -> None:
        keys, pool = self._keys()
        self._line.ask(Call.REMOVE, pb.RemoveRequest(runs=[run_of(pool, keys[:1])]))

    def _stats(self) -> None:
        self._line.ask(Call.IDENTITIES, pb.IdentitiesRequest())


class RogueClient:
    """A client that sends malformed and forbidden requests, breaks off calls, and asks for more than its share."""

    def __init__(self, line: ClientConnection, rng: random.Random) -> None:
        self._line = line
        self._rng = rng

    def run_until_stopped(self, stopped: Event) -> None:
        """Do harm until it is told to stop."""
        moves = (self._garbage, self._spoilt_put, self._short_put, self._too_much, self._flood, self._leave, self._pose)
        self._line.ask(Call.HELLO, pb.HelloRequest(manifest=MANIFEST))
        while not stopped.wait(ROGUE_PAUSE_S):
            self._rng.choice(moves)()
            if self._rng.random() < RECONNECT_SHARE:
                self._line.reconnect()
        self._line.close()

    def _garbage(self) -> None:
        call = self._rng.choice([call for call in Call if call not in (Call.GET, Call.PUT)])
        # Field 15 of no known message, cut off: no message begins like that.
        self._line.ask(call, b"\x7a\xff" + self._rng.randbytes(self._rng.randrange(200)))

    def _spoilt_put(self) -> None:
        messages = list(put_of(self._line.tenant, [key(0, 0)], "kv", pb.CACHED))
        self._line.ask(Call.PUT, messages[0], messages[1][:-1] + bytes([messages[1][-1] ^ 1]))

    def _short_put(self) -> None:
        self._line.ask(Call.PUT, next(put_of(self._line.tenant, [key(0, 0), key(0, 1)], "kv", pb.DURABLE)))

    def _too_much(self) -> None:
        names = [self._rng.randbytes(32) for _ in range(16)]
        self._line.ask(Call.PUT, *put_of(self._line.tenant, names, "kv", pb.CACHED))

    def _flood(self) -> None:
        names = [self._rng.randbytes(32) for _ in range(1000)]
        for _ in range(20):
            self._line.ask(Call.EXISTS, pb.ExistsRequest(runs=[run_of("kv", names)]))

    def _leave(self) -> None:
        keys = [key(prompt, 0) for prompt in range(PROMPTS)]
        self._line.abandon_get(pb.GetRequest(runs=[run_of("kv", keys * 10)]))

    def _pose(self) -> None:
        self._line.ask(Call.DRAIN, pb.DrainRequest())


def put_of(tenant: str, keys: Sequence[bytes], pool: str, level: pb.Level) -> Iterator[bytes]:
    """Yield the messages of a put."""
    yield pb.PutPart(start=pb.PutStart(level=level, runs=[run_of(pool, keys)])).SerializeToString()
    yield from parts_of(((b"", (page(tenant, name, pool),)) for name in keys), PART_BYTES)


def _bytes_of(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
