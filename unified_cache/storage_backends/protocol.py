"""The store of sealed pages: one class with defaults that every store and every layer inherits.

Batched, one version. Four methods make a store; all others have a default, which does nothing or says that the store
cannot. A miss is an answer and says why; only a fault raises. The prefix logic (hit policies, restorable sets) lives
above it, once; a backend sees pages one by one and knows no pool by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from threading import TIMEOUT_MAX
from typing import NamedTuple

from unified_cache.core.errors import ConfigError, NotOfferedError, StorageError, check_kind
from unified_cache.core.pool import ModelLayout
from unified_cache.core.seal import HEADER_BYTES, Label, PageChecksum
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.removals import RemovalFeed

__all__ = [
    "Answer",
    "Capability",
    "Level",
    "PageIO",
    "Scan",
    "Store",
    "StoredObject",
    "UsedBetween",
]

_NBYTES = attrgetter("nbytes")

BATCH_OBJECTS = 128
BATCH_BYTES = 32 << 20
PIECE_BYTES_MAX = 8 << 20
NETWORK_BYTES = 64 << 20
NAMES_MAX = 1000
"""How much goes in one call, who cuts it, and why. A page of more bytes goes alone.

BATCH_OBJECTS    jobs of a cache, offline    between two calls a job can be stopped, and keeps the pages before it
BATCH_BYTES      the same, durable puts of   within a deadline of 5 s for a store of 6.7 MB/s; pages of a durable put
                 engines                     wait for the disk together
PIECE_BYTES_MAX  gets and puts of engines    more is out of the processor's caches before it is verified and copied, and
                                             a store that goes on for long makes room for a load soon
call_bytes       VerifiedStorage             what a store likes best of a get, see ``Capability``
NETWORK_BYTES    the same, of what is not    enough that requests follow each other without a pause, and that every node
                 on this machine             is sent full ones
NAMES_MAX        scans, look-ups, removals   so many names fit one message of any transport

How much goes in one message, one native call or one read is a store's own matter.
"""


class Level(Enum):
    """Promise of an acknowledged put."""

    CACHED = "cached"
    """Readable by the next get; a crash may lose it."""
    DURABLE = "durable"
    """Readable after any crash, until it is evicted or removed.

    Before this is said of a page that was there already, its bytes were verified by its seal, or written again.
    """


class Answer(Enum):
    """Answer of a store for one page; true if the page was read, exists or is stored."""

    HIT = "hit"
    """The page was read into its buffers; of ``exists``: a get would find it, as far as is known without reading."""
    MISS = "miss"
    """The store does not have the page."""
    FLAWED = "flawed"
    """The store had another object in its place: another length, another page, damaged bytes. It is removed."""
    UNAVAILABLE = "unavailable"
    """The store was not asked or does not know now: breaker open, rate limit, node or server lost. Later it may."""
    STORED = "stored"
    """The page is in the store, at the level asked for."""
    DECLINED = "declined"
    """The store has no room for the page under its cap."""

    __hash__ = object.__hash__  # by identity: that of ``Enum`` is a call of Python for each key of a dictionary

    def __bool__(self) -> bool:
        return self is Answer.HIT or self is Answer.STORED

    @staticmethod
    def of_reads(found: Iterable[bool]) -> "list[Answer]":
        """Return HIT for each True, MISS for each False."""
        present, absent = Answer.HIT, Answer.MISS
        return [present if hit else absent for hit in found]

    @staticmethod
    def of_puts(stored: Iterable[bool]) -> "list[Answer]":
        """Return STORED for each True, DECLINED for each False."""
        taken, declined = Answer.STORED, Answer.DECLINED
        return [taken if ok else declined for ok in stored]


@dataclass(frozen=True, slots=True)
class Capability:
    """Abilities of a backend; declared, never probed."""

    name: str
    """For people: messages, metrics."""
    durable: bool
    """Whether ``Level.DURABLE`` is honoured; otherwise such a put raises."""
    bytes_max: int | None
    """Cap on the bytes stored; None if there is none."""
    call_s_max: float = 0.0
    """Longest time that a call may take by the backend's own timeouts, fail-over included; 0 if it has none.

    No guard gives a call less: else the backend would never come to fail over.
    """
    call_bytes: int = 1 << 20
    """Best size of one get, so that pages are still in the processor's caches when they are verified."""
    exists_costs_io: bool = True
    """Whether ``exists`` asks a disk or another process. If not, a scheduler may wait for it."""
    bounded: bool = False
    """Whether ``exists``, ``get``, ``put`` and ``touch`` return by themselves, and use no buffer afterwards.

    Within ``call_s_max``, or ``bounded_call.time_left_s`` if that is less; where ``call_s_max`` is 0, without waiting
    for anything but memory. Such a store is called on its caller's thread and given memory that is another's once the
    call is over. Any other one needs a deadline around it, and memory to be late in.
    """
    taken_bytes: Callable[[int], int] = field(default=int, compare=False)
    """What an object of a length takes of the cap: its length, or more where a file system has it."""
    shares_cap: bool = False
    """Whether a cap that is not this store's own may evict what it is given: a service's, which others share."""

    def __post_init__(self) -> None:
        check_kind(self.name, str, "the name of a store as text", ConfigError)
        for flag in (self.durable, self.exists_costs_io, self.bounded, self.shares_cap):
            check_kind(flag, bool, "an ability of a store as True or False", ConfigError)
        check_kind(self.bytes_max, int | None, "the bytes_max of a store as bytes, or None", ConfigError)
        check_kind(self.call_s_max, int | float, "the call_s_max of a store as seconds", ConfigError)
        check_kind(self.call_bytes, int, "the call_bytes of a store as bytes", ConfigError)
        if not (0 <= self.call_s_max <= TIMEOUT_MAX and self.call_bytes > 0 and (self.bytes_max or 0) >= 0):
            raise ConfigError(f"a store must have bytes_max and call_s_max of 0 or more, and call_bytes, found {self}")

    def check_cap(self, layout: ModelLayout) -> None:
        """Raise ConfigError where the cap is less than a page of a layout's pool."""
        for pool in layout.pools:
            page_bytes = self.taken_bytes(HEADER_BYTES + pool.page_bytes) if pool.page_bytes else 0
            if self.bytes_max is not None and page_bytes > self.bytes_max:
                raise ConfigError(
                    f"the cap of the {self.name} store must hold a page of {pool.name}, {page_bytes} bytes, "
                    f"found {self.bytes_max}; write it as in 400GB"
                )

    @property
    def evicts(self) -> bool:
        """Whether the store may let pages go to make room for others, so that it matters what is known to be in use."""
        return self.bytes_max is not None or self.shares_cap


