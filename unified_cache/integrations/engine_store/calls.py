"""Calls of an engine's store: each is cut into pieces, and each piece goes to the store by itself.

    store    [header payload][header payload] ...      a piece in a bounce buffer: whole pages, sealed
    engine    row row        row row                   the payloads alone

Pages take one of two paths. A ``BufferedPiece`` holds the engine's rows only while it copies: ``revoke`` takes them
away, waits for a copy under way and nothing else, and from then on no row is read or written. A plain ``Piece`` gives
the rows themselves to a bounded store, which is never late, see ``Capability.bounded``.

How much goes in one call of an engine, beside what ``storage_backends.protocol`` says::

    AT_ONCE_BYTES_MAX   here           within memory, and to a bounded store, which cuts it itself
    PART_BYTES_MIN      here           less is moved by one thread
    PROBE_PAGES         pools          the first look at a chain, which most chains need no second one after
    FETCH_PAGES         tier_storage   pages that SGLang's host tier finds room for, and publishes, together
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import CacheError
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.core.seal import HEADER_BYTES, Label, seal_buffers
from unified_cache.integrations.engine_store.buffers import BounceBuffer
from unified_cache.integrations.engine_store.interface import (
    Clock,
    EnginePage,
    EngineStoreConfig,
    EngineStoreCounts,
    Unavailable,
)
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.bounded_call import BoundedCall, bound_steps
from unified_cache.storage_backends.common.breaker import Backoff, Retries
from unified_cache.storage_backends.common.other_identities import OtherIdentities
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import (
    BATCH_BYTES,
    NAMES_MAX,
    PIECE_BYTES_MAX,
    Answer,
    Capability,
    Level,
    PageIO,
    Store,
)
from unified_cache.storage_backends.wrappers import Method

ALIGN_BYTES = 64
"""A page in a bounce buffer begins on a cache line."""

LARGE_PAGE_BYTES = 16 << 10
"""From this size on it begins on a page of the machine's memory, as its object does in a file: the kernel copies much
slower between two places that differ by a few bytes within theirs."""

LARGE_ALIGN_BYTES = 4096

THREADS_MAX = 4
"""Threads in calls to the store that are not late: two parts of a read, a write and a look-up of SGLang have one each.
More of them wait for the interpreter rather than for the store."""

WRITES_MAX = 2
"""Of them those that write: one copies and seals while the other one waits, and a read finds a thread without them."""

PARTS_MAX, STARTED_PARTS_MAX = 2, 3
"""Parts of one call at a time: while one copies and checks, another waits for the store. The second of reads that
nobody waits for, such as the loads of vLLM."""

PART_BYTES_MIN = 1 << 20
"""Less is moved by one thread: handing it to a second one costs more than it saves."""

AT_ONCE_BYTES_MAX = 64 << 20
"""Bytes that are copied within memory between two looks at the clock, and of one call to a bounded store that a caller
makes on its own thread: the store cuts them, and has several calls under way."""

UNASKED_BYTES_MAX = 1 << 20
"""A put of no more to a service is not preceded by a look-up, which takes two thirds of the processor's time of sending
a MiB that the service has: it looks for itself."""

SMALL_ROW_BYTES = 64 << 10
"""Below this a copy is over before another thread could take the interpreter lock, and before numpy had begun it."""

_ANSWERS = tuple(Answer)

OnEnd = Callable[[list[Answer]], None]
"""Takes the answers of a call that is over, in the order of its pages; the rows are the engine's again."""


class Cut(NamedTuple):
    """Pages [start, end) of a call that go to the store together."""

    start: int
    end: int
    places: Sequence[tuple[int, int]] = ()
    """Where each page begins and ends in a bounce buffer, header included."""


def payload_bytes(page: EnginePage) -> int:
    """Return the bytes of a page's rows."""
    return page.rows[0].nbytes if len(page.rows) == 1 else sum([row.nbytes for row in page.rows])


