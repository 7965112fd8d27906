"""A process's client of a Mooncake cluster: connected once, gated, and never released.

The library's own life cycle is not safe to follow. Connecting and disconnecting hold the interpreter's lock, for
minutes where the master is gone; a call before the one or after the other ends the process, as does one in flight
meanwhile. So a process has one client for each address, connected when it is first needed and once the master was
seen to live, and it stays connected until the process ends. Stores come and go and share it; each releases its
memory.
"""

import atexit
import ctypes
import http.client
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.storage_backends.common.bounded_call import CallsInFlight
from unified_cache.storage_backends.common.breaker import CircuitBreaker
from unified_cache.storage_backends.mooncake.address import PROBE_TIMEOUT_S, MooncakeAddress, probe_master
from unified_cache.storage_backends.mooncake.endpoints import (
    NODES_MAX,
    REST,
    Endpoints,
    LocationCache,
    NodeChoice,
    ReplicaLocation,
)
from unified_cache.storage_backends.mooncake.native import (
    METADATA,
    ResultCode,
    load_engine,
    load_store,
    new_put_config,
)
from unified_cache.storage_backends.protocol import PageIO

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine
    from mooncake.store import BufferDescriptor, MooncakeDistributedStore, Replica, ReplicateConfig

EXIT_WAIT_S = 8.0
"""Wait for calls in flight when the process ends: each ends by itself within the settings' timeouts."""

AGED_OBJECTS = 16
"""Objects of one call: all have one age and are evicted in any order; those of the next call are younger."""

_LOST = frozenset({ResultCode.RPC_FAILED, ResultCode.RPC_TIMEOUT})

BATCH_BYTES = (2 << 20) + 16 * HEADER_BYTES
"""In flight in one call, headers beside payloads: more leaves the receiver's processor caches, and runs at half the
speed over TCP."""

BATCH_OBJECTS = 16
"""In one call: a node that stalls holds it up for a second per four objects, and a call has a deadline."""

COPIES_MAX = 128
"""Objects that are asked to be copied in ``COPIES_TIME_S``: a cluster on two loaded cores made five a second."""

COPIES_TIME_S = 4.0
"""Time after which an object that still lacks a replica is asked to be copied again."""

_address_of = ctypes.addressof
_char_in = ctypes.c_char.from_buffer


class ObjectBuffers(NamedTuple):
    """One object to move."""

    number: int
    name: str
    object_bytes: int
    pointers: list[int]
    sizes: list[int]
    """Of each pointer; no empty ones."""


def pointer_to(memory: memoryview) -> int:
    """Return where memory lies; the caller keeps it alive."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).ctypes.data)
    return _address_of(_char_in(memory))


def object_buffers(number: int, page: PageIO) -> ObjectBuffers:
    """Point to the buffers of a page; its owner keeps them alive."""
    buffers = page.buffers
    if len(buffers) == 1 and (size := buffers[0].nbytes):
        return ObjectBuffers(number, page.label.object_name, size, [pointer_to(buffers[0])], [size])
    filled = [buffer for buffer in buffers if buffer.nbytes]
    sizes = [buffer.nbytes for buffer in filled]
    return ObjectBuffers(number, page.label.object_name, sum(sizes), [pointer_to(buffer) for buffer in filled], sizes)


def batches(objects: Sequence[ObjectBuffers]) -> Iterator[Sequence[ObjectBuffers]]:
    """Cut a run of objects into calls; a large one goes alone.

    No call names an object twice: of two buffers for one key the client fills the last, and says it filled both.
    """
    start = taken_bytes = 0
    names: set[str] = set()
    for end, item in enumerate(objects):
        taken_bytes += item.object_bytes
        if end > start and (taken_bytes > BATCH_BYTES or end - start >= BATCH_OBJECTS or item.name in names):
            yield objects[start:end]
            start, taken_bytes = end, item.object_bytes
            names.clear()
        names.add(item.name)
    if objects:
        yield objects[start:]


NativeCall = Callable[[], list[int]]
"""A call of the client with all that it takes. Those of a run are made ready before the first one: after it, the
processor's caches hold pages, and each line of ours costs several times as much."""


