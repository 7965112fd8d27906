"""A wrapper that believes no store: every page read is verified against its label before anyone uses it."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock

from unified_cache.errors import StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Flaw, Label, PageChecksum, verify_buffers
from unified_cache.storage_backends.catalog import Catalog, catalog_in
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan, StorageBackend
from unified_cache.storage_backends.removals import RemovalFeed, removals_of

__all__ = ["SUMMED_BYTES_MIN", "VerifiedStorage", "summed"]

SUMMED_BYTES_MIN = 4 << 20
"""Pages of a call for less are in the processor's caches when it returns: checksums taken meanwhile gain nothing."""

logger = logging.getLogger(__name__)


class VerifiedStorage:
    """Answer FLAWED for a page that does not verify, remove it from the wrapped store, and count it by its flaw.

    It reads every payload byte once more, at the speed of xxh3, and copies none: while pages are read where there are
    many bytes of them and the store takes the checksums along, otherwise after it. It owns the wrapped backend:
    closing it closes that. Thread-safe where the backend is.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._call_bytes: int | None = None
        self._flaws_count: Counter[Flaw] = Counter()
        self._guard = Lock()

    @property
    def flaws_count(self) -> dict[Flaw, int]:
        """Pages found flawed so far; a copy, flaws never seen are absent."""
        with self._guard:
            return dict(self._flaws_count)

    def capability(self) -> Capability:
        """Say what the wrapped backend can do."""
        return self._backend.capability()

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Announce an identity to the wrapped backend."""
        self._backend.register(manifest, slabs)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend; nothing is read, so a page that exists may still prove flawed."""
        return self._backend.exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers; HIT only where what was read is exactly the page that its label names.

        A page asked for without buffers brings no bytes, so there is nothing to verify.
        """
        if len(pages) == 1:
            return self._get(pages, page_bytes(pages[0]))
        call_bytes = self._asked_call_bytes()
        hits: list[Answer] = []
        start = taken_bytes = 0
        for end, page in enumerate(pages, 1):
            taken_bytes += page_bytes(page)
            if taken_bytes >= call_bytes or end == len(pages):
                hits += self._get(pages[start:end], taken_bytes)
                start, taken_bytes = end, 0
        return hits

    def _asked_call_bytes(self) -> int:
        """Ask the wrapped backend, once."""
        if self._call_bytes is None:
            self._call_bytes = self._backend.capability().call_bytes
        return self._call_bytes

    def _get(self, pages: Sequence[PageIO], asked_bytes: int) -> list[Answer]:
        is_summed = asked_bytes >= SUMMED_BYTES_MIN
        if is_summed:
            pages = summed(pages)
        hits = self._backend.get(pages)
        flaws: dict[int, Flaw] = {}
        for number, page in enumerate(pages):
            if hits[number] is Answer.HIT and page.buffers:
                flaw = verify_buffers(page.buffers, page.label, page.checksum if is_summed else None)
                if flaw is not None:
                    flaws[number] = flaw
        if flaws:
            for number in flaws:
                hits[number] = Answer.FLAWED
            with self._guard:
                self._flaws_count.update(flaws.values())
            for number, flaw in flaws.items():
                name = pages[number].label.object_name
                logger.warning("a page that storage returned is flawed (%s): %s", flaw.value, name)
            # A page that cannot be removed is found flawed again by the next get; the answer here stays right.
            with suppress(StorageError):
                self._backend.remove([pages[number].label for number in flaws])
        return hits

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages as they are: whoever sealed them vouches for them."""
        return self._backend.put(pages, level)

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent in the wrapped backend; a flawed one that nobody reads stays."""
        self._backend.touch(labels)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects from the wrapped backend."""
        return self._backend.remove(labels)

    def clear(self, identity: bytes) -> int:
        """Remove every object of one identity from the wrapped backend."""
        return self._backend.clear(identity)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of the wrapped backend, flawed or not."""
        return self._backend.scan(identity, cursor)

    def removals(self) -> RemovalFeed | None:
        """Have the wrapped backend tell what goes; asking it waits for nothing."""
        return removals_of(self._backend)

    def catalog(self) -> Catalog | None:
        """Hand on the catalog of the wrapped backend."""
        return catalog_in(self._backend)

    def close(self) -> None:
        """Close the wrapped backend."""
        self._backend.close()


def summed(pages: Sequence[PageIO]) -> list[PageIO]:
    """Give each page a new checksum for its store to add to, whatever it had."""
    return [PageIO(label, parent, buffers, PageChecksum()) for label, parent, buffers, _ in pages]
