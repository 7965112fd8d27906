"""The store as tenants share it: quotas, shares of its cap, counts. Labels are those of the store."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import compress, islice
from operator import itemgetter
from threading import Event, Lock

import grpc
import numpy as np

from unified_cache.core.errors import ClosedError, InputError, StorageError, StorageFullError
from unified_cache.core.seal import HEADER_BYTES, Label, relabelled
from unified_cache.core.sizes import size_text
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.wire import RETRY_AFTER
from unified_cache.service.access.callers import Observer, Refused
from unified_cache.service.access.usage import Bound, TenantUsage
from unified_cache.storage_backends.manifest import described_by, tenant_of
from unified_cache.storage_backends.protocol import (
    Answer,
    Capability,
    Level,
    PageIO,
    Scan,
    Store,
    StoredObject,
    scans,
)

ANNOUNCED_MAX = 4096
"""Identities that are not registered with the store again; beyond, all are, once more."""

COUNTS_MAX = 3
"""Times that a store which fails is listed; fewer than the failures in a row that open a breaker by default."""

FOUND_PAGES = 4096
"""Pages from before that are counted together."""

REMOVED_PAGES_MAX = 4096
"""Pages removed by one call, within the store's deadline; after a restart with a smaller quota there are many."""

RECOUNT_S = 60.0
"""Pause before a store that failed is listed again."""

RETRY_AFTER_MS = "1000"

Buffers = tuple[memoryview, ...]

_POOL = itemgetter(Label._fields.index("pool"))