class MooncakeClient:
    """Calls to a connected store client, and what is known of the cluster. Thread-safe.

    Every call returns one answer a name, in order, or raises StorageError where the master does not answer. It is then
    paused for a while, and the next call first looks whether somebody listens: the library would try for seconds.
    """

    def __init__(
        self, store: "MooncakeDistributedStore", address: MooncakeAddress, engine: "TransferEngine | None" = None
    ) -> None:
        """``engine`` is the store's own, where objects have replicas."""
        self.address = address
        self.admin = MasterAdmin(address)
        self.locations = LocationCache()
        self.endpoints = Endpoints()
        self.choice = NodeChoice(self.admin.segments, self.endpoints)
        self._store = store
        self._engine = engine
        self._copying: set[str] = set()
        self._copied_at_s = 0.0
        self._registered: dict[tuple[int, int], int] = {}
        self._master = CircuitBreaker(1, REST, name=f"the Mooncake master at {address.master}")
        self._in_flight = CallsInFlight("the Mooncake client, as the process ends,")
        self._guard = Lock()

    @classmethod
    def connect(cls, address: MooncakeAddress) -> "MooncakeClient":
        """Connect, if a master answers; raise ConfigError for what this host lacks, StorageError for the master."""
        host = address.resolved_host()
        probe_master(*address.leader())
        MasterAdmin(address).check_serves()
        store, engine, code = load_store(), None, 0
        if address.replicas > 1:
            engine = load_engine()
            code = engine.initialize(host, METADATA, address.protocol, address.devices)
        how = (host, METADATA, address.segment_bytes, 0, address.protocol, address.devices, address.master)
        code = code or store.setup(*how, None if engine is None else engine.get_engine())
        if code:
            raise StorageError(
                f"the Mooncake client could not be set up (code {code}): host {host}, protocol {address.protocol}, "
                f"master {address.master}, segment of {address.segment_bytes} bytes",
                retryable=code in _LOST,
            )
        client = cls(store, address, engine)
        atexit.register(client.end)
        return client

    # ---- memory ----------------------------------------------------------------------------------------------

    def register(self, memory: memoryview) -> tuple[int, int]:
        """Make memory known to the transport, once for all who do so; return what ``unregister`` takes."""
        region = (pointer_to(memory), memory.nbytes)
        with self._in_flight, self._guard:
            if region not in self._registered:
                code = self._store.register_buffer(*region)
                if code:
                    raise StorageError(
                        f"{region[1]} bytes of host memory cannot be registered (code {code})", retryable=False
                    )
            self._registered[region] = self._registered.get(region, 0) + 1
        return region

    def unregister(self, region: tuple[int, int]) -> None:
        """Take one registration back; with the last one the transport forgets the memory."""
        with self._in_flight, self._guard:
            self._registered[region] -= 1
            if not self._registered[region]:
                del self._registered[region]
                self._store.unregister_buffer(region[0])

    # ---- objects ---------------------------------------------------------------------------------------------

    def exist(self, names: list[str]) -> list[bool]:
        """Return which objects are whole; those are leased, the last name last."""
        codes = self._ask(names, lambda: self._store.batch_is_exist(names))
        unknown = next((code for code in codes if code < 0), None)
        if unknown is not None:
            raise StorageError(f"the Mooncake master cannot say what exists (code {unknown})", retryable=True)
        return [code == 1 for code in codes]

    def exist_aged(self, names: list[str]) -> list[bool]:
        """As ``exist``, and have the objects age from the first name to the last, in steps of ``AGED_OBJECTS``."""
        return [
            exists
            for start in range(0, len(names), AGED_OBJECTS)
            for exists in self.exist(names[start : start + AGED_OBJECTS])
        ]

    def locate(self, names: list[str]) -> dict[str, ReplicaLocation]:
        """Return where objects lie, of those that are whole, and remember it; they age as by ``exist_aged``.

        What exists is asked in one call: of what does not, the library would log every name.
        """
        return self.locations_of([name for name, exists in zip(names, self.exist(names), strict=True) if exists])

    def locations_of(self, present: list[str]) -> dict[str, ReplicaLocation]:
        """Return where objects lie that were there just now, as ``locate``."""
        locations = {name: _location_of(replicas) for name, replicas in self._replicas_of(present)}
        self.locations.learn(locations.items())
        if self._engine is not None:
            self._copy([name for name, found in locations.items() if len(found.others) + 1 < self.address.replicas])
        return locations

    def memory_of(self, names: list[str]) -> dict[str, "list[BufferDescriptor]"]:
        """Return all the places in nodes' memory that hold these objects now, of those that are whole."""
        present = [name for name, exists in zip(names, self.exist(names), strict=True) if exists]
        return {name: _in_memory(replicas) for name, replicas in self._replicas_of(present)}

    def _replicas_of(self, present: list[str]) -> "Iterator[tuple[str, Sequence[Replica]]]":
        for start in range(0, len(present), AGED_OBJECTS):
            with self._in_flight:
                found = self._store.batch_get_replica_desc(present[start : start + AGED_OBJECTS])
            if not found:
                probe_master(*self.address.leader())  # the library gives no reason, and would wait again for the rest
            yield from ((name, replicas) for name, replicas in found.items() if replicas)

    def _copy(self, names: Sequence[str]) -> None:
        """Ask for copies of objects that lie on fewer nodes than they should, on any of the nodes.

        Where that is the one that has them, or a dead one, nothing happens, and another is drawn when they are asked
        for again.
        """
        nodes = self.choice.nodes(NODES_MAX) if names else []
        if not nodes:
            return
        with self._in_flight, self._guard:
            if time.monotonic() >= self._copied_at_s:
                self._copied_at_s = time.monotonic() + COPIES_TIME_S
                self._copying.clear()
            fresh = [name for name in names if name not in self._copying][: COPIES_MAX - len(self._copying)]
            self._copying.update(fresh)
            for name in fresh:
                node = random.choice(nodes)  # noqa: S311 -- not secret
                _, code = self._store.create_copy_task(name, [node])
                if code in _LOST:
                    break  # each of the others would wait as long for the next leader
                if code == ResultCode.INVALID and len(nodes) > 1:
                    nodes.remove(node)  # it has gone since it was listed, which the library logs each time

    def remove(self, names: list[str]) -> list[int]:
        """Remove objects, leased ones too; 0 for each that there was."""
        codes = self._ask(names, lambda: self._store.batch_remove(names, True))
        self.locations.forget(names)
        return codes

    def putting(self, objects: Sequence[ObjectBuffers], config: "ReplicateConfig") -> NativeCall:
        """Make ready the call that stores objects."""
        names = [item.name for item in objects]
        pointers, sizes = [item.pointers for item in objects], [item.sizes for item in objects]
        put = partial(self._store.batch_put_from_multi_buffers, names, pointers, sizes, config)
        return partial(self._ask, names, put)

    def getting(self, objects: Sequence[ObjectBuffers]) -> NativeCall:
        """Make ready the call that reads objects; it returns their sizes, or codes."""
        names = [item.name for item in objects]
        pointers, sizes = [item.pointers for item in objects], [item.sizes for item in objects]
        return partial(self._ask, names, partial(self._store.batch_get_into_multi_buffers, names, pointers, sizes))

    def read_from(self, endpoint: str, objects: "Sequence[tuple[ObjectBuffers, BufferDescriptor]]") -> bool:
        """Read objects from places in one node's memory; return whether it answered. The library reads the first."""
        pieces: list[tuple[int, int, int]] = []
        for item, place in objects:
            at = place.buffer_address
            for pointer, size in zip(item.pointers, item.sizes, strict=True):
                pieces.append((pointer, at, size))
                at += size
        pointers, places, sizes = (list(column) for column in zip(*pieces, strict=True))
        assert self._engine is not None, "only objects with replicas are read so"
        with self._in_flight:
            return self._engine.batch_transfer_sync_read(endpoint, pointers, places, sizes) == 0

    def put_config(
        self, groups: Sequence[str] = (), *, pinned: bool = False, nodes: Sequence[str] = ()
    ) -> "ReplicateConfig":
        """Return how to store objects of these groups, one each, or of none; on ``nodes`` where they have room."""
        config = new_put_config()
        preferred = [node for node in nodes if node]
        config.replica_num = len(preferred) or self.address.replicas
        if groups:
            config.group_ids = list(groups)
        config.with_hard_pin = pinned
        config.preferred_segments = preferred
        return config

    # ---- life cycle ------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Start no further call and wait a while for those in flight, as the process ends."""
        self._in_flight.close(EXIT_WAIT_S)

    def _ask(self, names: Sequence[str], call: Callable[[], list[int]]) -> list[int]:
        if self._master.has_failures:
            self._probe_master()
        with self._in_flight:
            codes = call()
        if len(codes) != len(names):
            raise StorageError(f"Mooncake gave {len(codes)} answers for {len(names)} objects", retryable=False)
        if not _LOST.isdisjoint(codes):
            lost = next(code for code in codes if code in _LOST)
            self._master.record_failure()
            probe_master(*self.address.leader())  # often it knows the reason
            text = f"the Mooncake master at {self.address.master} does not answer (code {lost})"
            raise StorageError(text, retryable=True)
        self._master.record_success()
        return codes

    def _probe_master(self) -> None:
        """Look whether the master can be asked again."""
        if self._master.is_resting:
            text = f"the Mooncake master at {self.address.master} did not answer just now, and is paused"
            raise StorageError(text, retryable=True)
        try:
            probe_master(*self.address.leader())
        except StorageError:
            self._master.record_failure()
            raise


