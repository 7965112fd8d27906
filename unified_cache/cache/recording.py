"""Recordings of what requests ask a cache for: traces in the Mooncake format, in which no prompt can be read.

The serving thread hands a request over once it is released and goes on; another names its pages and writes a line.

recorder = TraceRecorder.open(Path("trace.jsonl"))
cache.record_to(recorder.requests_of(cache.layout))
...
recorder.close()
"""

import errno
import json
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue

from unified_cache.core.errors import ConfigError
from unified_cache.core.page import PageKey, Prompt
from unified_cache.core.pool import Hits, ModelLayout
from unified_cache.tree import Lock

__all__ = ["TraceRecorder"]

RUNNING_MAX = 1_024
"""Requests that run: of more, the oldest is taken for over."""

QUEUE_BYTES_MAX = 64 << 20
"""Prompts that wait to be written; beyond, requests are dropped and counted."""

FILE_BYTES_MAX = 256 << 20
"""Size at which a file makes way for the next and is kept as NAME.1; a conversation takes some 5 to 20 KB a request."""

CLOSE_S = 10.0
"""Longest wait for the thread."""

OWNER_ALONE = 0o600
"""Mode of a file."""

SALT_BYTES = 32
"""Length of a salt; as many as a key has."""

_NAME_BYTES = 8
_SHIFT = 1
"""Names are 63 bits, non-negative in an int64: among ten million pages two share one with a probability of 5e-6."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that is over."""

    at_s: float
    """Time of its lock, in seconds since the epoch."""
    prompt: Prompt
    output_pages: int
    """Whole pages that were inserted after those of the prompt."""
    found: Hits
    """Pages that need not be computed."""
    bound_by: tuple[str, ...]
    """Components that kept more from being found; empty where everything was."""


class RequestWatcher:
    """Records each request of a cache once it is over. Called on the owner's thread; never waits."""

    __slots__ = ("_components", "_running", "_take")

    def __init__(self, components: Sequence[str], take: Callable[[RequestRecord], None]) -> None:
        """Name the layout's components; ``take`` is given each record."""
        self._components = tuple(components)
        self._take = take
        self._running: OrderedDict[Lock, RequestRecord] = OrderedDict()
        """By the lock that a request has now."""

    def locked(self, prompt: Prompt, lock: Lock, bound_by: tuple[int, ...]) -> None:
        """Begin a request, whose pages found ``lock`` pins; ``bound_by`` are components that kept it from more."""
        names = tuple(self._components[number] for number in bound_by)
        self._running[lock] = RequestRecord(time.time(), prompt, 0, lock.hits, names)
        if len(self._running) > RUNNING_MAX:
            self._end(*self._running.popitem(last=False))

    def inserted(self, before: Lock, after: Lock) -> None:
        """Go on with another lock, on what the request has computed too."""
        record = self._running.pop(before, None)
        if record is not None:
            self._running[after] = record

    def released(self, lock: Lock) -> None:
        """End a request."""
        record = self._running.pop(lock, None)
        if record is not None:
            self._end(lock, record)

    def _end(self, lock: Lock, record: RequestRecord) -> None:
        self._take(replace(record, output_pages=max(0, lock.end - record.prompt.pages_count)))


@dataclass(slots=True)
class RecorderCounts:
    """Requests so far."""

    written: int = 0
    dropped: int = 0
    """Not written, because too many waited."""
    failed: int = 0
    """Not written, because the file could not be."""


def page_names(keys: Sequence[PageKey], salt: bytes) -> list[int]:
    """Return the names of pages in a recording: digests of their keys under its salt, which is never written.

    Keys alone would not do: anybody who guesses a prompt can compute its keys.
    """
    digests = [blake2b(key, digest_size=_NAME_BYTES, key=salt).digest() for key in keys]
    return [int.from_bytes(digest, "little") >> _SHIFT for digest in digests]


