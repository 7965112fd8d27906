"""A store in a bucket: one object for each page, put once, read whole; ``address`` has its URL.

    PREFIX/pages/<identity>/<page key>.<pool>     the page as it is everywhere, its seal first
    PREFIX/manifests/<identity>.json              what the pages of an identity are

A put is a conditional one, so that no page is ever half there, and the first of two writers wins; what it meets there
counts as stored once its length, at level DURABLE its seal, is right. A page costs a request: from some 256 KiB on
bytes cost more than requests do, see docs/performance.md.

What may be put, and is not, for want of a right, is declined: such a store is read. S3 answers 403 for a name that is
not there to who may not list the bucket; that is a miss where an object that is there can be asked for.

What a bucket has acknowledged it keeps, so this store is durable. It keeps no order of use, and has no cap of ours:
the bucket's rule of lifetime over ``PREFIX/pages/`` removes pages by age, see docs/deploy.md.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeVar

from google.protobuf.json_format import MessageToJson

from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.seal import HEADER_BYTES, Label, is_sealed, may_be_coded
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.bounded_call import CallsInFlight
from unified_cache.storage_backends.common.names import IDENTITY_BYTES, check_identity, check_scan, parse_page_name
from unified_cache.storage_backends.manifest import MANIFEST_BYTES_MAX, is_sound, parsed_manifest
from unified_cache.storage_backends.object.address import BucketAddress, address_of_url, open_bucket
from unified_cache.storage_backends.object.client import Bucket, ForbiddenError, Item, RequestThreads
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
    page_bytes,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PAGES = "pages"
MANIFESTS = "manifests"
"""Apart from the pages, so that a rule of lifetime leaves them: a manifest is as old as the first page."""

IDENTITIES_MAX = 1 << 16
"""Identities that a bucket may have, of all models and tenants; a listing goes no further."""

FORBIDDEN_S = 60.0
"""Puts are tried again so long after one was denied: policies change, and a page that is denied is sent whole."""


class ObjectStorage(Store):
    """Keep sealed pages in a bucket. Thread-safe.

    Requests of a call are made side by side, each bounded by its own timeout; the whole call is not, so it needs a
    guard. Pages whose request failed are UNAVAILABLE where others of their batch were answered; where none was, the
    last error is raised.
    """

    def __init__(
        self,
        bucket: Bucket,
        capability: Capability,
        requests_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._forbidden_s: float | None = None
        self._bucket = bucket
        self._capability = capability
        self._requests = RequestThreads(requests_max)
        self._calls = CallsInFlight(f"the store in {bucket.name}")

    @classmethod
    def open(cls, address: BucketAddress) -> "ObjectStorage":
        """Make the client; nothing is sent before the first call. Raise ConfigError as ``open_bucket``."""
        capability = Capability(address.scheme, durable=True, bytes_max=None, call_bytes=NETWORK_BYTES)
        return cls(Bucket(address.name, open_bucket(address)), capability, address.requests)

    def capability(self) -> Capability:
        """Return the abilities of this backend."""
        with self._calls:
            return self._capability

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Put the manifest unless the same is there; what is damaged is put again. The slabs are not needed.

        Raise StorageError where another identity or layout stands under this digest, and to who may not list: S3
        denies each name that is not there to them, so that every miss would be a failure.
        """
        with self._calls:
            check_identity(manifest.identity)
            name, content = _manifest_name(manifest.identity), MessageToJson(manifest).encode()
            found: Manifest | None = manifest
            may_put = True
            try:
                if not self._bucket.create(name, content):
                    found = self._manifest(manifest.identity)
            except ForbiddenError as error:
                self._decline_puts(error)
                found, may_put = self._manifest(manifest.identity), False
            is_there = found is not None and is_sound(found, manifest.identity)
            if is_there and found != manifest:
                place = f"{self._bucket.name}/{name}"
                message = f"{place} describes another identity or layout under the same digest"
                raise StorageError(message, retryable=False)
            if may_put and not is_there:
                self._bucket.replace(name, content)
            self._bucket.size_of(f"{PAGES}/{manifest.identity.hex()}/of nothing")

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask for the head of each object."""
        with self._calls:
            return self._answers(labels, self._exists)

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        """Ask for the head of each object; return its bytes, None where there is none."""
        with self._calls:
            found = self._requests.each(labels, lambda label: self._bucket.size_of(_page_name(label)))
            lengths = [each for each in found if not isinstance(each, StorageError)]
            if len(lengths) < len(found):
                _raise_last(found)
            return lengths

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each object and copy it into its buffers; one of another length is removed, its body unread."""
        with self._calls:
            return self._answers(pages, self._get)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Put each page that is not there; what the bucket has acknowledged is stored at either level."""
        with self._calls:
            return self._answers(pages, lambda page: self._put(page, level))

    def touch(self, labels: Sequence[Label]) -> None:
        """Do nothing: a bucket keeps no order of use."""
        with self._calls:
            return

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects. Each is asked for before, since a bucket does not say what was there."""
        with self._calls:
            found = self._answers(labels, self._exists)
            if Answer.UNAVAILABLE in found:
                raise StorageError(f"{self._bucket.name} did not answer for every object to remove", retryable=True)
            names = {_page_name(label) for label, hit in zip(labels, found, strict=True) if hit}
            self._bucket.remove(sorted(names))
            return len(names)

    def clear(self, identity: bytes) -> int:
        """Remove every page of one identity, some at a time, not its manifest."""
        with self._calls:
            check_identity(identity)
            removed_count = 0
            for objects in self._objects(identity, ""):
                self._bucket.remove([_page_name(each.label) for each in objects])
                removed_count += len(objects)
            return removed_count

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed."""
        with self._calls:
            check_scan(identity, cursor)
            found: list[StoredObject] = []
            for objects in self._objects(identity, cursor):
                found += objects
                if len(found) >= NAMES_MAX:
                    return Scan(found[:NAMES_MAX], found[NAMES_MAX - 1].label.page_name)
            return Scan(found, "")

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity that was registered or has an object."""
        with self._calls:
            kept: set[bytes | None] = set()
            for names in self._bucket.listed(MANIFESTS):
                kept.update(_identity_in(name) for name, _ in names)
                if len(kept) > IDENTITIES_MAX:
                    message = f"{self._bucket.name} must have at most {IDENTITIES_MAX} identities, found more"
                    raise StorageError(message, retryable=False)
            used = {_identity_in(name) for name in self._bucket.places_in(PAGES)}
            identities = sorted(filter(None, kept | used))
            found = self._requests.each(identities, self._manifest)
            read = [each if isinstance(each, Manifest) else None for each in found]
            return dict(zip(identities, read, strict=True))

    def close(self) -> None:
        """Wait for calls in flight and release the threads."""
        if self._calls.close():
            self._requests.close()

    def _answers(self, items: Sequence[Item], ask: Callable[[Item], Answer]) -> list[Answer]:
        """Ask for each item; UNAVAILABLE where that failed and others were answered."""
        found = self._requests.each(items, ask)
        failed = [each for each in found if isinstance(each, StorageError)]
        if failed and not any(isinstance(each, Answer) for each in found):
            _raise_last(failed)
        return [each if isinstance(each, Answer) else Answer.UNAVAILABLE for each in found]

    def _decline_puts(self, error: ForbiddenError) -> None:
        """Put nothing for a while, and have it logged where it begins."""
        if self._forbidden_s is None:
            logger.warning("%s: pages are read and none is put, which needs s3:PutObject", error)
        self._forbidden_s = self._clock()

    def _exists(self, label: Label) -> Answer:
        return Answer.MISS if self._bucket.size_of(_page_name(label)) is None else Answer.HIT

    def _get(self, page: PageIO) -> Answer:
        name, object_bytes = _page_name(page.label), page_bytes(page)
        content = self._bucket.read(name, object_bytes, object_bytes)
        if content is None:
            return Answer.MISS
        if isinstance(content, int):
            if may_be_coded(object_bytes - HEADER_BYTES, content):
                return Answer.MISS  # it is the page, but compressed or encrypted: see ``wrappers.coded``
            with suppress(ForbiddenError):
                self._bucket.remove([name])
            return Answer.FLAWED
        start = 0
        for buffer in page.buffers:
            end = start + buffer.nbytes
            buffer[:] = content[start:end]
            start = end
        return Answer.HIT

    def _put(self, page: PageIO, level: Level) -> Answer:
        forbidden_s = self._forbidden_s
        if forbidden_s is not None and self._clock() - forbidden_s < FORBIDDEN_S:
            return Answer.DECLINED
        name = _page_name(page.label)
        # A copy: what the HTTP client still sends of a request that failed must not be the caller's again.
        content = b"".join(page.buffers)
        try:
            if not self._bucket.create(name, content) and not self._is_stored(page.label, len(content), level):
                self._bucket.replace(name, content)
        except ForbiddenError as error:
            self._decline_puts(error)
            return Answer.DECLINED
        self._forbidden_s = None
        return Answer.STORED

    def _is_stored(self, label: Label, object_bytes: int, level: Level) -> bool:
        """Return whether what lies under a page's name is that page: by its length, at DURABLE by its seal."""
        if level is Level.CACHED:
            return self._bucket.size_of(_page_name(label)) == object_bytes
        found = self._bucket.read(_page_name(label), object_bytes, object_bytes)
        return isinstance(found, memoryview) and is_sealed(found, label)

    def _objects(self, identity: bytes, cursor: str) -> Iterator[list[StoredObject]]:
        for names in self._bucket.listed(f"{PAGES}/{identity.hex()}", cursor):
            labels = [(parse_page_name(identity, name), object_bytes) for name, object_bytes in names]
            yield [StoredObject(label, object_bytes) for label, object_bytes in labels if label is not None]

    def _manifest(self, identity: bytes) -> Manifest | None:
        found = self._bucket.read(_manifest_name(identity), MANIFEST_BYTES_MAX)
        return parsed_manifest(found.tobytes()) if isinstance(found, memoryview) else None