def _location_of(replicas: "Sequence[Replica]") -> ReplicaLocation:
    """Return where an object is read from; what lies on disks alone has no endpoint and no known size."""
    found = _in_memory(replicas)
    if not found:
        return ReplicaLocation("", 0)
    endpoint, *others = [place.transport_endpoint for place in found]
    return ReplicaLocation(endpoint, found[0].size, tuple(others))


def _in_memory(replicas: "Sequence[Replica]") -> "list[BufferDescriptor]":
    return [replica.get_memory_descriptor().buffer_descriptor for replica in replicas if replica.is_memory_replica()]


_CLIENTS: dict[MooncakeAddress, MooncakeClient] = {}
_CLIENTS_GUARD = Lock()


def client_of(address: MooncakeAddress) -> MooncakeClient:
    """Return this process's client of a cluster, connected; see ``MooncakeClient.connect``."""
    with _CLIENTS_GUARD:
        client = _CLIENTS.get(address)
        if client is None:
            if address.etcd and any(other.etcd not in ((), address.etcd) for other in _CLIENTS):
                raise ConfigError(f"Mooncake's library knows one etcd a process, found a second: {address.master}")
            client = _CLIENTS[address] = MooncakeClient.connect(address)
        else:
            probe_master(*address.leader())
        return client


