"""A store around another: it passes every call on, and a layer overrides what it changes. As the layers of OpenDAL.

And the layer over every store: one that believes none, and verifies every page read before anyone uses it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from threading import Lock
from typing import TypeVar

from unified_cache.core.errors import ConfigError, StorageError, check_kind
from unified_cache.core.seal import Flaw, Label, PageChecksum, verify_buffers
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.protocol import (
    Answer,
    Capability,
    Contents,
    Level,
    PageIO,
    Scan,
    Store,
    page_bytes,
)
from unified_cache.storage_backends.removals import RemovalFeed

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

SUMMED_BYTES_MIN = 4 << 20
"""Pages of a call for less are in the processor's caches when it returns: checksums taken meanwhile gain nothing."""


class Method(Enum):
    """A method of a store: what a wrapper counts, times, delays or names in a message."""

    CAPABILITY = "capability"
    REGISTER = "register"
    EXISTS = "exists"
    GET = "get"
    PUT = "put"
    TOUCH = "touch"
    REMOVE = "remove"
    CLEAR = "clear"
    SCAN = "scan"
    MANIFESTS = "manifests"
    CONTENTS = "contents"
    FOREIGN_PATHS = "foreign_paths"
    CLOSE = "close"
    __hash__ = object.__hash__  # as that of ``Answer``


READS = (Answer.HIT, Answer.MISS, Answer.UNAVAILABLE, Answer.FLAWED)
PUTS = (Answer.STORED, Answer.DECLINED, Answer.UNAVAILABLE)
"""The most usual first: where all are that, nothing else is counted."""


