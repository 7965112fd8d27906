"""A store in a Mooncake cluster: what engines on several machines share; ``address`` has its URL.

Pages travel between the host slabs and the nodes' memory without a copy in between. A reader must verify: a node's
memory can be written by anyone who reaches it, and an object may be removed, and its memory used again, while it is
read. ``VerifiedStorage`` does.

Mooncake's replicas lie in memory, and the master's directory does as well: a node that dies takes its pages along, a
master that dies all of them. So nothing here is durable, nor with SSD offload, which comes after a put has returned.
The cap is the cluster's own. It evicts by itself, in the order of last use, all objects of a page together.
"""

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.seal import Label
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.bounded_call import CallsInFlight
from unified_cache.storage_backends.common.names import check_identity, check_scan, parse_page_name
from unified_cache.storage_backends.manifest import MANIFEST_BYTES_MAX
from unified_cache.storage_backends.mooncake.address import MooncakeAddress, address_of_url
from unified_cache.storage_backends.mooncake.client import (
    MooncakeClient,
    NativeCall,
    ObjectBuffers,
    batches,
    client_of,
    object_buffers,
)
from unified_cache.storage_backends.mooncake.endpoints import ReplicaLocation
from unified_cache.storage_backends.mooncake.native import ResultCode
from unified_cache.storage_backends.protocol import (
    NAMES_MAX,
    NETWORK_BYTES,
    Answer,
    Capability,
    Level,
    PageIO,
    Scan,
    Store,
    StoredObject,
)

if TYPE_CHECKING:
    from mooncake.store import BufferDescriptor, ReplicateConfig

NAME = "mooncake"

FULL_PAUSES_S = (0.01, 0.04)
"""A full cluster evicts in the background: so long it is given, once a call, before what has no room is declined."""

REVOKED_PAUSE_S = 0.05
"""Masters behind etcd take so long to agree that a put has failed, and swallow other puts of its key until then."""

QUOTA_EXCEEDED = -1700
"""A tenant's own lack of room."""

_NO_ROOM = frozenset({ResultCode.NO_ROOM, QUOTA_EXCEEDED})
_NOT_TRANSFERRED = frozenset({ResultCode.TRANSFER_FAILED})
_MASTER_CHOOSES = ("",)
"""In place of nodes, where none is known to be up."""

_UNREADABLE = frozenset({ResultCode.TRANSFER_FAILED, ResultCode.CHECKSUM_MISMATCH, ResultCode.NOT_READY})


