"""Two tiers behind one server: pages in its memory, in front of any store. Labels are those of the store."""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from enum import IntEnum
from itertools import compress
from operator import itemgetter, not_
from threading import Lock
from typing import NamedTuple

import grpc

from unified_cache.errors import InputError, StorageError, StorageFullError
from unified_cache.page import PageKey
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.service.access.callers import Observer
from unified_cache.service.access.errors import Refused
from unified_cache.service.access.usage import TenantUsage
from unified_cache.service.store.host_tier import HostTier
from unified_cache.service.store.pages import HeldPage, blank_page
from unified_cache.storage_backends.catalog import catalog_in
from unified_cache.storage_backends.common.names import check_scan
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Scan, StorageBackend
from unified_cache.wire.calls import RETRY_AFTER

__all__ = ["ArrivedPage", "FoundTier", "KeptTier", "PageRead", "TieredStore"]

RECONCILED_NAMES = 1024
"""Pages asked about where a tenant has no room left: some may have left the store unnoticed."""

RETRY_AFTER_MS = "1000"


_READS = (Answer.HIT, Answer.MISS, Answer.FLAWED, Answer.UNAVAILABLE)
_PUTS = (Answer.STORED, Answer.DECLINED, Answer.UNAVAILABLE)

_IN_STORE = "store"
_IN_MEMORY = "memory"
"""Tier that a scan is at: its cursors begin with that, and go on with the cursor of the tier."""

_POOL = itemgetter(Label._fields.index("pool"))


class FoundTier(IntEnum):
    """Tier in which a page was found, as a reply encodes it."""

    NOWHERE = 0
    HOST = 1
    STORE = 2


class KeptTier(IntEnum):
    """Tier that keeps a page that was put, as a reply encodes it."""

    DECLINED = 0
    HOST = 1
    STORE = 2
    UNAVAILABLE = 3
    """Not kept: the store did not answer. On the wire it is declined, with that reason."""


class PageRead(NamedTuple):
    """Answer of both tiers for one page."""

    place: FoundTier
    answer: Answer
    page: HeldPage | None
    """None unless the answer is HIT."""


_MISS = PageRead(FoundTier.NOWHERE, Answer.MISS, None)

_KEPT = {Answer.STORED: KeptTier.STORE, Answer.DECLINED: KeptTier.DECLINED, Answer.UNAVAILABLE: KeptTier.UNAVAILABLE}


class ArrivedPage(NamedTuple):
    """A page to be stored; it was verified under its label."""

    label: Label
    parent: PageKey | None
    page: HeldPage
    manifest: Manifest
    """Of the label's identity."""


