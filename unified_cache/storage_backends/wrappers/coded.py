"""Pages compressed, encrypted, or both, over any store that says how long its objects are.

Every store that outlives its process is read through this layer: what another process stored coded is read as well as
what lies there as it is. ``page_coding`` has the bytes of an object.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Protocol, runtime_checkable

from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.catalog import UsedBetween, catalog_in, catalog_of
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.manifest import described_by
from unified_cache.storage_backends.memory_reads import MemoryReader, memory_reader_in
from unified_cache.storage_backends.protocol import (
    Answer,
    Capability,
    Level,
    PageIO,
    Scan,
    StorageBackend,
    StorageReader,
)
from unified_cache.storage_backends.wrappers.layer import StorageLayer
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice, PageCoder, Undecoded

__all__ = ["CodedReader", "CodedStorage", "SizedObjects", "coded"]

UNREADABLE_MAX = 1 << 16
"""Names kept of objects that cannot be read here, and are put again; with one more all are forgotten."""

LEFT = frozenset({Undecoded.UNENCRYPTED, Undecoded.NO_KEY, Undecoded.NO_CODEC})
"""Objects that somebody else may be able to read: they stay, until the page is put again."""


@runtime_checkable
class SizedObjects(Protocol):
    """A store that says how long its objects are, beside what every store does."""

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        """Return the bytes of each object, None where there is none; raise StorageError on a fault."""
        ...


def coded(backend: StorageBackend, choice: CodingChoice | None) -> StorageBackend:
    """Put the layer over a store that asks for it, or that may hold coded pages of others.

    Raises:
        ConfigError: the store does not say how long its objects are, or the choice cannot be made.
    """
    if isinstance(backend, SizedObjects):
        return CodedStorage(backend, choice) if choice is not None or backend.capability().durable else backend
    if choice is None:
        return backend
    raise ConfigError(
        f"compress= and keys= need a store that says how long its objects are, {type(backend).__name__} does not; "
        f"where it is a service, give them to the service"
    )


class CodedPages:
    """Reads pages through a coder, from a store that is opened to be read, or to be written. Thread-safe."""

    def __init__(
        self, store: StorageReader, choice: CodingChoice | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert isinstance(store, SizedObjects), "what is opened by ``coded`` says how long its objects are"
        self._lengths = store.lengths
        self._store: StorageReader = store
        self.coder = PageCoder(CodingChoice() if choice is None else choice, clock)
        self.are_expected = choice is not None
        """Whether it pays to ask for lengths first; else a store answers UNAVAILABLE for a page that is coded."""
        self._models: dict[bytes, str] = {}
        self._unreadable: set[Label] = set()
        self._guard = Lock()

    def learn(self, manifest: Manifest) -> None:
        """Remember whose pages those of an identity are."""
        self._models[manifest.identity] = manifest.model

    def model_of(self, identity: bytes) -> str:
        """Return the model's name in a manifest whose digest is that identity; empty where nobody has said it."""
        if self.coder.is_encrypting and identity not in self._models and catalog_in(self._store) is not None:
            manifest = catalog_of(self._store).manifests().get(identity)
            with suppress(StorageError):  # one that says another name than its digest
                if manifest is not None:
                    described_by(manifest)
                    self.learn(manifest)
        return self._models.get(identity, "")

    @property
    def has_unreadable(self) -> bool:
        """Whether an object is known that cannot be read here."""
        return bool(self._unreadable)

    def take_unreadable(self, labels: Sequence[Label]) -> list[Label]:
        """Return those labels that are known to be unreadable here, and forget them."""
        with self._guard:
            found = [label for label in labels if label in self._unreadable]
            self._unreadable.difference_update(found)
        return found

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the store; what is known to be unreadable here is a miss."""
        found, unreadable = self._store.exists(labels), self._unreadable
        return [Answer.MISS if label in unreadable else each for label, each in zip(labels, found, strict=True)]

    def get(self, pages: Sequence[PageIO]) -> tuple[list[Answer], list[Label]]:
        """Fill each page's buffers; return besides which objects prove to be no pages and are to be removed."""
        lengths = self._lengths([page.label for page in pages])
        wanted = [page_bytes(page) for page in pages]
        if lengths == wanted and not self.coder.is_encrypting:
            return self._store.get(pages), []
        answers = [Answer.MISS] * len(pages)
        asked: dict[int, PageIO] = {}
        objects: dict[int, memoryview] = {}
        refused: dict[int, Undecoded] = {}
        for number, (page, length) in enumerate(zip(pages, lengths, strict=True)):
            if length is not None and may_be_coded(wanted[number] - HEADER_BYTES, length):
                self.are_expected = True
                objects[number] = memoryview(bytearray(length))
                asked[number] = PageIO(page.label, (objects[number],))
            elif not self.coder.is_encrypting:
                asked[number] = page
            elif length is not None:
                refused[number] = Undecoded.UNENCRYPTED if length == wanted[number] else Undecoded.DAMAGED
        for number, answer in zip(asked, self._store.get(list(asked.values())), strict=True):
            answers[number] = answer
            if answer is Answer.HIT and number in objects:
                page = pages[number]
                reason = self.coder.decode(objects[number], page, self.model_of(page.label.identity))
                if reason is not None:
                    refused[number] = reason
        answers_of_refused = self._refuse({pages[number].label: reason for number, reason in refused.items()})
        for number in refused:
            answers[number] = answers_of_refused[pages[number].label]
        return answers, [label for label, answer in answers_of_refused.items() if answer is Answer.FLAWED]

    def _refuse(self, reasons: Mapping[Label, Undecoded]) -> dict[Label, Answer]:
        """Count objects that are not the pages asked for; return what is answered of each."""
        self.coder.count(reasons.values())
        left = [label for label, reason in reasons.items() if reason in LEFT]
        with self._guard:
            if len(self._unreadable) + len(left) > UNREADABLE_MAX:
                self._unreadable.clear()
            self._unreadable.update(left)
        # Who has no keys at all does not know what is there; who has some knows that it is none of theirs.
        unread = Answer.MISS if self.coder.is_encrypting else Answer.UNAVAILABLE
        return {label: unread if reason in LEFT else Answer.FLAWED for label, reason in reasons.items()}