class MooncakeStorage(Store):
    """Keep sealed pages in the memory of a cluster's nodes.

    Thread-safe. Calls are bounded by the client's own timeouts, see ``native.ENVIRONMENT``, and further by
    the cache's guard. All stores of a process that name one cluster share one client, see ``mooncake.client``.
    """

    def __init__(
        self, client: MooncakeClient, capacity_bytes: int | None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._client = client
        self._capability = Capability(NAME, durable=False, bytes_max=capacity_bytes, call_bytes=NETWORK_BYTES)
        self._sleep = sleep
        self._manifests = ManifestObjects(client, sleep)
        self._regions: set[tuple[int, int]] = set()
        self._listed: tuple[bytes, list[str]] = (b"", [])
        self._guard = Lock()
        self._calls = CallsInFlight(f"the Mooncake store at {client.address.master}")

    @classmethod
    def open(cls, address: MooncakeAddress) -> "MooncakeStorage":
        """Join a cluster, see ``MooncakeClient.connect``. The process stands still for some 0.1 s, the first time."""
        client = client_of(address)
        capacity_bytes = client.admin.capacity_bytes()
        return cls(client, capacity_bytes and capacity_bytes // address.replicas)

    def capability(self) -> Capability:
        """Return the abilities of this backend; the cap is what all nodes gave together when the store was opened.

        Of each page all replicas count in it.
        """
        with self._calls:
            return self._capability

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Put the manifest beside the pages, and register the slabs with the transport, each once."""
        with self._calls:
            check_identity(manifest.identity)
            self._manifests.keep(manifest)
            with self._guard:
                for slab in slabs.values():
                    region = self._client.register(slab)
                    if region in self._regions:
                        self._client.unregister(region)
                    self._regions.add(region)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the master for all labels; what exists becomes recent. UNAVAILABLE where its nodes fail now."""
        with self._calls:
            names = [label.object_name for label in labels]
            if not names:
                return []
            locations = self._client.locate(names[::-1])
            is_up = {
                location: any(map(self._client.endpoints.is_up, (location.endpoint, *location.others)))
                for location in set(locations.values())
            }
            return [
                Answer.MISS if name not in locations else Answer.HIT if is_up[locations[name]] else Answer.UNAVAILABLE
                for name in names
            ]

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each page straight into its buffers, node by node; what failing nodes alone have is UNAVAILABLE."""
        with self._calls:
            objects = [object_buffers(number, page) for number, page in enumerate(pages)]
            answers = self._read([item for item in objects if item.object_bytes])
            return [answers.get(number, Answer.MISS) for number in range(len(pages))]

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Write pages straight from their buffers, at level CACHED; STORED for those that the cluster has afterwards.

        DECLINED where it has no room; UNAVAILABLE where a node failed just now, or another writer has begun the page
        and not ended it. A manifest that has gone with its node is put again on the way.
        """
        with self._calls:
            if level is Level.DURABLE:
                raise StorageError("Mooncake keeps pages in memory: it can store at level CACHED only", retryable=False)
            if not pages:
                return []
            objects = [object_buffers(number, page) for number, page in enumerate(pages)]
            identities = {page.label.identity for page in pages}
            manifests = self._manifests.names(identities)
            names = [*manifests, *[item.name for item in reversed(objects)]]
            there = {name for name, exists in zip(names, self._client.exist(names), strict=True) if exists}
            self._manifests.put_again(name for name in manifests if name not in there)
            known = self._client.locations_of([name for name in names[len(manifests) :] if name in there])
            return self._write(objects, known, grouped=not self._manifests.are_single(identities))

    def touch(self, labels: Sequence[Label]) -> None:
        """Make the master lease objects, as ``exists`` does: they become recent, the first label most of all."""
        with self._calls:
            self._client.exist_aged([label.object_name for label in reversed(labels)])

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects, those that somebody is reading too; return how many there were."""
        with self._calls:
            names = [label.object_name for label in labels]
            return self._client.remove(names).count(0) if names else 0

    def clear(self, identity: bytes) -> int:
        """Remove every object of one identity, those that cannot be read too. A listing of the whole cluster."""
        with self._calls:
            check_identity(identity)
            names = [f"{identity.hex()}/{name}" for name in self._names(identity, "")]
            codes: list[int] = []
            for start in range(0, len(names), NAMES_MAX):
                codes += self._client.remove(names[start : start + NAMES_MAX])
            left = set(codes) - {0, ResultCode.NOT_FOUND}
            if left:
                raise StorageError(f"Mooncake did not remove every object (codes {sorted(left)})", retryable=True)
            return codes.count(0)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed.

        The master lists all keys of the cluster for it, once for a scan from its beginning. What is listed is leased.
        """
        with self._calls:
            check_scan(identity, cursor)
            names = self._names(identity, cursor)
            start = bisect_right(names, cursor)
            found = names[start : start + NAMES_MAX]
            labels = {f"{identity.hex()}/{name}": label for name in found if (label := parse_page_name(identity, name))}
            locations = self._client.locate(list(labels)) if labels else {}
            listed = [
                StoredObject(label, locations[name].object_bytes) for name, label in labels.items() if name in locations
            ]
            return Scan(listed, found[-1] if len(found) == NAMES_MAX else "")

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity that has an object; a listing of the whole cluster, as ``scan``."""
        with self._calls:
            names = self._client.admin.keys(lambda name: identity_in(name) is not None)
            found: dict[bytes, Manifest | None] = dict.fromkeys(filter(None, map(identity_in, names)))
            for identity in found:
                with suppress(StorageError):
                    found[identity] = self._manifests.read(identity)
            return found

    def close(self) -> None:
        """Wait for calls in flight and release the slabs. The client stays, for the process's next store."""
        if self._calls.close():
            for region in self._regions:
                self._client.unregister(region)

    def _names(self, identity: bytes, cursor: str) -> list[str]:
        """Return the names of an identity's objects, in order, as they were when the scan began if that is known."""
        with self._guard:
            if cursor and self._listed[0] == identity:
                return self._listed[1]
        prefix = f"{identity.hex()}/"
        keys = self._client.admin.keys(lambda key: key.startswith(prefix))
        names = sorted(name for key in keys if parse_page_name(identity, name := key.removeprefix(prefix)) is not None)
        with self._guard:
            self._listed = (identity, names)
        return names

    def _write(
        self, objects: Sequence[ObjectBuffers], known: dict[str, ReplicaLocation], *, grouped: bool
    ) -> list[Answer]:
        """Store objects; ``known`` are those of them that the cluster has. STORED for each that it has in the end.

        ``grouped`` has the objects of one page evicted together, at a price of some percent.

        A result of 0 says little: it is that of a key which another writer has reserved, too. So what was written is
        asked for, first pages last: they are the most recent ones then. Masters behind etcd take a while to agree on a
        removal, and swallow a put of the key until then: it is put again.
        """
        foreign = {item.name for item in objects if item.name in known and not _fits(item, known[item.name])}
        if foreign:
            self._client.remove(list(foreign))
        fresh = [item for item in objects if item.name not in known or item.name in foreign]
        whole = known.keys() - foreign
        declined: set[str] = set()
        for pause_s in (*(FULL_PAUSES_S if self._client.address.etcd else ()), None):
            if not fresh:
                break
            accepted, full = self._write_all(fresh, grouped=grouped)
            names = [item.name for item in reversed(accepted)]
            whole |= {name for name, exists in zip(names, self._client.exist_aged(names), strict=True) if exists}
            self._client.locations.forget(names)
            declined |= full
            fresh = [item for item in accepted if item.name not in whole]
            if fresh and pause_s:
                self._sleep(pause_s)
        return [
            Answer.STORED if item.name in whole else Answer.DECLINED if item.name in declined else Answer.UNAVAILABLE
            for item in objects
        ]

    def _write_all(self, objects: Sequence[ObjectBuffers], *, grouped: bool) -> tuple[list[ObjectBuffers], set[str]]:
        """Put batch after batch; return what was accepted, and names that had no room.

        After a failed transfer nothing more is put on one node; of several, others take the place of those that failed.
        """
        pauses = list(FULL_PAUSES_S)
        accepted: list[ObjectBuffers] = []
        declined: set[str] = set()
        left = list(batches(objects))
        replicas = self._client.address.replicas
        while left:
            nodes = self._client.choice.nodes(replicas) or _MASTER_CHOOSES
            put = self._put_on(nodes, left, pauses, grouped=grouped)
            for batch, codes in zip(left, put, strict=False):
                accepted += [item for item, code in zip(batch, codes, strict=True) if not code]
                declined |= {item.name for item, code in zip(batch, codes, strict=True) if code in _NO_ROOM}
            left = left[len(put) :] if put and replicas > 1 else []
        return accepted, declined

    def _put_on(
        self, nodes: Sequence[str], left: Sequence[Sequence[ObjectBuffers]], pauses: list[float], *, grouped: bool
    ) -> list[list[int]]:
        """Put batches until a node fails; return the codes of those that were put, or tried last."""
        endpoints = self._client.endpoints
        put: list[list[int]] = []
        for batch, call in [(batch, self._put(batch, nodes, grouped=grouped)) for batch in left]:
            if not all(map(endpoints.is_up, nodes)):
                break
            with ExitStack() as calls:
                for admission in filter(None, map(endpoints.admit, nodes)):
                    calls.enter_context(admission)
                codes = call()
                while pauses and not _NO_ROOM.isdisjoint(codes):
                    self._sleep(pauses.pop(0))
                    codes = self._put_again(batch, codes, _NO_ROOM, _MASTER_CHOOSES, grouped=grouped)
                if not _NOT_TRANSFERRED.isdisjoint(codes):
                    codes = self._put_alone(batch, codes, nodes, grouped=grouped)
            strange = set(codes) - _NO_ROOM - _NOT_TRANSFERRED - {0}
            if strange:
                raise StorageError(f"Mooncake refused a put (codes {sorted(strange)})", retryable=False)
            put.append(codes)
        return put

    def _put_alone(
        self, batch: Sequence[ObjectBuffers], codes: list[int], nodes: Sequence[str], *, grouped: bool
    ) -> list[int]:
        """Put what was not transferred to several nodes on the first that takes it; what does not rests."""
        for node in nodes:
            if len(nodes) > 1:
                self._sleep(REVOKED_PAUSE_S if self._client.address.etcd else 0)
                codes = self._put_again(batch, codes, _NOT_TRANSFERRED, [node], grouped=grouped)
            if _NOT_TRANSFERRED.isdisjoint(codes):
                break
            self._client.endpoints.failed(node)
        return codes

    def _put_again(
        self,
        batch: Sequence[ObjectBuffers],
        codes: list[int],
        refused: frozenset[int],
        nodes: Sequence[str],
        *,
        grouped: bool,
    ) -> list[int]:
        """Put those with one of the ``refused`` codes on other nodes; return the codes after that."""
        left = [at for at, code in enumerate(codes) if code in refused]
        again = dict(zip(left, self._put([batch[at] for at in left], nodes, grouped=grouped)(), strict=True))
        return [again.get(at, code) for at, code in enumerate(codes)]

    def _put(self, batch: Sequence[ObjectBuffers], nodes: Sequence[str], *, grouped: bool) -> NativeCall:
        config = self._client.put_config([_page_of(item.name) for item in batch] if grouped else (), nodes=nodes)
        return self._client.putting(batch, config)

    def _read(self, objects: Sequence[ObjectBuffers]) -> dict[int, Answer]:
        """Fill buffers; return the answer for each item by its number.

        Node by node, so that one which fails takes no page of another with it, and the first pages last. An object of
        another size is removed. What a failing node has is read from another that has it, too.
        """
        endpoints = self._client.endpoints
        answers: dict[int, Answer] = {}
        by_endpoint: dict[str, list[ObjectBuffers]] = {}
        held_twice: list[ObjectBuffers] = []
        for item, location in self._found(objects, answers):
            answers[item.number] = Answer.UNAVAILABLE
            by_endpoint.setdefault(location.endpoint, []).append(item)
            if location.others:
                held_twice.append(item)
        for endpoint, held in by_endpoint.items():
            for batch, get in [(batch, self._client.getting(batch)) for batch in batches(held[::-1])]:
                admission = endpoints.admit(endpoint)
                if admission is None:
                    break
                with admission:
                    answers |= self._read_batch(batch, get, endpoint)
        left = [item for item in held_twice if answers[item.number] is Answer.UNAVAILABLE]
        return answers | self._read_elsewhere(left) if left else answers

    def _read_elsewhere(self, objects: Sequence[ObjectBuffers]) -> dict[int, Answer]:
        """Read objects from a node that is up, whichever the library would ask; return those that were read.

        Where they lie is asked again: what the master has leased stays where it is for as long as a read takes.
        """
        endpoints = self._client.endpoints
        places = self._client.memory_of([item.name for item in reversed(objects)])
        by_endpoint: dict[str, dict[str, BufferDescriptor]] = {}
        for name, held in places.items():
            place = next((place for place in held if endpoints.is_up(place.transport_endpoint)), None)
            if place is not None:
                by_endpoint.setdefault(place.transport_endpoint, {})[name] = place
        answers: dict[int, Answer] = {}
        for endpoint, there in by_endpoint.items():
            for batch in batches([item for item in objects[::-1] if item.name in there]):
                admission = endpoints.admit(endpoint)
                if admission is None:
                    break
                with admission:
                    if self._client.read_from(endpoint, [(item, there[item.name]) for item in batch]):
                        answers |= {item.number: Answer.HIT for item in batch}
                    else:
                        endpoints.failed(endpoint)
        return answers

    def _found(
        self, objects: Sequence[ObjectBuffers], answers: dict[int, Answer]
    ) -> list[tuple[ObjectBuffers, ReplicaLocation]]:
        """Return those objects that can be read, and where they lie; set the answers for the others."""
        client = self._client
        names = [item.name for item in objects]
        known = client.locations.find(names)
        out: set[str] = set()
        foreign: set[str] = set()
        unsure = [item for item in objects if item.name not in known or not _fits(item, known[item.name])]
        if unsure:
            asked, foreign = self._located(unsure)
            out = foreign | {item.name for item in unsure if item.name not in asked}
            known |= asked
        for item in objects:
            if item.name in foreign:
                answers[item.number] = Answer.FLAWED
            elif item.name in out:
                answers[item.number] = Answer.MISS
        return [(item, known[item.name]) for item in objects if item.number not in answers]

    def _located(self, objects: Sequence[ObjectBuffers]) -> tuple[dict[str, ReplicaLocation], set[str]]:
        """Ask the master where objects lie; remove those of another size, and return which they are."""
        asked = self._client.locate([item.name for item in reversed(objects)])
        foreign = {item.name for item in objects if item.name in asked and not _fits(item, asked[item.name])}
        if foreign:
            self._client.remove(list(foreign))
        return asked, foreign

    def _read_batch(self, batch: Sequence[ObjectBuffers], get: NativeCall, endpoint: str) -> dict[int, Answer]:
        client = self._client
        codes = get()
        if codes == [item.object_bytes for item in batch]:
            return {item.number: Answer.HIT for item in batch}
        read = list(zip(batch, codes, strict=True))
        answers = {item.number: _answer(item, code) for item, code in read}
        missed = [(item, code) for item, code in read if not answers[item.number]]
        client.locations.forget([item.name for item, _ in missed])
        failed = [item for item, code in missed if code == ResultCode.TRANSFER_FAILED]
        if failed:
            # The library says so of an object of another size, too, which is no fault of its node.
            _, foreign = self._located(failed)
            answers |= {item.number: Answer.FLAWED for item in failed if item.name in foreign}
            if not foreign.issuperset(item.name for item in failed):
                client.endpoints.failed(endpoint)
        damaged = [item.name for item, code in missed if code == ResultCode.CHECKSUM_MISMATCH]
        if damaged:
            client.remove(damaged)
        expired = [item for item, code in missed if code == ResultCode.LEASE_EXPIRED]
        if len(expired) > 1:
            # Together they took longer than their lease; each half has a lease of its own.
            middle = len(expired) // 2
            for half in (expired[:middle], expired[middle:]):
                answers |= self._read_batch(half, self._client.getting(half), endpoint)
        return answers


def open_url(rest: str, bytes_max: int | None) -> MooncakeStorage:
    """Open ``mooncake://HOST:PORT``, see the module; ``bytes_max`` is not ours to set."""
    if bytes_max is not None:
        raise ConfigError(f"a Mooncake cluster has the cap that its nodes give it, found a cap of {bytes_max} bytes")
    return MooncakeStorage.open(address_of_url(rest))


MANIFEST_NAME = "manifest.json"

_OWNED_NAME = re.compile(r"([0-9a-f]{64})/.*", re.DOTALL)


def identity_in(name: str) -> bytes | None:
    """Return whose object a key names; None where it is nobody's of ours."""
    found = _OWNED_NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


class ManifestObjects:
    """Keeps the manifests of the identities that this process registered. Thread-safe.

    They are pinned, so they are never evicted. They go with the node that holds them, or with the master; so a caller
    that writes pages looks for them, and puts them again.
    """

    def __init__(self, client: MooncakeClient, sleep: Callable[[float], None]) -> None:
        self._client = client
        self._sleep = sleep
        self._kept: dict[bytes, Manifest] = {}
        self._single: set[bytes] = set()
        self._guard = Lock()

    def keep(self, manifest: Manifest) -> None:
        """Put a manifest beside its pages, unless the same is there; StorageError where another is under its digest."""
        name = _name_of(manifest.identity)
        found = self.read(manifest.identity)
        if found is None:
            self._put(name, MessageToJson(manifest).encode())
            found = self.read(manifest.identity)
        if found is None:
            raise StorageError(f"{name} was put and is not there; is the cluster full?", retryable=True)
        if found != manifest:
            raise StorageError(f"{name} describes another identity or layout under the same digest", retryable=False)
        with self._guard:
            self._kept[manifest.identity] = manifest
            if sum(pool.page_bytes > 0 for component in manifest.components for pool in component.pools) == 1:
                self._single.add(manifest.identity)

    def are_single(self, identities: set[bytes]) -> bool:
        """Return whether every page of these identities is one object, whatever its component."""
        return identities <= self._single

    def names(self, identities: Iterable[bytes]) -> list[str]:
        """Name the manifests that pages of these identities should have beside them."""
        return [_name_of(identity) for identity in identities if identity in self._kept]

    def put_again(self, names: Iterable[str]) -> None:
        """Put manifests that are gone."""
        kept: Mapping[str, Manifest] = {_name_of(identity): manifest for identity, manifest in self._kept.items()}
        for name in names:
            self._put(name, MessageToJson(kept[name]).encode())

    def read(self, identity: bytes) -> Manifest | None:
        """Return the manifest of an identity, None where there is none; StorageError where it cannot be read."""
        name = _name_of(identity)
        location = self._client.locate([name]).get(name)
        if location is None:
            return None
        text = bytearray(min(location.object_bytes, MANIFEST_BYTES_MAX) or MANIFEST_BYTES_MAX)
        (code,) = self._with_registered(name, text, lambda item: self._client.getting([item]))
        if code <= 0 and location.others and self._read_elsewhere(name, text):
            code = location.object_bytes
        if code <= 0:
            raise StorageError(f"{name} is there and cannot be read (code {code})", retryable=True)
        try:
            return Parse(bytes(text[:code]), Manifest())
        except (ParseError, UnicodeDecodeError) as error:
            raise StorageError(
                f"{name} must hold a manifest, found something else: {error}", retryable=False
            ) from error

    def _read_elsewhere(self, name: str, text: bytearray) -> bool:
        """Read a manifest from any node that has it, as ``MooncakeStorage`` does a page."""
        places = self._client.memory_of([name]).get(name, [])
        return any(self._with_registered(name, text, partial(self._reading_at, place)) == [True] for place in places)

    def _reading_at(self, place: "BufferDescriptor", item: ObjectBuffers) -> NativeCall:
        return lambda: [self._client.read_from(place.transport_endpoint, [(item, place)])]

    def _put(self, name: str, text: bytes) -> None:
        """Put a manifest where pages go, and on one node after another where some died just now."""
        replicas = self._client.address.replicas
        nodes = self._client.choice.nodes(replicas + 1)
        for chosen in dict.fromkeys((tuple(nodes[:replicas]), *((node,) for node in nodes))):
            config = self._client.put_config(pinned=True, nodes=chosen)
            self._with_registered(name, bytearray(text), partial(self._put_as, config))
            if all(self._client.exist([name])):
                break
            self._sleep(REVOKED_PAUSE_S)

    def _put_as(self, config: "ReplicateConfig", item: ObjectBuffers) -> NativeCall:
        return self._client.putting([item], config)

    def _with_registered(
        self, name: str, memory: bytearray, call_of: Callable[[ObjectBuffers], NativeCall]
    ) -> list[int]:
        """Make a call for an object over memory that is registered for its length."""
        region = self._client.register(memoryview(memory))
        try:
            return call_of(ObjectBuffers(0, name, len(memory), [region[0]], [len(memory)]))()
        finally:
            self._client.unregister(region)


def _name_of(identity: bytes) -> str:
    return f"{identity.hex()}/{MANIFEST_NAME}"


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