class StorageLayer(Store):
    """Pass every call of a store on to the wrapped one, which it closes; by ``_call``.

    But for ``lengths`` and ``memory_reader``, which go past what a layer does: it has none unless it says so.
    """

    def __init__(self, backend: Store) -> None:
        self._backend = backend

    @property
    def backend(self) -> Store:
        """The wrapped store."""
        return self._backend

    def _call(self, method: Method, work: Callable[[], Result], asked_count: int | None = None) -> Result:
        """Make one call to the wrapped backend; a layer that does something about every call overrides this.

        ``asked_count`` is of a call that has an answer for each page.
        """
        return work()

    def capability(self) -> Capability:
        """Return what the wrapped backend can do."""
        return self._call(Method.CAPABILITY, self._backend.capability)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend."""
        return self._call(Method.EXISTS, partial(self._backend.exists, labels), len(labels))

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers."""
        return self._call(Method.GET, partial(self._backend.get, pages), len(pages))

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of the wrapped backend."""
        return self._call(Method.SCAN, partial(self._backend.scan, identity, cursor))

    def manifests(self) -> dict[bytes, Manifest | None] | None:
        """Return the manifest of every identity of the wrapped backend, by its digest."""
        return self._call(Method.MANIFESTS, self._backend.manifests)

    def contents(self, identity: bytes) -> Contents | None:
        """Ask the wrapped backend to count the objects of an identity."""
        return self._call(Method.CONTENTS, partial(self._backend.contents, identity))

    def foreign_paths(self) -> list[str]:
        """Return what stands in the place of a directory of the wrapped backend."""
        return self._call(Method.FOREIGN_PATHS, self._backend.foreign_paths)

    def close(self) -> None:
        """Close the wrapped backend."""
        self._call(Method.CLOSE, self._backend.close)

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Announce an identity to the wrapped backend."""
        self._call(Method.REGISTER, partial(self._backend.register, manifest, slabs))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages."""
        return self._call(Method.PUT, partial(self._backend.put, pages, level), len(pages))

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent in the wrapped backend."""
        self._call(Method.TOUCH, partial(self._backend.touch, labels))

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects from the wrapped backend."""
        return self._call(Method.REMOVE, partial(self._backend.remove, labels))

    def clear(self, identity: bytes) -> int:
        """Remove every object of one identity from the wrapped backend."""
        return self._call(Method.CLEAR, partial(self._backend.clear, identity))

    @property
    def is_read_only(self) -> bool:
        """Whether this process may not write the wrapped backend."""
        return self._backend.is_read_only

    @property
    def decline_reason(self) -> str:
        """Why the wrapped backend last declined a put; empty where it has not, or does not say."""
        return self._backend.decline_reason

    def removals(self) -> RemovalFeed | None:
        """Subscribe to the removals of the wrapped backend, which waits for nothing."""
        return self._backend.removals()


def check_answers(store: Store, method: Method, answers: object, pages_count: int) -> None:
    """Raise StorageError unless a store gave one answer for each page, of those that its method may give.

    A batch is checked without a step of Python for each page.
    """
    allowed = PUTS if method is Method.PUT else READS
    if isinstance(answers, list) and len(answers) == pages_count:
        left_count = pages_count
        for answer in allowed:
            left_count -= answers.count(answer)
            if not left_count:
                return
    while isinstance(store, StorageLayer):
        store = store.backend
    names = ", ".join(answer.name for answer in allowed)
    raise StorageError(
        f"{type(store).__module__}.{type(store).__qualname__}.{method.value} must return a list of {pages_count} "
        f"answers, each of {names}, found {answers!r:.80}",
        retryable=False,
    )


def capability_of(store: Store) -> Capability:
    """Ask a store what it can do; raise ConfigError where it does not say."""
    found = store.capability()
    check_kind(found, Capability, f"a Capability from capability() of {type(store).__name__}", ConfigError)
    return found


class VerifiedStorage(StorageLayer):
    """Answer FLAWED for a page that does not verify, remove it from the wrapped store, and count it by its flaw.

    It reads every payload byte once more, at the speed of xxh3, and copies none: while pages are read where there are
    many bytes of them and the store takes the checksums along, otherwise after it. It owns the wrapped backend:
    closing it closes that. Thread-safe where the backend is.
    """

    def __init__(self, backend: Store) -> None:
        super().__init__(backend)
        self._call_bytes = backend.capability().call_bytes
        self._flaws_count: Counter[Flaw] = Counter()
        self._guard = Lock()

    @property
    def flaws_count(self) -> dict[Flaw, int]:
        """Pages found flawed so far; a copy, flaws never seen are absent."""
        with self._guard:
            return dict(self._flaws_count)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend; by no further step, which would take half as long as a store in memory."""
        return self._backend.exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers; HIT only where they hold the page of its label, or where there are none."""
        hits: list[Answer] = []
        parts = ((pages, page_bytes(pages[0])),) if len(pages) == 1 else self._parts(pages)
        for part, asked_bytes in parts:
            is_summed = asked_bytes >= SUMMED_BYTES_MIN
            asked = summed(part) if is_summed else part
            answers = self._backend.get(asked)
            check_answers(self._backend, Method.GET, answers, len(asked))
            self._refuse_flawed(asked, answers, is_summed=is_summed)
            hits += answers
        return hits

    def _parts(self, pages: Sequence[PageIO]) -> Sequence[tuple[Sequence[PageIO], int]]:
        """Cut a batch into the calls that the wrapped backend likes best; each comes with its bytes."""
        parts: list[tuple[Sequence[PageIO], int]] = []
        start = taken_bytes = 0
        for end, page in enumerate(pages, 1):
            taken_bytes += page_bytes(page)
            if taken_bytes >= self._call_bytes or end == len(pages):
                parts.append((pages[start:end], taken_bytes))
                start, taken_bytes = end, 0
        return parts

    def _refuse_flawed(self, pages: Sequence[PageIO], answers: list[Answer], *, is_summed: bool) -> None:
        """Make hits that do not verify FLAWED, count them, and remove them from the wrapped backend."""
        flaws: dict[int, Flaw] = {}
        for number, page in enumerate(pages):
            if answers[number] is Answer.HIT and page.buffers:
                flaw = verify_buffers(page.buffers, page.label, page.checksum if is_summed else None)
                if flaw is not None:
                    flaws[number] = flaw
        if not flaws:
            return
        with self._guard:
            self._flaws_count.update(flaws.values())
        for number, flaw in flaws.items():
            answers[number] = Answer.FLAWED
            name = pages[number].label.object_name
            logger.warning("a page that storage returned is flawed (%s): %s", flaw.value, name)
        # A page that cannot be removed is found flawed again by the next get; the answer here stays right.
        with suppress(StorageError):
            self._backend.remove([pages[number].label for number in flaws])


def summed(pages: Sequence[PageIO]) -> list[PageIO]:
    """Give each page a new checksum for its store to add to, whatever it had."""
    return [PageIO(label, buffers, PageChecksum()) for label, buffers, _ in pages]