class TieredStore:
    """Read through and write through a host tier. A store that fails costs misses, and pages that stay in memory.

    Owns the store, which verifies what it returns, see ``GuardedStore``. Thread-safe.
    """

    def __init__(
        self,
        store: StorageBackend,
        host: HostTier,
        usage: TenantUsage,
        observer: Observer,
    ) -> None:
        self._store = store
        self._host = host
        self._usage = usage
        self._observer = observer
        self._announced: set[bytes] = set()
        self._outgrown_count = 0
        self._room = Lock()
        self._guard = Lock()

    @property
    def host(self) -> HostTier:
        """Tier in memory."""
        return self._host

    @property
    def usage(self) -> TenantUsage:
        """Pages and bytes stored by each tenant."""
        return self._usage

    def exists(self, tenant: str, labels: Sequence[Label]) -> list[Answer]:
        """Tell for each label whether either tier seems to have it; where the store fails, memory alone is asked."""
        found = self._host.contains(tenant, labels)
        in_memory = Answer.of_reads(found)
        self._count(tenant, "host", labels, in_memory)
        if all(found):
            return in_memory
        absent = list(compress(labels, map(not_, found)))
        stored = self._stored(absent) or [Answer.UNAVAILABLE] * len(absent)
        self._count(tenant, "storage", absent, stored)
        answers = iter(stored)
        return [Answer.HIT if here else next(answers) for here in found]

    def held(self, tenant: str, labels: Sequence[Label]) -> list[bool]:
        """Tell for each label whether the page is in memory."""
        return self._host.contains(tenant, labels)

    def read(self, tenant: str, labels: Sequence[Label], sizes: Sequence[int]) -> list[PageRead]:
        """Return pages of these lengths, from memory or from the store, from where they come into memory.

        A page of another length, or one that the store fails to return, is a miss.
        """
        epoch = self._host.epoch
        found = [
            PageRead(FoundTier.NOWHERE, Answer.MISS, None)
            if page is None
            else PageRead(FoundTier.HOST, Answer.HIT, page)
            for page in self._host.find(tenant, labels)
        ]
        absent = [number for number, read in enumerate(found) if read.page is None]
        self._count(tenant, "host", labels, [read.answer for read in found])
        self._usage.touch(tenant, labels)
        if not absent:
            return found
        blanks = [blank_page(sizes[number]) for number in absent]
        pages = [PageIO(labels[number], None, blank.buffers) for number, blank in zip(absent, blanks, strict=True)]
        try:
            hits = self._store.get(pages)
        except StorageError as error:
            self._observer.anomaly("store_get", str(error))
            hits = [Answer.UNAVAILABLE] * len(pages)
        self._count(tenant, "storage", [page.label for page in pages], hits)
        for number, blank, answer in zip(absent, blanks, hits, strict=True):
            if answer:
                self._host.admit(tenant, labels[number], blank, epoch)
                found[number] = PageRead(FoundTier.STORE, answer, blank)
            else:
                found[number] = _MISS._replace(answer=answer)
        self._usage.take(tenant, list(compress(pages, hits)))
        return found

    def put(self, tenant: str, arrived: Sequence[ArrivedPage], level: Level) -> list[KeptTier]:
        """Store pages; the first page of a name stays.

        Raises:
            Refused: the tenant or the store is full, or the store failed and memory cannot make up for it.
        """
        epoch = self._host.epoch
        labels = [each.label for each in arrived]
        pages: dict[Label, ArrivedPage] = {}
        for each in arrived:
            pages.setdefault(each.label, each)
        known = self._stored(labels)
        fresh = [label for label, there in zip(labels, known or [Answer.MISS] * len(labels), strict=True) if not there]
        new = set(fresh)
        counted = [PageIO(label, each.parent, each.page.buffers) for label, each in pages.items()]
        self._reserve(tenant, [page for page in counted if page.label in new])
        self._usage.take(tenant, [page for page in counted if page.label not in new])
        self._make_room(pages)
        room = pages.keys() - self._usage.outgrown(tenant, pages)
        try:
            answers = self._write_through(tenant, [each for each in pages.values() if each.label in room], level, new)
        except Refused:
            self._give_back_absent(tenant, fresh)
            raise
        # What another tenant's put has asked to go meanwhile lies in the store only now.
        late = self._usage.outgrown(tenant, room)
        self._remove_outgrown(late)
        answers.update((label, Answer.DECLINED) for label in (*pages.keys() - room, *late))
        self._count_puts(tenant, "storage", list(answers), list(answers.values()))
        admitted = [label for label in dict.fromkeys(fresh) if level is Level.CACHED or answers[label]]
        taken = [self._host.admit(tenant, label, pages[label].page, epoch) for label in admitted]
        self._count_puts(tenant, "host", admitted, Answer.of_puts(taken))
        held = self._host.contains(tenant, labels)
        kept = [
            KeptTier.HOST if here and level is Level.CACHED and not answers[label] else _KEPT[answers[label]]
            for label, here in zip(labels, held, strict=True)
        ]
        declined = [
            label for label, where in zip(labels, kept, strict=True) if where not in (KeptTier.STORE, KeptTier.HOST)
        ]
        self._usage.drop(tenant, declined)
        if declined and known is None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer")
        return kept

    def touch(self, tenant: str, labels: Sequence[Label]) -> None:
        """Make pages recent in both tiers, and last to go of what the tenant has above its share."""
        self._host.touch(tenant, labels)
        self._usage.touch(tenant, labels)
        try:
            self._store.touch(labels)
        except StorageError as error:
            self._observer.anomaly("store_touch", str(error))

    def remove(self, tenant: str, labels: Sequence[Label]) -> int:
        """Remove pages from both tiers; return how many there were in either.

        Raises:
            StorageError: the store failed; they are gone from memory.
        """
        named = list(dict.fromkeys(labels))
        here = self._host.contains(tenant, named)
        self._host.drop(tenant, named)
        stored = self._store.exists(named)
        self._store.remove(named)
        self._usage.drop(tenant, named)
        return sum(either or bool(other) for either, other in zip(here, stored, strict=True))

    def clear(self, tenant: str, identity: bytes) -> int:
        """Remove every page of one identity from both tiers; return how many there were in either.

        Raises:
            StorageError: the store failed; they are gone from memory.
        """
        with self._host.clearing(tenant, identity) as dropped:
            stored = self._store.exists(dropped)
            removed_count = self._store.clear(identity) + stored.count(Answer.MISS)
        self._usage.drop_identity(tenant, identity)
        return removed_count

    def scan(self, tenant: str, identity: bytes, cursor: str) -> Scan:
        """List pages of one identity: those of the store, then those that are in memory alone.

        Raises:
            InputError: the cursor is not one that a scan returned.
            StorageError: the store failed.
        """
        tier, separator, rest = cursor.partition(":") if cursor else (_IN_STORE, ":", "")
        if not separator or tier not in (_IN_STORE, _IN_MEMORY):
            raise InputError(f"a cursor is what the last scan returned, found {cursor!r}")
        if tier == _IN_STORE:
            stored = self._store.scan(identity, rest)
            return Scan(stored.objects, f"{_IN_STORE}:{stored.cursor}" if stored.cursor else f"{_IN_MEMORY}:")
        check_scan(identity, rest)
        held = self._host.scan(tenant, identity, rest)
        answers = self._store.exists([found.label for found in held.objects])
        alone = [found for found, answer in zip(held.objects, answers, strict=True) if not answer]
        return Scan(alone, f"{_IN_MEMORY}:{held.cursor}" if held.cursor else "")

    def manifests(self) -> list[Manifest]:
        """Return the manifests that the store has, of all tenants, as it names them; none where it keeps no catalog.

        Raises:
            StorageError: the store failed.
        """
        catalog = catalog_in(self._store)
        return [] if catalog is None else [each for each in catalog.manifests().values() if each is not None]

    @property
    def outgrown_count(self) -> int:
        """Pages removed so far because their tenants had more than their shares of the store."""
        return self._outgrown_count

    def is_durable(self) -> bool:
        """Tell whether the store honours DURABLE."""
        return self._store.capability().durable

    def name(self) -> str:
        """Return the store's name for people."""
        return self._store.capability().name

    def close(self) -> None:
        """Close the store; what is in memory alone is lost."""
        self._store.close()

    def _stored(self, labels: Sequence[Label]) -> list[Answer] | None:
        """Ask the store; None where it fails."""
        if not labels:
            return []
        try:
            return self._store.exists(labels)
        except StorageError as error:
            self._observer.anomaly("store_exists", str(error))
            return None

    def _write_through(
        self, tenant: str, arrived: Sequence[ArrivedPage], level: Level, fresh: set[Label]
    ) -> dict[Label, Answer]:
        """Put into the store what it lacks; return its answer by page. A page in memory goes instead of a new one."""
        wanted = [each for each in arrived if each.label in fresh or level is Level.DURABLE]
        here = self._host.find(tenant, [each.label for each in wanted])
        pages = [
            PageIO(each.label, each.parent, (held or each.page).buffers)
            for each, held in zip(wanted, here, strict=True)
        ]
        answers = {each.label: Answer.STORED for each in arrived}
        answers.update((page.label, Answer.UNAVAILABLE) for page in pages)
        try:
            if pages:
                for manifest in {each.manifest.identity: each.manifest for each in wanted}.values():
                    self._announce(manifest)
                answers.update(zip((page.label for page in pages), self._store.put(pages, level), strict=True))
        except StorageError as error:
            self._observer.anomaly("store_put", str(error))
            if level is Level.DURABLE:
                raise _refusal(error) from error
        return answers

    def _announce(self, manifest: Manifest) -> None:
        """Register an identity with the store, once."""
        with self._guard:
            if manifest.identity in self._announced:
                return
        try:
            self._store.register(manifest, {})
        except InputError as error:
            raise StorageError(str(error), retryable=False) from error
        with self._guard:
            self._announced.add(manifest.identity)

    def _make_room(self, arriving: Container[Label]) -> None:
        """Remove what tenants have above their shares of the store, so that it need not choose among them.

        One put at a time, so that what another has asked to go is gone before this one writes.
        """
        with self._room:
            self._remove_outgrown(self._usage.surplus(arriving))

    def _remove_outgrown(self, labels: Sequence[Label]) -> None:
        if labels:
            try:
                self._store.remove(labels)
            except StorageError as error:
                self._observer.anomaly("store_remove", str(error))
            with self._guard:
                self._outgrown_count += len(labels)

    def _reserve(self, tenant: str, pages: Sequence[PageIO]) -> None:
        if self._usage.take(tenant, pages):
            return
        self._give_back_absent(tenant, self._usage.oldest(tenant, RECONCILED_NAMES))
        if not self._usage.take(tenant, pages):
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "the tenant has no room left", [(RETRY_AFTER, RETRY_AFTER_MS)]
            )

    def _give_back_absent(self, tenant: str, labels: Sequence[Label]) -> None:
        stored = self._stored(labels)
        if stored is not None:
            here = self._host.contains(tenant, labels)
            triples = zip(labels, stored, here, strict=True)
            gone = [label for label, there, held in triples if there is Answer.MISS and not held]
            self._usage.drop(tenant, gone)

    def _count(self, tenant: str, tier: str, labels: Sequence[Label], answers: Sequence[Answer]) -> None:
        for pool, answer, count in _by_pool(labels, answers, _READS):
            self._observer.pages_looked_up(tenant, pool, tier, answer, count)

    def _count_puts(self, tenant: str, tier: str, labels: Sequence[Label], answers: Sequence[Answer]) -> None:
        for pool, answer, count in _by_pool(labels, answers, _PUTS):
            self._observer.pages_put(tenant, pool, tier, answer, count)


def _by_pool(
    labels: Sequence[Label], answers: Sequence[Answer], possible: Sequence[Answer]
) -> Iterator[tuple[str, Answer, int]]:
    """Count answers by pool."""
    pools = list(map(_POOL, labels))
    left_count = len(pools)
    for answer in possible:
        if not left_count:
            break
        counts = Counter(compress(pools, [each is answer for each in answers]))
        left_count -= counts.total()
        for pool, count in counts.items():
            yield pool, answer, count


def _refusal(error: StorageError) -> Refused:
    """Say what a failed write means to the client, and nothing of the store."""
    if isinstance(error, StorageFullError):
        return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the store is full", [(RETRY_AFTER, RETRY_AFTER_MS)])
    if error.retryable:
        return Refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer")
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, "the store cannot do this")