class PageIO(NamedTuple):
    """One sealed page to write or to fill."""

    label: Label
    buffers: tuple[memoryview, ...]
    """The page's bytes in order: one buffer for a page in a slab, more where an engine owns the memory.

    The caller keeps them alive and untouched until the call returns. Backends do not join them first.
    """
    checksum: PageChecksum | None = None
    """Of a page to fill: a store that reads it piece by piece adds each piece as soon as it is in its buffer.

    A store need not: of a page that was not added in order and to the end, the verifier reads all bytes again.
    A wrapper that changes what was read, or takes one page from several stores, hands the page down without it.
    """


def page_bytes(page: PageIO) -> int:
    """Sum up the buffers of a page."""
    buffers = page.buffers
    return buffers[0].nbytes if len(buffers) == 1 else sum(map(_NBYTES, buffers))


class StoredObject(NamedTuple):
    """One object found by a scan."""

    label: Label
    object_bytes: int


class Scan(NamedTuple):
    """One page of a listing."""

    objects: list[StoredObject]
    cursor: str
    """Where the next scan goes on; empty when this one ended."""
    used: Sequence[int] = ()
    """Last use of each object, larger for later, comparable within a store; empty where the store does not say."""
    is_timed: bool = False
    """Whether ``used`` are the times by which the store evicts, in ns since 1970."""


class UsedBetween(NamedTuple):
    """Times at which the least and the most recently used object of an identity were used, in ns since 1970."""

    oldest_ns: int
    newest_ns: int


class Contents(NamedTuple):
    """Objects of one identity, counted."""

    counts: Mapping[tuple[str, int], int]
    """Objects by their pool and length, of which a pool has few."""
    used: UsedBetween | None
    """None where there are none, or nobody knows."""