class TenantStore:
    """A store that tenants share. Where it fails, reads are misses, puts are declined, and the rest a ``StorageError``.

    Owns the store, which verifies what it returns, see ``GuardedStore``. Thread-safe.
    """

    def __init__(
        self,
        store: Store,
        usage: TenantUsage,
        observer: Observer,
        own: Callable[[Iterable[bytes], str], None] | None = None,
    ) -> None:
        """``own`` takes identities and their tenant before each call that moves pages; None if nothing is encrypted."""
        self.usage = usage
        """Pages and bytes stored by each tenant."""
        self.is_counted = False
        """Whether what the store held before is counted in ``usage``."""
        self._store = store
        self._observer = observer
        self._own = own
        self._announced: set[bytes] = set()
        self._room = Lock()
        self._guard = Lock()

    def exists(self, tenant: str, labels: Sequence[Label]) -> list[Answer]:
        """Return for each label whether the store seems to have it; where the store fails, nobody knows."""
        answers = self._stored(labels) or [Answer.UNAVAILABLE] * len(labels)
        self._count(tenant, labels, answers)
        return answers

    def read(self, tenant: str, labels: Sequence[Label], object_bytes: int) -> list[tuple[Answer, memoryview]]:
        """Return pages of this length, the caller's to change. Where the answer is not HIT, they hold anything.

        A page of another length, or that the store fails to return, is a miss.
        """
        self.usage.touch(tenant, labels)
        blank = np.empty(object_bytes * len(labels), np.uint8).data  # not zeroed, unlike a bytearray
        places = [blank[start : start + object_bytes] for start in range(0, len(blank), object_bytes)]
        pages = [PageIO(label, (place,)) for label, place in zip(labels, places, strict=True)]
        self._say_owner(tenant, pages)
        try:
            answers = self._store.get(pages)
        except StorageError as error:
            self._observer.anomaly("store_get", str(error))
            answers = [Answer.UNAVAILABLE] * len(pages)
        self._count(tenant, labels, answers)
        gone = self.usage.take(tenant, list(compress(pages, answers)))
        if gone:
            with self._room:
                self._remove_lost(tenant, Bound.QUOTA, gone)
        return list(zip(answers, places, strict=True))

    def put(
        self,
        tenant: str,
        arrived: Sequence[PageIO],
        level: Level,
        manifests: Mapping[bytes, Manifest],
        chain: Collection[Label] = (),
    ) -> list[Answer]:
        """Store pages that were verified under their labels; the first page of a name stays.

        ``manifests`` are those of the labels' identities, ``chain`` names all pages of the call that these are a part
        of: none of them goes to make room for another.

        Raises:
            Refused: the store is full, or does not answer.
        """
        labels = [page.label for page in arrived]
        pages: dict[Label, PageIO] = {}
        for page in arrived:
            pages.setdefault(page.label, page)
        known = self._stored(labels)
        if known is not None and all(answer is Answer.UNAVAILABLE for answer in known):
            # Nothing could be removed to make room either: what is counted stays.
            for pool, answer, count in _by_pool(labels, known):
                self._observer.pages_put(tenant, pool, answer, count)
            return known
        fresh = [label for label, there in zip(labels, known or [Answer.MISS] * len(labels), strict=True) if not there]
        new = set(fresh)
        self._make_room(tenant, pages, chain or pages)
        unfit = self.usage.uncounted(tenant, pages)
        room = pages.keys() - unfit
        self._remove_outgrown([label for label in unfit if label not in new])
        self._say_owner(tenant, pages.values())
        try:
            admitted = [page for page in pages.values() if page.label in room]
            answers = self._write(admitted, level, new, manifests)
        except Refused:
            self._give_back_absent(tenant, fresh)
            raise
        # What another tenant's put has asked to go meanwhile lies in the store only now.
        late = self.usage.uncounted(tenant, room)
        self._remove_outgrown(late)
        self._say_declined(tenant, len(pages), len(unfit), list(answers.values()).count(Answer.DECLINED))
        answers.update((label, Answer.DECLINED) for label in (*unfit, *late))
        for pool, answer, count in _by_pool(answers, answers.values()):
            self._observer.pages_put(tenant, pool, answer, count)
        declined = [label for label in labels if not answers[label]]
        # One that the store has keeps its place there, also where it cannot be made durable. A put that failed may have
        # stored some; of a store that answers nothing none are counted.
        failed = set() if known is None else {label for label in fresh if answers[label] is Answer.UNAVAILABLE}
        self.usage.drop(tenant, [label for label in declined if label in new and label not in failed])
        self._give_back_absent(tenant, list(failed))
        if declined and known is None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer")
        return [answers[label] for label in labels]

    def touch(self, tenant: str, labels: Sequence[Label]) -> None:
        """Make pages recent, and last to go of what the tenant has above its share."""
        self.usage.touch(tenant, labels)
        try:
            self._store.touch(labels)
        except StorageError as error:
            self._observer.anomaly("store_touch", str(error))

    def remove(self, tenant: str, labels: Sequence[Label]) -> int:
        """Remove pages; return how many there were."""
        named = list(dict.fromkeys(labels))
        stored = self._store.exists(named)
        try:
            self._store.remove(named)
        except StorageError:
            self._give_back_absent(tenant, named)  # some may have gone
            raise
        self.usage.drop(tenant, named)
        return sum(map(bool, stored))

    def clear(self, tenant: str, identity: bytes) -> int:
        """Remove every page of one identity; return how many there were."""
        removed_count = self._store.clear(identity)
        self.usage.drop_identity(tenant, identity)
        return removed_count

    def scan(self, identity: bytes, cursor: str) -> Scan:
        """List pages of one identity."""
        return self._store.scan(identity, cursor)

    def manifests(self) -> list[Manifest]:
        """Return the manifests that the store has, of all tenants, as it names them; none where it names none."""
        return [each for each in (self._store.manifests() or {}).values() if each is not None]

    def count_stored(self, stop: Event) -> None:
        """Count what the store holds from before, until it could be listed or ``stop`` is set; say why it could not."""
        for attempt in range(1, COUNTS_MAX + 1):
            try:
                self.is_counted = self._count_stored(stop)
                return
            except (StorageError, ClosedError) as error:
                if stop.is_set():
                    return
                text = f"what the store held before is not counted, attempt {attempt} of {COUNTS_MAX}: {error}"
                self._observer.anomaly("not_counted", text)
            if attempt < COUNTS_MAX and stop.wait(RECOUNT_S):
                return

    def capability(self) -> Capability:
        """Return what the store can do."""
        return self._store.capability()

    def close(self) -> None:
        """Close the store."""
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

    def _write(
        self, pages: Sequence[PageIO], level: Level, fresh: set[Label], manifests: Mapping[bytes, Manifest]
    ) -> dict[Label, Answer]:
        """Put into the store what it lacks; return its answer by page."""
        wanted = [page for page in pages if page.label in fresh or level is Level.DURABLE]
        answers = {page.label: Answer.STORED for page in pages}
        answers.update((page.label, Answer.UNAVAILABLE) for page in wanted)
        try:
            if wanted:
                for identity in dict.fromkeys(page.label.identity for page in wanted):
                    self._announce(manifests[identity])
                answers.update(zip((page.label for page in wanted), self._store.put(wanted, level), strict=True))
        except StorageError as error:
            self._observer.anomaly("store_put", str(error))
            if level is Level.DURABLE:
                raise _refusal(error) from error
        return answers

    def _say_owner(self, tenant: str, pages: Iterable[PageIO]) -> None:
        if self._own is not None:
            self._own({page.label.identity for page in pages}, tenant)

    def _announce(self, manifest: Manifest) -> None:
        """Register an identity with the store, once."""
        with self._guard:
            if manifest.identity in self._announced:
                return
            if len(self._announced) >= ANNOUNCED_MAX:
                self._announced.clear()
        try:
            self._store.register(manifest, {})
        except InputError as error:
            raise StorageError(str(error), retryable=False) from error
        with self._guard:
            self._announced.add(manifest.identity)

    def _make_room(self, tenant: str, arriving: Mapping[Label, PageIO], chain: Collection[Label]) -> None:
        """Remove what tenants have above quotas and shares of the store, so that it need not choose among them.

        One put at a time, so that what another has asked to go is gone before this one writes.
        """
        with self._room:
            self._remove_lost(tenant, Bound.QUOTA, self.usage.take(tenant, list(arriving.values()), chain))
            for (loser, bound), gone in self.usage.surplus(chain).items():
                self._remove_lost(loser, bound, gone)

    def _say_declined(self, tenant: str, pages_count: int, unfit_count: int, declined_count: int) -> None:
        """Log why pages were declined: no eviction makes room for what is larger than its bound."""
        if unfit_count:
            bytes_max = self.usage.bytes_max(tenant)
            bound = "what is counted" if bytes_max is None else f"the {size_text(bytes_max)} that it may have"
            self._observer.anomaly(
                "declined",
                f"put by {tenant}: {unfit_count} of {pages_count} pages exceed {bound}, or were removed meanwhile",
            )
        if declined_count:
            text = f"put by {tenant}: the store has no room, or no key, for {declined_count} of {pages_count} pages"
            self._observer.anomaly("declined", text)

    def _count_stored(self, stop: Event) -> bool:
        """List the identities of every tenant; return whether all of them are counted."""
        stored = self._store.manifests()
        if stored is None:
            capability = self._store.capability()
            if not capability.exists_costs_io:
                return True  # in the memory of this process, which began empty
            text = f"{capability.name} cannot list what it held before: it counts when it is read or put again"
            self._observer.anomaly("not_counted", text)
            return False
        identities: defaultdict[str, list[Manifest]] = defaultdict(list)
        unread_count = 0
        for manifest in stored.values():
            if manifest is None:
                unread_count += 1
            elif tenant := tenant_of(manifest):
                identities[tenant].append(manifest)
        for tenant, manifests in identities.items():
            parts = [part for manifest in manifests for part in self._listed(manifest, stop)]
            newest_first = merge(*parts, key=itemgetter(0), reverse=True)
            # A few thousand at a time: calls go on between them.
            while some := list(islice(newest_first, FOUND_PAGES)):
                with self._room:
                    gone = self.usage.find(tenant, [each for _, each in reversed(some)])
                    self._remove_lost(tenant, Bound.QUOTA, gone)
        if unread_count:
            text = f"{unread_count} identities have no manifest that can be read, and are nobody's: scrub the store"
            self._observer.anomaly("not_counted", text)
        return not unread_count and not stop.is_set()

    def _listed(self, manifest: Manifest, stop: Event) -> Iterator[list[tuple[int, StoredObject]]]:
        """Yield some pages of an identity at a time, each with its last use, the newest of them first.

        Lengths are those that clients put, not as pages are coded.
        """
        layout = described_by(manifest).layout
        sizes = {pool.name: HEADER_BYTES + pool.page_bytes for pool in layout.pools}
        for listed in scans(self._store, manifest.identity):
            if stop.is_set():
                return
            used = listed.used or [0] * len(listed.objects)
            found = [StoredObject(label, sizes.get(label.pool, length)) for label, length in listed.objects]
            yield sorted(zip(used, found, strict=True), key=itemgetter(0), reverse=True)

    def _remove_lost(self, tenant: str, bound: Bound, labels: Sequence[Label]) -> None:
        """Remove what a tenant has above a bound; of that it lost what the store had."""
        self.usage.record_lost(tenant, bound, self._remove_outgrown(labels))

    def _remove_outgrown(self, labels: Sequence[Label]) -> int:
        removed_count = 0
        for start in range(0, len(labels), REMOVED_PAGES_MAX):
            try:
                removed_count += self._store.remove(labels[start : start + REMOVED_PAGES_MAX])
            except StorageError as error:
                self._observer.anomaly("store_remove", str(error))
        return removed_count

    def _give_back_absent(self, tenant: str, labels: Sequence[Label]) -> None:
        stored = self._stored(labels)
        if stored is not None:
            pairs = zip(labels, stored, strict=True)
            self.usage.drop(tenant, [label for label, there in pairs if there is Answer.MISS])

    def _count(self, tenant: str, labels: Sequence[Label], answers: Sequence[Answer]) -> None:
        for pool, answer, count in _by_pool(labels, answers):
            self._observer.pages_looked_up(tenant, pool, answer, count)


def named_page(buffers: Buffers, label: Label) -> Buffers:
    """Return a page, its header apart, under another label, without a copy of its payload."""
    header, *payload = buffers
    return (memoryview(relabelled(bytes(header), label)), *payload)


def _by_pool(labels: Iterable[Label], answers: Iterable[Answer]) -> Iterator[tuple[str, Answer, int]]:
    """Count answers by pool."""
    for (pool, answer), count in Counter(zip(map(_POOL, labels), answers, strict=True)).items():
        yield pool, answer, count


def _refusal(error: StorageError) -> Refused:
    """Return the refusal of a failed write; it names nothing of the store."""
    if isinstance(error, StorageFullError):
        return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "the store is full", [(RETRY_AFTER, RETRY_AFTER_MS)])
    if error.retryable:
        return Refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer")
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, "the store cannot do this")
