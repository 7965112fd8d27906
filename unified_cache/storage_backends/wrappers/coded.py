"""Pages compressed, encrypted, or both, over any store that says how long its objects are.

Every store that outlives its process is read through this layer: what another process stored coded is read as well as
what lies there as it is. ``page_coding`` has the bytes of an object.

Whose key opens a page is not for the store to say. Its owner is the tenant that a service has authenticated, for each
call, or that of an identity that this process registered. A tool without either lists the store, and an identity is the
digest of its owner's name: what a manifest says counts only under the digest of all that it says. Where nobody has said
whose page it is, it is a miss, and none is put.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from types import NoneType

from unified_cache.core.errors import StorageError
from unified_cache.core.process import HomeProcess
from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.manifest import is_sound, owner_of
from unified_cache.storage_backends.protocol import (
    Answer,
    Level,
    PageIO,
    Store,
    page_bytes,
)
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer, check_answers
from unified_cache.storage_backends.wrappers.page_coding import CodingChoice, PageCoder, Undecoded

UNREADABLE_MAX = 1 << 16
"""Names kept of objects that cannot be read here, and are put again: some 15 MB."""

OWNERS_MAX = 1 << 16
"""Identities whose owner is kept, those in use: a service says it again at each call. Some 20 MB."""

FORGOTTEN_S = 10.0
"""What could not be read is tried again so long after: its key may have come, or another process put it again."""

MISS = Answer.MISS
"""Looked up once: a member of an Enum costs 0.3 us each time in Python 3.11, a third of what this layer does."""

LEFT = frozenset({Undecoded.UNENCRYPTED, Undecoded.NO_KEY, Undecoded.NO_CODEC, Undecoded.NO_OWNER})
"""Objects that somebody else may be able to read: they stay, until the page is put again."""


class CodedStorage(StorageLayer):
    """Store pages compressed, encrypted or both, and read them however they were stored, removing what is no page.

    What is not the page that was asked for is a miss, counted by its reason. It owns the wrapped backend. Thread-safe
    where the backend is; pages are coded on the caller's thread.
    """

    def __init__(
        self, backend: Store, choice: CodingChoice | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raise as ``PageCoder``. Without a choice pages are stored as they are. ``clock`` gives seconds."""
        super().__init__(backend)
        self._coder = PageCoder(CodingChoice() if choice is None else choice, clock)
        self._unreadable: set[Label] = set()
        """Objects that cannot be read here; with one more than ``UNREADABLE_MAX`` all are forgotten."""
        self._clock = clock
        self._forgotten_s = clock()
        self._owners: OrderedDict[bytes, str] = OrderedDict()
        self._counts: Counter[Undecoded] = Counter()
        self._home = HomeProcess("this store of coded pages")
        self._guard = Lock()

    def memory_reader(self) -> Store | None:
        """Return what reads pages of the wrapped store from memory, as they are; None where none is believed."""
        return None if self._coder.is_encrypting else self._backend.memory_reader()

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Announce an identity to the wrapped backend, and learn whose it is."""
        self.own((manifest.identity,), owner_of(manifest.model))
        super().register(manifest, slabs)

    @property
    def undecoded_counts(self) -> dict[Undecoded, int]:
        """Objects that were none of the pages asked for, by reason; a copy."""
        with self._guard:
            return dict(self._counts)

    def _count(self, reasons: Iterable[Undecoded]) -> None:
        """Count objects that are none of the pages asked for, and pages that cannot be encoded."""
        with self._guard:
            self._counts.update(reasons)

    def own(self, identities: Iterable[bytes], owner: str) -> None:
        """Remember whose pages those of some identities are, as who asks for them says."""
        if self._coder.is_encrypting:
            with self._guard:
                for identity in identities:
                    self._owners[identity] = owner
                    self._owners.move_to_end(identity)
                while len(self._owners) > OWNERS_MAX:
                    self._owners.popitem(last=False)

    def manifests(self) -> dict[bytes, Manifest | None] | None:
        """Return the manifest of every identity; one under its own digest says whose the pages are."""
        found = super().manifests()
        for identity, manifest in (found or {}).items():
            if self._coder.is_encrypting and manifest is not None and is_sound(manifest, identity):
                self.own((identity,), owner_of(manifest.model))
        return found

    def _forget_unreadable(self) -> None:
        """Forget what could not be read, ``FORGOTTEN_S`` after the last time."""
        if self._clock() - self._forgotten_s >= FORGOTTEN_S:
            with self._guard:
                self._forgotten_s = self._clock()
                self._unreadable.clear()

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend; what is known to be unreadable here is a miss."""
        if not self._unreadable:
            return self._backend.exists(labels)
        self._forget_unreadable()
        found = self._backend.exists(labels)
        check_answers(self._backend, Method.EXISTS, found, len(labels))
        return [Answer.MISS if label in self._unreadable else each for label, each in zip(labels, found, strict=True)]

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers, from an object as it is or a coded one; remove what is no page."""
        # As it is, a page that is coded is a miss. Where most are, none is tried so.
        answers = [MISS] * len(pages) if self._coder.is_coding else self._backend.get(pages)
        if MISS in answers:
            flawed = self._read_coded(pages, answers)
            if flawed:
                with suppress(StorageError):  # it is found flawed again by the next get
                    self._backend.remove(flawed)
        return answers

    def _read_coded(self, pages: Sequence[PageIO], answers: list[Answer]) -> list[Label]:
        """Fill the buffers of the pages that are a MISS so far, and complete ``answers``.

        Return which objects prove to be no pages and are to be removed.
        """
        left = [number for number, answer in enumerate(answers) if answer is MISS]
        objects: dict[int, PageIO] = {}
        refused: dict[int, Undecoded] = {}
        try:
            lengths = self._backend.lengths([pages[number].label for number in left])
        except StorageError:
            if self._coder.is_coding:
                raise
            for number in left:
                answers[number] = Answer.UNAVAILABLE
            return []  # the other pages of the batch have their answers
        for number, length in zip(left, self._checked(lengths, len(left)), strict=True):
            page, wanted = pages[number], page_bytes(pages[number])
            if length is None:
                continue
            if may_be_coded(wanted - HEADER_BYTES, length):
                objects[number] = PageIO(page.label, (memoryview(bytearray(length)),))
            elif not self._coder.is_coding:
                continue  # it was asked for as it is
            elif not self._coder.is_encrypting:
                objects[number] = page
            else:
                refused[number] = Undecoded.UNENCRYPTED if length == wanted else Undecoded.DAMAGED
        found = self._backend.get(list(objects.values())) if objects else []
        check_answers(self._backend, Method.GET, found, len(objects))
        for number, answer in zip(objects, found, strict=True):
            answers[number], page = answer, pages[number]
            if answer is Answer.HIT and objects[number] is not page:
                (stored,) = objects[number].buffers
                reason = self._coder.decode(stored, page, self._owners.get(page.label.identity))
                if reason is not None:
                    refused[number] = reason
        return self._refuse(pages, refused, answers) if refused else []

    def _checked(self, lengths: list[int | None] | None, count: int) -> list[int | None]:
        if not isinstance(lengths, list) or not set(map(type, lengths)) <= {int, NoneType} or len(lengths) != count:
            name = type(self._backend).__name__
            raise StorageError(
                f"{name}.lengths must return {count} lengths, or None, found {lengths!r:.80}", retryable=False
            )
        return lengths

    def _refuse(self, pages: Sequence[PageIO], refused: Mapping[int, Undecoded], answers: list[Answer]) -> list[Label]:
        """Count and answer objects that are not the pages asked for; return those that nobody can read."""
        self._count(refused.values())
        # Who has no keys at all does not know what is there; who has some knows that it is none of theirs.
        unread = Answer.MISS if self._coder.is_encrypting else Answer.UNAVAILABLE
        left = {number for number, reason in refused.items() if reason in LEFT}
        for number in refused:
            answers[number] = unread if number in left else Answer.FLAWED
        self._forget_unreadable()
        with self._guard:
            if len(self._unreadable) + len(left) > UNREADABLE_MAX:
                self._unreadable.clear()
            self._unreadable.update(pages[number].label for number in left if refused[number] is not Undecoded.NO_OWNER)
        return [pages[number].label for number in refused if number not in left]

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages; those whose owner has no key are declined. What could not be read here is replaced.

        For DURABLE what is there is read first: the store's own seal holds of an object that no key of ours opens.
        """
        if not self._coder.is_coding:
            return self._backend.put(pages, level)
        self._home.check()  # what codes pages has locks of its own
        encoded = [self._coder.encode(page, self._owners.get(page.label.identity)) for page in pages]
        objects = [each for each in encoded if each is not None]
        self._count(
            Undecoded.NO_KEY if page.label.identity in self._owners else Undecoded.NO_OWNER
            for page, each in zip(pages, encoded, strict=True)
            if each is None
        )
        if level is Level.DURABLE:
            self.get([PageIO(page.label, (memoryview(bytearray(page_bytes(page))),)) for page in pages])
        with self._guard:
            unreadable = [each.label for each in objects if each.label in self._unreadable]
            self._unreadable.difference_update(unreadable)
        if unreadable:
            self._backend.remove(unreadable)
        taken = self._backend.put(objects, level)
        check_answers(self._backend, Method.PUT, taken, len(objects))
        answers = iter(taken)
        return [Answer.DECLINED if each is None else next(answers) for each in encoded]