class TraceRecorder:
    """A recording under way. ``record`` is for any thread and never waits; ``close`` writes what is left."""

    def __init__(self, path: Path, salt: bytes) -> None:
        """Take the parts; ``TraceRecorder.open`` puts them together and begins."""
        self._path = path
        self._salt = salt
        self._queue: SimpleQueue[RequestRecord | None] = SimpleQueue()
        """Requests in the order of their release; None ends the recording."""
        self._waiting_bytes = 0
        self._counts = RecorderCounts()
        self._began_s = time.time()
        self._guard = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="unified-cache-recorder", daemon=True)

    @classmethod
    def open(cls, path: Path, salt: bytes | None = None) -> "TraceRecorder":
        """Begin a recording in ``path``, after what is in it; readable by its owner alone.

        ``salt`` is a secret of 32 bytes, for recordings whose pages are to have the same names; None for a random one.

        Raises:
            ConfigError: the salt is of another length, or the file cannot be written.
        """
        if salt is not None and len(salt) != SALT_BYTES:
            raise ConfigError(f"the salt of a recording has {SALT_BYTES} bytes, found {len(salt)}")
        recorder = cls(path, secrets.token_bytes(SALT_BYTES) if salt is None else salt)
        try:
            recorder._append(b"")
        except OSError as error:
            raise ConfigError(f"{path} must be a file that can be written: {error.strerror}") from error
        recorder._thread.start()
        return recorder

    def requests_of(self, layout: ModelLayout) -> RequestWatcher:
        """Return a watcher of one cache, for ``UnifiedCache.record_to``."""
        return RequestWatcher([component.name for component in layout.components], self.record)

    def record(self, record: RequestRecord) -> None:
        """Take a request; drop and count it if too many wait. Nothing is computed or written here."""
        size = len(record.prompt.tokens)
        with self._guard:
            if self._is_closing or self._waiting_bytes + size > QUEUE_BYTES_MAX:
                self._counts.dropped += 1
                return
            self._waiting_bytes += size
            self._queue.put(record)

    def counts(self) -> RecorderCounts:
        """Return what has become of the requests so far; the caller's own."""
        with self._guard:
            return replace(self._counts)

    def close(self) -> RecorderCounts:
        """Write what waits and end; return what has become of all requests. Once more changes nothing."""
        with self._guard:
            self._is_closing = True
            self._queue.put(None)
        self._thread.join(CLOSE_S)
        return self.counts()

    def __enter__(self) -> "TraceRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Write one request after the other; what the thread runs."""
        is_failing = False
        while (record := self._queue.get()) is not None:
            try:
                self._append(self._line(record))
                is_failing = False
            except OSError as error:
                if not is_failing:
                    logger.error("a recording cannot be written, and what it lacks is counted: %s", error)
                is_failing = True
            with self._guard:
                self._waiting_bytes -= len(record.prompt.tokens)
                self._counts.written += not is_failing
                self._counts.failed += is_failing

    def _append(self, line: bytes) -> None:
        """Write a line; after an OSError the file has what it had."""
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ALONE)
        try:
            start = os.fstat(file).st_size
            if os.write(file, line) < len(line):
                os.ftruncate(file, start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        finally:
            os.close(file)
        if start + len(line) >= FILE_BYTES_MAX:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def _line(self, record: RequestRecord) -> bytes:
        """Return the line of one request; its times count from the beginning of the recording."""
        prompt = record.prompt
        names = page_names(prompt.keys, self._salt)
        seed = blake2b(prompt.seed, digest_size=_NAME_BYTES, key=self._salt, person=b"namespace")
        entry = {
            "timestamp": round((record.at_s - self._began_s) * 1000, 3),
            "input_length": len(names) * prompt.page_size,
            "output_length": record.output_pages * prompt.page_size,
            "hash_ids": names,
            "page_size": prompt.page_size,
            "namespace": seed.hexdigest() if prompt.seed else "",
            "hit_pages": record.found.by_tier(),
            "bound_by": list(record.bound_by),
        }
        return json.dumps(entry, separators=(",", ":")).encode() + b"\n"