CAPACITY = b"master_total_capacity_bytes "
"""Begins the line among the metrics that says how much memory all nodes give."""

LISTING_TIMEOUT_S = 30.0
"""Between two pieces of a listing of all keys, which the master builds before it answers."""

AdminReply = TypeVar("AdminReply")


class MasterAdmin:
    """Asks the master that leads over HTTP; a connection per question. Thread-safe."""

    def __init__(self, address: MooncakeAddress) -> None:
        self._address = address

    def check_serves(self) -> None:
        """Raise StorageError where the master's HTTP side is there and does not say in time that it serves."""
        try:
            probe_master(*self._where())
        except StorageError:
            return  # the admin port is needed for listings alone
        self._ask("/health", PROBE_TIMEOUT_S, _text)

    def segments(self) -> frozenset[str]:
        """Return which nodes the master counts on, by their addresses; none where it does not answer."""
        try:
            return frozenset(self._ask("/get_all_segments", PROBE_TIMEOUT_S, _text).split())
        except StorageError:
            return frozenset()

    def capacity_bytes(self) -> int | None:
        """Return how much memory all nodes give together; None where the master does not say so, or knows no node."""
        try:
            lines = self._ask("/metrics", PROBE_TIMEOUT_S, lambda answer: answer.read().splitlines())
        except StorageError:
            return None
        said = next((line.removeprefix(CAPACITY) for line in lines if line.startswith(CAPACITY)), b"")
        return int(said) or None if said.isdigit() else None

    def keys(self, wanted: Callable[[str], bool]) -> list[str]:
        """List the keys of the whole cluster that are ``wanted``, in no order. Linear in all keys there are."""
        return self._ask("/get_all_keys", LISTING_TIMEOUT_S, lambda answer: _wanted_lines(answer, wanted))

    def _ask(self, path: str, timeout_s: float, read: Callable[[http.client.HTTPResponse], AdminReply]) -> AdminReply:
        host, port = self._where()
        name = f"http://{host}:{port}{path}"
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise StorageError(f"{name} answers {answer.status} {answer.reason}", retryable=True)
            return read(answer)
        except (OSError, http.client.HTTPException) as error:
            raise StorageError(
                f"{name} does not answer: {error}; the port of the master's HTTP side is option admin",
                retryable=True,
            ) from error
        finally:
            connection.close()

    def _where(self) -> tuple[str, int]:
        return self._address.admin_host or self._address.leader()[0], self._address.admin_port


def _text(answer: http.client.HTTPResponse) -> str:
    return answer.read().decode(errors="replace")


def _wanted_lines(lines: Iterable[bytes], wanted: Callable[[str], bool]) -> list[str]:
    names = (line.rstrip(b"\n").decode(errors="replace") for line in lines)
    return [name for name in names if wanted(name)]