class CodedStorage(StorageLayer):
    """Store pages compressed, encrypted or both, and read them however they were stored.

    What is not the page that was asked for is a miss, counted by its reason in ``undecoded_counts``. It owns the
    wrapped backend. Thread-safe where the backend is; pages are coded on the caller's thread.
    """

    def __init__(
        self, backend: StorageBackend, choice: CodingChoice | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raise as ``PageCoder``. Without a choice pages are stored as they are. ``clock`` gives seconds."""
        super().__init__(backend)
        self._pages = CodedPages(backend, choice, clock)
        self._is_coding = choice is not None

    @property
    def backend(self) -> StorageBackend:
        """The wrapped store."""
        return self._backend

    @property
    def undecoded_counts(self) -> dict[Undecoded, int]:
        """Objects that were none of the pages asked for, by reason; a copy."""
        return self._pages.coder.undecoded_counts

    def memory_reader(self) -> MemoryReader | None:
        """Return the wrapped store as one that reads pages from memory, as they are; None where none is believed."""
        return None if self._pages.coder.is_encrypting else memory_reader_in(self._backend)

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Announce an identity to the wrapped backend, and learn whose it is."""
        self._pages.learn(manifest)
        super().register(manifest, slabs)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend; what is known to be unreadable here is a miss."""
        return self._pages.exists(labels) if self._pages.has_unreadable else self._backend.exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers, from an object as it is or a coded one; remove what is no page."""
        if not self._pages.are_expected:
            answers = self._backend.get(pages)
            if Answer.UNAVAILABLE in answers:
                left = [number for number, answer in enumerate(answers) if answer is Answer.UNAVAILABLE]
                for number, answer in zip(left, self._get_coded([pages[number] for number in left]), strict=True):
                    answers[number] = answer
            return answers
        return self._get_coded(pages)

    def _get_coded(self, pages: Sequence[PageIO]) -> list[Answer]:
        answers, flawed = self._pages.get(pages)
        if flawed:
            with suppress(StorageError):  # it is found flawed again by the next get
                self._backend.remove(flawed)
        return answers

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages; those whose owner has no key are declined. What could not be read here is replaced."""
        if not self._is_coding:
            return self._backend.put(pages, level)
        unreadable = self._pages.take_unreadable([page.label for page in pages])
        if unreadable:
            self._backend.remove(unreadable)
        coder = self._pages.coder
        objects = [coder.encode(page, self._pages.model_of(page.label.identity)) for page in pages]
        answers = iter(self._backend.put([each for each in objects if each is not None], level))
        return [Answer.DECLINED if each is None else next(answers) for each in objects]


class CodedReader:
    """Reads a store that is opened to be read alone, however its pages were stored. It owns that store."""

    def __init__(self, store: StorageReader, choice: CodingChoice | None) -> None:
        """Raise as ``PageCoder``."""
        self._store = store
        self._pages = CodedPages(store, choice)

    def capability(self) -> Capability:
        """Return what the store can do."""
        return self._store.capability()

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the store."""
        return self._pages.exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers; what is no page stays."""
        return self._pages.get(pages)[0]

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects, with the bytes that they have in the store."""
        return self._store.scan(identity, cursor)

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity of the store."""
        return catalog_of(self._store).manifests()

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Ask the store when objects of an identity were used."""
        return catalog_of(self._store).used_between(identity)

    def close(self) -> None:
        """Close the store."""
        self._store.close()