def _raise_last(found: Sequence[object]) -> NoReturn:
    """Raise the last error again, as another one: its traceback holds its frame, which must not hold it."""
    *_, last = [each for each in found if isinstance(each, StorageError)]
    raise type(last)(str(last), retryable=last.retryable)


def _page_name(label: Label) -> str:
    return f"{PAGES}/{label.object_name}"


def _manifest_name(identity: bytes) -> str:
    return f"{MANIFESTS}/{identity.hex()}.json"


def _identity_in(name: str) -> bytes | None:
    """Return the identity whose digits a name begins with; None for what is not ours."""
    try:
        digest = bytes.fromhex(name.removesuffix(".json"))
    except ValueError:
        return None
    return digest if len(digest) == IDENTITY_BYTES else None


def _opened(scheme: str, rest: str, bytes_max: int | None) -> ObjectStorage:
    """Open ``SCHEME://BUCKET/PREFIX``, see ``address``; ``bytes_max`` is not ours to set."""
    if bytes_max is not None:
        raise ConfigError(f"a bucket's rule of lifetime is its cap, found a cap of {bytes_max} bytes")
    return ObjectStorage.open(address_of_url(scheme, rest))


open_s3_url = partial(_opened, "s3")
open_gs_url = partial(_opened, "gs")
open_az_url = partial(_opened, "az")