def cut_pages(pages: Sequence[EnginePage], piece_bytes: int, parts_max: int = 1) -> list[Cut]:
    """Cut pages into pieces of about ``piece_bytes``, at least a page each, and into ``parts_max`` at the least."""
    pages_max = len(pages)
    if parts_max > 1:
        pages_max = -(-pages_max // parts_max)
    cuts: list[Cut] = []
    places: list[tuple[int, int]] = []
    first = start = 0
    for number, page in enumerate(pages):
        page_bytes = HEADER_BYTES + payload_bytes(page)
        if places and (start + page_bytes > piece_bytes or len(places) == pages_max):
            cuts.append(Cut(first, number, places))
            places, first, start = [], number, 0
        align_bytes = LARGE_ALIGN_BYTES if page_bytes >= LARGE_PAGE_BYTES else ALIGN_BYTES
        start = -(-start // align_bytes) * align_bytes
        places.append((start, start + page_bytes))
        start += page_bytes
    if places:
        cuts.append(Cut(first, len(pages), places))
    return cuts


def _as_bytes(row: memoryview) -> memoryview:
    """Return a row as bytes, whatever its owner keeps there."""
    return row if row.format == "B" and row.ndim == 1 else row.cast("B")


def with_headers(pages: Sequence[EnginePage]) -> list[PageIO]:
    """Put memory for a header before the rows of each page."""
    headers = memoryview(bytearray(HEADER_BYTES * len(pages)))
    starts = range(0, len(headers), HEADER_BYTES)
    return [
        PageIO(page.label, (headers[start : start + HEADER_BYTES], *map(_as_bytes, page.rows)))
        for page, start in zip(pages, starts, strict=True)
    ]


class Piece:
    """Labels that the store is asked about together; of pages that move, those of a bounded store, without a copy.

    Such a store reads and fills the rows themselves, and uses none of them once it has returned.
    """

    def __init__(self, cut: Cut, pages: Sequence[EnginePage]) -> None:
        """``pages`` are those of the whole call; empty where none moves."""
        self.cut = cut
        self.copied_bytes = 0
        """Payload that was moved so far."""
        self.due_s = math.inf
        """When the call to the store that it is in is late."""
        self._pages: Sequence[EnginePage] = pages[cut.start : cut.end]

    def take(self, buffer: BounceBuffer) -> bool:
        """Return False: it needs no bounce buffer."""
        return False

    def revoke(self) -> BounceBuffer | None:
        """Release the engine's rows, now and for good. Return the bounce buffer that it lies in, if any."""
        self._pages = ()
        return None

    def ios(self, numbers: Sequence[int]) -> list[PageIO]:
        """Return the pages of these numbers within the piece, as the store reads or fills them."""
        return with_headers([self._pages[number] for number in numbers])

    def read_rows(self, number: int) -> bool:
        """Bring the rows of a page to where the store reads them; False if they are revoked."""
        return True

    def fill_rows(self, numbers: Sequence[int], answers: Sequence[Answer]) -> None:
        """Bring the hits among these pages into their rows, unless these are revoked."""
        self.count([number for number, answer in zip(numbers, answers, strict=True) if answer is Answer.HIT])

    def count(self, numbers: Sequence[int]) -> None:
        """Count the payload of these pages as moved."""
        places = self.cut.places
        self.copied_bytes += sum([places[number][1] - places[number][0] - HEADER_BYTES for number in numbers])


class BufferedPiece(Piece):
    """Copies through a bounce buffer, for a store that may be late: rows are used only while they are copied.

    It is made on one thread, and the owner of the rows revokes them on another: both under a guard.
    """

    def __init__(self, cut: Cut, pages: Sequence[EnginePage]) -> None:
        super().__init__(cut, pages)
        self._labels = [page.label for page in self._pages]
        self._is_revoked = False
        self._guard = Lock()
        self._buffer: BounceBuffer | None = None
        self._view = memoryview(b"")
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def wanted_bytes(self) -> int:
        """Bytes of the bounce buffer that it lacks; 0 if it has one."""
        return 0 if self._buffer is not None else self.cut.places[-1][1]

    def take(self, buffer: BounceBuffer) -> bool:
        """Lie in a bounce buffer from now on; False if it has too few bytes, or the rows are revoked."""
        with self._guard:
            if self._is_revoked or buffer.size_bytes < self.wanted_bytes:
                return False
            self._buffer, self._view = buffer, buffer.view
            self._bytes = np.frombuffer(buffer.view, np.uint8)
            return True

    def revoke(self) -> BounceBuffer | None:
        """Release the engine's rows, now and for good; wait for a copy under way. Return the buffer that it lies in."""
        with self._guard:
            self._is_revoked, self._pages = True, ()
            buffer, self._buffer = self._buffer, None
            return buffer

    def read_memory(self, memory: Store) -> list[Answer]:
        """Fill the rows of the pages that a store has in memory, which waits for nothing; UNAVAILABLE are others."""
        hit, unavailable = Answer.HIT, Answer.UNAVAILABLE
        with self._guard:
            answers = [hit if there else unavailable for there in memory.read_memory(with_headers(self._pages))]
        self.count([number for number, answer in enumerate(answers) if answer is hit])
        return answers

    def ios(self, numbers: Sequence[int]) -> list[PageIO]:
        """Return pages in the bounce buffer."""
        places = self.cut.places
        return [
            PageIO(self._labels[number], (self._view[places[number][0] : places[number][1]],)) for number in numbers
        ]

    def read_rows(self, number: int) -> bool:
        """Copy the rows of a page into the bounce buffer; False if they are revoked."""
        with self._guard:
            if self._is_revoked:
                return False
            start = self.cut.places[number][0] + HEADER_BYTES
            for row in self._pages[number].rows:
                end = start + row.nbytes
                if row.nbytes < SMALL_ROW_BYTES and row.format == "B" and row.ndim == 1:
                    self._view[start:end] = row
                else:
                    np.copyto(self._bytes[start:end], np.frombuffer(row, np.uint8))
                start = end
        return True

    def fill_rows(self, numbers: Sequence[int], answers: Sequence[Answer]) -> None:
        """Copy the hits among these pages into their rows, unless these are revoked."""
        hits = [number for number, answer in zip(numbers, answers, strict=True) if answer is Answer.HIT]
        with self._guard:
            for number in () if self._is_revoked else hits:
                start = self.cut.places[number][0] + HEADER_BYTES
                for row in self._pages[number].rows:
                    end = start + row.nbytes
                    if row.nbytes < SMALL_ROW_BYTES and row.format == "B" and row.ndim == 1:
                        row[:] = self._view[start:end]
                    else:
                        np.copyto(np.frombuffer(row, np.uint8), self._bytes[start:end])
                    start = end
        self.count(hits)


class Part:
    """Pieces of a call that are made one after the other, on one thread at a time."""

    __slots__ = ("bounded", "piece")

    def __init__(self, piece: Piece | None) -> None:
        self.piece = piece
        """The one that it is at; None once it has ended."""
        self.bounded: BoundedCall[object] | None = None
        """The call that makes it, once it is handed to a thread."""


class CallTime(NamedTuple):
    """Time of one call to an engine's store."""

    deadline_s: float
    """Longest wait for a store that does not answer."""
    started_s: float
    until_s: float
    """No piece is begun from then on."""
    due_s: float
    """When the engine waits no longer, however well the store answers."""
    waits_in_line: bool
    """Whether nobody waits for the call: then the time in which it waits for a thread is not the store's."""

    @property
    def first_due_s(self) -> float:
        """End of the wait for a thread, and for the first answer."""
        return self.due_s if self.waits_in_line else min(self.started_s + self.deadline_s, self.due_s)


class EngineCall:
    """One call of an engine: its pieces, the parts that are under way, and the answers so far.

    A store that answers has a deadline for each step; once it does not, no step of the call gets another one.
    """

    def __init__(
        self,
        method: Method,
        labels: Sequence[Label],
        pages: Sequence[EnginePage],
        identities: Collection[bytes],
        time: CallTime,
        on_end: OnEnd | None,
        level: Level = Level.CACHED,
    ) -> None:
        """``pages`` is empty where none moves."""
        self.method = method
        self.labels = labels
        self.identities = identities
        self.level = level
        self.time = time
        self.due_s = time.first_due_s
        """End of the wait for what is asked next."""
        self.on_end = on_end
        self.cuts: list[Cut] = []
        self.is_taken = False
        """Whether the store had taken the identities when it began."""
        self.is_zero_copy = False
        """Whether the store is given the rows themselves, and so never given up."""
        self.memory: Store | None = None
        """The store, where its pieces are to be read from memory as far as it has them there."""
        self.answers: list[Answer | None] = [None] * len(labels)
        self.known: list[Answer] | None = None
        """Of a put: what the store said of each page before, MISS where it is not asked."""
        self.stopped: Unavailable | None = None
        """Why no further piece is begun."""
        self.copied_bytes = 0
        self.interrupt: BaseException | None = None
        """What the caller is interrupted by, to be raised once nobody has the rows."""
        self.pages: Sequence[EnginePage] = pages
        self._guard = Lock()
        self._parts: list[Part] = []
        """Under way."""
        self._next = 0
        self.is_answered = True
        """Whether the store has said something of every page so far."""
        self._over = Lock()
        self._over.acquire()

    @property
    def has_rows(self) -> bool:
        """Whether pages move between the engine's rows and the store, and it is not over."""
        return bool(self.pages)

    @property
    def is_urgent(self) -> bool:
        """Whether a request may wait for it: writes and hints wait for those."""
        return self.method is not Method.PUT and self.method is not Method.TOUCH

    def begin(self, parts_max: int) -> list[Part]:
        """Begin as many parts as there may be, and pieces for; none where the call was stopped."""
        with self._guard:
            for _ in range(parts_max):
                part = Part(self._next_piece())
                if part.piece is not None:
                    self._parts.append(part)
            return self._parts.copy()

    def stop(self, reason: Unavailable) -> None:
        """Begin no further piece; the first reason is that of all pages without an answer."""
        with self._guard:
            self.stopped = self.stopped or reason

    def bounded_calls(self) -> list[BoundedCall[object]]:
        """Return the calls that make parts on other threads now."""
        with self._guard:
            return [part.bounded for part in self._parts if part.bounded is not None]

    def end_piece(self, part: Part, outcome: list[Answer] | Unavailable) -> bool:
        """Keep the outcome of a part's piece, and begin its next one; False where there is none."""
        with self._guard:
            piece = part.piece
            if piece is None:  # given up meanwhile
                return False
            self.copied_bytes += piece.copied_bytes
            if isinstance(outcome, Unavailable):
                self.stopped = self.stopped or outcome
            else:
                self.answers[piece.cut.start : piece.cut.end] = outcome
            part.piece = self._next_piece()
            return part.piece is not None

    def end_part(self, part: Part) -> Piece | None:
        """Begin nothing more of a part; return its piece, if it did not come to its end."""
        with self._guard:
            piece, part.piece = part.piece, None
            if piece is not None:
                self.copied_bytes += piece.copied_bytes
            return piece

    def leave_part(self, part: Part) -> bool:
        """Forget a part that has ended; return whether the call is over with it."""
        with self._guard:
            self._parts.remove(part)
            return not self._parts

    def end(self) -> None:
        """Release the engine's rows, and the caller that waits for the call."""
        self.pages = ()
        self._over.release()

    def is_over_within(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until it is over; return whether it is. Belongs to its one caller."""
        return self._over.acquire(timeout=timeout_s)

    def _next_piece(self) -> Piece | None:
        if self.stopped is not None or self._next == len(self.cuts):
            return None
        cut = self.cuts[self._next]
        self._next += 1
        is_copied = self.has_rows and not self.is_zero_copy
        return BufferedPiece(cut, self.pages) if is_copied else Piece(cut, self.pages)

    def begin_step(self, piece: Piece, now_s: float) -> bool:
        """Bound the calls to the store that this thread makes next; False where there is no time for one."""
        piece.due_s = min(self.due_s, now_s + self.time.deadline_s)
        if now_s >= piece.due_s or now_s >= self.time.until_s:
            return False
        bound_steps(piece.due_s)
        return True

    def end_step(self, piece: Piece, answers: Sequence[Answer], now_s: float) -> None:
        """Give the next step a deadline of its own, if this one was answered, and all before it."""
        with self._guard:
            if Answer.UNAVAILABLE in answers:
                self.is_answered, self.due_s = False, min(self.due_s, piece.due_s)
            elif self.is_answered:
                time = self.time
                self.due_s = time.due_s if time.waits_in_line else min(time.due_s, now_s + time.deadline_s)


class _Registration(NamedTuple):
    """The manifest of one identity, the names of its pools, and the tries to announce it."""

    manifest: Manifest
    pools: tuple[str, ...]
    retries: Retries


class Registrations:
    """Manifests by identity. A call announces what its pages need; what fails is announced again after a pause."""

    def __init__(self, pauses: Backoff, clock: Clock) -> None:
        self.taken: set[bytes] = set()
        """Identities that the store has taken."""
        self._by_identity: dict[bytes, _Registration] = {}
        self._others: OtherIdentities | None = None
        self._pauses = pauses
        self._clock = clock
        self._guard = Lock()

    @property
    def count(self) -> int:
        """Identities in all."""
        return len(self._by_identity)

    def remember(self, identity: Identity, layout: ModelLayout) -> list[bytes]:
        """Remember an identity; return the digests that its pools are stored under.

        Raises:
            LayoutError: the layout's pools cannot be those of the identity's shard.
        """
        parts = identity.parts(layout)
        manifests = [manifest_of(part.identity, part.layout) for part in parts]
        with self._guard:
            for manifest, part in zip(manifests, parts, strict=True):
                if manifest.identity not in self._by_identity:
                    retries = Retries(f"registering {identity.model} with the store", self._pauses, self._clock)
                    self._by_identity[manifest.identity] = _Registration(manifest, part.names, retries)
        return [manifest.identity for manifest in manifests]

    def may_ask(self, identities: Collection[bytes]) -> bool:
        """Return whether the store has taken these identities, or may be asked to now.

        Not one that nobody has remembered, nor one that it refused a moment ago.
        """
        for identity in identities:
            found = self._by_identity.get(identity)
            if found is None or not (identity in self.taken or found.retries.is_due):
                return False
        return True

    def announce(self, store: Store, identities: Collection[bytes], memory: memoryview) -> None:
        """Announce those of these identities that the store has not taken, with the memory that pages lie in.

        Raises:
            CacheError: the store does not take one, or does not answer.
        """
        if self._others is None:
            self._others = OtherIdentities.of(store)
        for identity in identities:
            if identity in self.taken:
                continue
            found = self._by_identity[identity]
            slabs: Mapping[str, memoryview] = dict.fromkeys(found.pools, memory)
            try:
                store.register(found.manifest, slabs)
                self._others.warn(found.manifest)
            except CacheError as error:
                with self._guard:
                    found.retries.record_failure(error)
                raise
            with self._guard:
                self.taken.add(identity)
                found.retries.record_success()


class CallCounts:
    """The part of ``EngineStoreCounts`` that calls add to. Thread-safe."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[Method, Answer]] = Counter()
        self._unavailable: Counter[tuple[Method, Unavailable]] = Counter()
        self._bytes: Counter[Method] = Counter()
        self._seconds: defaultdict[Method, float] = defaultdict(float)
        self._late_count = 0
        self.last_error = ""
        self._guard = Lock()

    def add(self, method: Method, answers: Sequence[Answer], seconds: float, copied_bytes: int) -> None:
        """Count a call, its answers, and the payload that it has copied."""
        with self._guard:
            self._add(method, answers, seconds, copied_bytes)

    def add_call(self, call: EngineCall, now_s: float) -> list[Answer]:
        """Count a call that is over, if it asked for pages; return its answers, UNAVAILABLE where none came."""
        if not call.answers:
            return []
        unavailable = Answer.UNAVAILABLE
        answers = [unavailable if answer is None else answer for answer in call.answers]
        lacking_count = call.answers.count(None)
        refused_count = 0 if call.is_answered else answers.count(unavailable) - lacking_count
        with self._guard:
            if refused_count:
                self._unavailable[call.method, Unavailable.REFUSED] += refused_count
            if lacking_count:
                reason = call.stopped or (Unavailable.REFUSED if refused_count else Unavailable.CALL_OVER)
                self._unavailable[call.method, reason] += lacking_count
            self._add(call.method, answers, now_s - call.time.started_s, call.copied_bytes)
        return answers

    def _add(self, method: Method, answers: Sequence[Answer], seconds: float, copied_bytes: int) -> None:
        self._seconds[method] += seconds
        if method is Method.GET or method is Method.PUT:
            self._bytes[method] += copied_bytes
        left_count = len(answers)
        for answer in _ANSWERS:
            if not left_count:
                break
            count = answers.count(answer)
            if count:
                self._answers[method, answer] += count
                left_count -= count

    def add_late(self) -> None:
        """Count an abandoned call."""
        with self._guard:
            self._late_count += 1

    def copy(self) -> EngineStoreCounts:
        """Return the counts so far, the caller's own; its fields about the store's state say that it is away."""
        with self._guard:
            return EngineStoreCounts(
                dict(self._answers),
                dict(self._unavailable),
                dict(self._bytes),
                dict(self._seconds),
                self._late_count,
                self.last_error,
            )


def cut_call(
    call: EngineCall, config: EngineStoreConfig, capability: Capability, *, has_memory: bool, is_here: bool
) -> int:
    """Cut a call that moves pages into pieces; return how many of them may be asked at a time.

    ``is_here`` says that its caller waits. Of a durable put pieces are larger, since its pages wait for the disk
    together, but an eighth of the bounce buffers at most: several calls have a piece there. A store that is given the
    rows has one at a time: two calls of a service in place of one make 2 to 32 MiB a tenth to a quarter slower.
    """
    is_read = call.method is Method.GET
    moved_bytes = len(call.pages) * payload_bytes(call.pages[0])
    if not is_read and call.is_zero_copy and capability.exists_costs_io and moved_bytes <= UNASKED_BYTES_MAX:
        call.known = [Answer.MISS] * len(call.labels)
    if config.piece_bytes is not None:
        piece_bytes = config.piece_bytes
    elif call.is_zero_copy and is_here:
        piece_bytes = AT_ONCE_BYTES_MAX
    else:
        # A page that is put is sealed before the next is copied; one that was not in memory is waited for anyway.
        is_in_caches = is_read and not has_memory
        piece_bytes = min(capability.call_bytes if is_in_caches else PIECE_BYTES_MAX, config.bounce_bytes)
        if call.level is Level.DURABLE:
            piece_bytes = max(piece_bytes, min(BATCH_BYTES, config.bounce_bytes // 8))
    parts_max = 1
    if call.is_taken and not call.is_zero_copy:
        parts_max = PARTS_MAX if is_here or not is_read else STARTED_PARTS_MAX
        parts_max = max(min(parts_max, moved_bytes // PART_BYTES_MIN), 1)
    # A write that nobody waits for is not cut to be faster: small pieces cost more in all.
    call.cuts = cut_pages(call.pages, piece_bytes, parts_max if is_here or is_read else 1)
    return parts_max


def cut_labels(call: EngineCall) -> list[Cut]:
    """Cut the labels of a call, one piece where it has none; those touched last first, so that the first end recent."""
    count = len(call.labels)
    cuts = [Cut(start, min(start + NAMES_MAX, count)) for start in range(0, max(count, 1), NAMES_MAX)]
    return cuts[::-1] if call.method is Method.TOUCH else cuts


def ask(call: EngineCall, piece: Piece, store: Store, read: list[Answer], clock: Clock) -> list[Answer]:
    """Ask the store for a piece, in a call of this thread's; raises as the store does.

    ``read`` has a HIT for each page that was read from memory already; empty if none was.
    """
    labels = call.labels[piece.cut.start : piece.cut.end]
    if call.method is Method.TOUCH:
        store.touch(labels)
        answers = [Answer.HIT] * len(labels)
    elif call.method is Method.CLEAR:
        store.clear(labels[0].identity)
        answers = [Answer.HIT]
    elif call.method is Method.GET:
        numbers = [number for number in range(len(labels)) if not read or not read[number]]
        found = store.get(piece.ios(numbers))
        piece.fill_rows(numbers, found)
        answers = read or found
        for number, answer in zip(numbers, found, strict=True):
            answers[number] = answer
    elif call.method is Method.PUT:
        is_in_time = True
        if call.known is None and call.level is Level.DURABLE:  # what is there may not be, as after a failed sync
            call.known = [Answer.MISS] * len(call.labels)
        elif call.known is None:  # by the first piece, for all: to ask for a page costs less than a call for it
            call.known = store.exists(call.labels)
            call.end_step(piece, call.known, clock())
            is_in_time = call.begin_step(piece, clock())
        known = call.known[piece.cut.start : piece.cut.end]
        answers = _put(store, piece, known, call.level if is_in_time else None)
    else:
        answers = store.exists(labels) if labels else []
    call.end_step(piece, answers, clock())
    return answers


def _put(store: Store, piece: Piece, known: list[Answer], level: Level | None) -> list[Answer]:
    """Seal the pages that the store does not have, and put them; not without a level."""
    hit, stored, unavailable = Answer.HIT, Answer.STORED, Answer.UNAVAILABLE
    answers = [stored if answer is hit else unavailable for answer in known]
    numbers = [number for number, answer in enumerate(known) if answer is not hit]
    if level is None or not numbers:
        return answers
    ios = piece.ios(numbers)
    for number, io in zip(numbers, ios, strict=True):
        # One after the other: a page is sealed while it is in the processor's caches.
        if not piece.read_rows(number):
            return answers
        seal_buffers(io.buffers, io.label)
    piece.count(numbers)
    for number, answer in zip(numbers, store.put(ios, level), strict=True):
        answers[number] = answer
    return answers