class Store(ABC):
    """A store of sealed pages; ``exists``, ``get``, ``put`` and ``remove`` are what a new one must have.

    Every method but close may raise StorageError, for a fault that is not one page's, and InputError, for an identity,
    a label or a cursor that cannot be one.

    # Behavior

    * a page that was put is got back byte by byte, whatever the number of buffers at either end
    * a page that was never put is a miss, and its buffers may hold anything afterwards
    * an object whose length differs from the buffers' is flawed or a miss, and does not block a later put of that page
    * a put of a page that exists changes nothing and counts as stored
    * a put that is declined or raises has left nothing half-written
    * pages of different identities, keys or pools never mix
    * results stand in the order of the pages asked for, one for each
    * an empty batch is no work
    * touch makes pages as recent as a get of them would, and tolerates absent pages
    * remove makes a page a miss and tolerates absent pages
    * clear makes every page of one identity a miss, wherever the store has it, and no page of another
    * a clear that cannot promise that raises StorageError: any part may be gone, and calling again goes on
    * a scan lists every object of one identity and of no other
    * after close every method that a store has of its own, but close, raises ClosedError; close twice is close once
    * methods may be called from several threads at a time
    """

    # ---- pages -----------------------------------------------------------------------------------------------

    @abstractmethod
    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Return for each label whether a get would, as far as is known without reading, find it: HIT if so."""

    @abstractmethod
    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers; HIT where the whole page was read."""

    @abstractmethod
    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages; STORED where the page is in the store, at that level, when this returns.

        Raises StorageError on a fault; which pages of the batch were stored is then unknown, and putting them again
        is safe.
        """

    @abstractmethod
    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; return how many there were."""

    def touch(self, labels: Sequence[Label]) -> None:  # noqa: B027 -- its default does nothing
        """Make pages recent without reading them, the first label most of all, so that a prefix ages from its tail.

        What is absent stays so, and a store that keeps no recency does nothing. Raises StorageError on a fault.
        """

    def lengths(self, labels: Sequence[Label]) -> list[int | None] | None:
        """Return the bytes of each object, None where there is none; None for all where the store does not say."""
        return None

    # ---- identities ------------------------------------------------------------------------------------------

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:  # noqa: B027 -- its default does nothing
        """Announce one identity, and the host memory its pages will be read into and written from, by pool.

        Call it before any page of that identity is put. Idempotent.
        """

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names, a bounded number at a time, from ``cursor`` on."""
        raise NotOfferedError(f"the {self.capability().name} store does not list what it has")

    def clear(self, identity: bytes) -> int:
        """Remove every object of one identity, also those that the store has in memory; return how many there were.

        One that lay in several places may count for each. What had been put before the call is a miss after it, in a
        durable store after a crash too; what is being put meanwhile may stay.
        """
        return sum(self.remove([each.label for each in found.objects]) for found in scans(self, identity))

    def manifests(self) -> dict[bytes, Manifest | None] | None:
        """Return the manifest of every identity, by its digest; None where the store does not say whose pages it has.

        Every identity that has an object is named, and so is every one that was registered and is kept: with None
        where its manifest is missing or cannot be read.
        """
        return None

    def foreign_paths(self) -> list[str]:
        """Return what stands where the store has its directories and is none of its own; empty without directories."""
        return []

    def contents(self, identity: bytes) -> Contents | None:
        """Count the objects of one identity in far less time than a scan takes; None where the store cannot."""
        return None

    # ---- the store -------------------------------------------------------------------------------------------

    def capability(self) -> Capability:
        """Return the abilities of this backend."""
        return Capability(type(self).__name__, durable=False, bytes_max=None)

    @property
    def is_read_only(self) -> bool:
        """Whether this process may not write the store: what is put is declined, and nothing is removed."""
        return False

    @property
    def decline_reason(self) -> str:
        """Reason of the last declined put, a sentence; empty if there was none, or the store does not say."""
        return ""

    def memory_reader(self) -> "Store | None":
        """Return the store whose ``knows`` and ``read_memory`` wait for no disk; None where it, or a layer, has none.

        They wait for nobody who waits for one either, so they need no deadline, and raise ClosedError alone.
        """
        return None

    def knows(self, labels: Sequence[Label]) -> list[bool]:
        """Return for each label whether a get would find it, as far as memory alone says; False means unknown."""
        return [False] * len(labels)

    def read_memory(self, pages: Sequence[PageIO]) -> list[bool]:
        """Fill pages as far as that takes no waiting; True where the buffers hold exactly the page of that label.

        A page that was read is used now, as by ``get``. Of one that was not nothing is known, and its buffers may hold
        anything: ``get`` tells.
        """
        return [False] * len(pages)

    def removals(self) -> RemovalFeed | None:
        """Subscribe to what leaves the store; None where it does not tell. StateError beyond ``SUBSCRIBERS_MAX``.

        A page is reported when it is evicted, removed, cleared, or found damaged or another page, by any process; what
        other processes do once this one knows of it. One that is stored again before it was reported is not. Nothing
        is reported of a page that vanishes without the store: a crash, a disk that was emptied.
        """
        return None

    def close(self) -> None:  # noqa: B027 -- its default does nothing
        """Wait for calls in flight and let everything go. What was stored stays where the backend keeps it."""


def scans(store: Store, identity: bytes, cursor: str = "") -> Iterator[Scan]:
    """Yield the scans of an identity, from behind ``cursor`` on; raise StorageError where one does not advance."""
    while True:
        found = store.scan(identity, cursor)
        yield found
        if not found.cursor:
            return
        if found.cursor == cursor:
            name = store.capability().name
            raise StorageError(f"a scan must advance, that of {name} stays at {cursor!r}", retryable=False)
        cursor = found.cursor
