"""Records requests: the serving thread hands records over and goes on; another names pages and writes lines.

recorder = TraceRecorder.open(Path("trace.jsonl.gz"))
cache.record_to(recorder.requests_of(cache.layout))
...
recorder.close()
"""

import gzip
import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from unified_cache.cache.recording.requests import RequestRecord, RequestWatcher
from unified_cache.core.errors import ConfigError
from unified_cache.core.page import PageKey
from unified_cache.core.pool import ModelLayout

__all__ = ["SALT_BYTES", "RecorderCounts", "RecorderSettings", "TraceNames", "TraceRecorder"]

WRITE_EVERY_S = 1.0
"""Longest time that a note waits before it is written, and so is lost in a crash."""

BATCH_RECORDS_MAX = 1_000
"""Notes of one write."""

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
class RecorderSettings:
    """Bounds of a recording, and its salt."""

    file_bytes_max: int = 64 << 20
    """Size at which a file is rotated, compressed; a conversation takes some 1 to 5 KB a request."""
    files_max: int = 8
    """Files kept, the newest included."""
    queue_bytes_max: int = 64 << 20
    """Prompts that wait to be written; beyond, requests are dropped and counted."""
    salt: bytes | None = None
    """Secret of 32 bytes, for recordings whose pages are to have the same names; None for one at random."""

    def __post_init__(self) -> None:
        if self.queue_bytes_max < 1:
            raise ConfigError(f"queue_bytes_max must be positive, found {self.queue_bytes_max}")


@dataclass(slots=True)
class RecorderCounts:
    """Requests so far."""

    written: int = 0
    dropped: int = 0
    """Not written, because too many waited."""
    failed: int = 0
    """Not written, because the file could not be."""


class TraceNames:
    """Names of one recording: digests of page keys under a secret salt, which is never written. For any thread.

    Keys alone would not do: anybody who guesses a prompt can compute its keys.
    """

    __slots__ = ("_salt",)

    def __init__(self, salt: bytes) -> None:
        """Take a secret salt; a ConfigError if it is not of its length."""
        if len(salt) != SALT_BYTES:
            raise ConfigError(f"the salt of a recording has {SALT_BYTES} bytes, found {len(salt)}")
        self._salt = salt

    def pages(self, keys: Sequence[PageKey]) -> list[int]:
        """Return the name of each page."""
        salt = self._salt
        return [
            int.from_bytes(blake2b(key, digest_size=_NAME_BYTES, key=salt).digest(), "little") >> _SHIFT for key in keys
        ]

    def namespace(self, seed: bytes) -> str:
        """Return the name of a namespace, in hex digits; empty for the default one."""
        return blake2b(seed, digest_size=_NAME_BYTES, key=self._salt, person=b"namespace").hexdigest() if seed else ""


class RotatedFile:
    """A file of gzip members, one for each append, so that it is whole after each. For one thread.

    ``trace.jsonl.gz`` becomes ``trace.1.jsonl.gz`` once it has ``file_bytes_max``, that one ``trace.2.jsonl.gz``, and
    so on; of ``files_max`` files the last one is removed.
    """

    __slots__ = ("_file_bytes_max", "_files_max", "_path")

    def __init__(self, path: Path, file_bytes_max: int, files_max: int) -> None:
        """Take the newest file's place; a ConfigError if it is no NAME.gz in a directory, or for a bound of 0."""
        if path.suffix != ".gz":
            raise ConfigError(f"a recording is a file NAME.gz, as in trace.jsonl.gz, found {path.name}")
        if file_bytes_max < 1 or files_max < 1:
            raise ConfigError(
                f"a recording needs at least one file of at least one byte, found {files_max} of {file_bytes_max}"
            )
        if not path.parent.is_dir():
            raise ConfigError(f"a recording needs a directory that is there, found none at {path.parent}")
        self._path = path
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max

    def append(self, lines: bytes) -> None:
        """Write lines, and rotate once the file is large enough; after an OSError what was written stays readable."""
        member = gzip.compress(lines, mtime=0, compresslevel=6)
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ALONE), "ab") as file:
            start = os.fstat(file.fileno()).st_size
            try:
                file.write(member)
                file.flush()
            except OSError:
                file.truncate(start)
                raise
            end = os.fstat(file.fileno()).st_size
        if end >= self._file_bytes_max:
            self._rotate()

    def _rotate(self) -> None:
        self._numbered(self._files_max - 1).unlink(missing_ok=True)
        for number in reversed(range(self._files_max - 1)):
            path = self._numbered(number)
            if path.exists():
                path.replace(self._numbered(number + 1))

    def _numbered(self, number: int) -> Path:
        if not number:
            return self._path
        stem, dot, suffixes = self._path.name.partition(".")
        return self._path.with_name(f"{stem}.{number}{dot}{suffixes}")


class TraceRecorder:
    """A recording under way. ``record`` is for any thread and never waits; ``close`` writes what is left."""

    def __init__(self, file: RotatedFile, names: TraceNames, queue_bytes_max: int) -> None:
        """Take the parts; ``TraceRecorder.open`` puts them together and begins."""
        self._file = file
        self._names = names
        self._queue_bytes_max = queue_bytes_max
        self._queue: deque[RequestRecord] = deque()
        self._queue_bytes = 0
        self._counts = RecorderCounts()
        self._began_s = time.time()
        self._guard = threading.Lock()
        self._woken = threading.Event()
        self._is_closing = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="unified-cache-recorder", daemon=True)

    @classmethod
    def open(cls, path: Path, settings: RecorderSettings = RecorderSettings()) -> "TraceRecorder":
        """Begin a recording in ``path``, after what is in it; readable by its owner alone.

        Raises:
            ConfigError: the settings make no sense, or the file cannot be written.
        """
        file = RotatedFile(path, settings.file_bytes_max, settings.files_max)
        names = TraceNames(secrets.token_bytes(SALT_BYTES) if settings.salt is None else settings.salt)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ALONE))
        except OSError as error:
            raise ConfigError(f"{path} must be a file that can be written: {error.strerror}") from error
        recorder = cls(file, names, settings.queue_bytes_max)
        recorder._thread.start()
        return recorder

    def requests_of(self, layout: ModelLayout) -> RequestWatcher:
        """Return a watcher of one cache, for ``UnifiedCache.record_to``."""
        return RequestWatcher([component.name for component in layout.components], self.record)

    def record(self, record: RequestRecord) -> None:
        """Take a request; drop and count it if too many wait. Nothing is computed or written here."""
        size = _bytes_of(record)
        with self._guard:
            if self._is_closing or self._queue_bytes + size > self._queue_bytes_max:
                self._counts.dropped += 1
                return
            self._queue.append(record)
            self._queue_bytes += size
            is_full = len(self._queue) >= BATCH_RECORDS_MAX
        if is_full:
            self._woken.set()

    def counts(self) -> RecorderCounts:
        """Return what has become of the requests so far; the caller's own."""
        with self._guard:
            return RecorderCounts(self._counts.written, self._counts.dropped, self._counts.failed)

    def close(self) -> RecorderCounts:
        """Write what waits and end; return what has become of all requests. Once more changes nothing."""
        with self._guard:
            self._is_closing = True
        self._woken.set()
        self._thread.join(CLOSE_S)
        return self.counts()

    def __enter__(self) -> "TraceRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Write what waits, again and again; what the thread runs."""
        while True:
            self._woken.wait(WRITE_EVERY_S)
            self._woken.clear()
            while records := self._taken():
                self._write(records)
            with self._guard:
                if self._is_closing and not self._queue:
                    return

    def _taken(self) -> list[RequestRecord]:
        with self._guard:
            records = [self._queue.popleft() for _ in range(min(BATCH_RECORDS_MAX, len(self._queue)))]
            self._queue_bytes -= sum(map(_bytes_of, records))
            return records

    def _write(self, records: Sequence[RequestRecord]) -> None:
        lines = b"".join(self._line(record) for record in records)
        try:
            self._file.append(lines)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.error("a recording cannot be written, and what it lacks is counted: %s", error)
            with self._guard:
                self._counts.failed += len(records)
            return
        self._has_failed = False
        with self._guard:
            self._counts.written += len(records)

    def _line(self, record: RequestRecord) -> bytes:
        """Return the line of one request; its times count from the beginning of the recording."""
        prompt = record.prompt
        names = self._names.pages(prompt.keys)
        entry = {
            "timestamp": round((record.at_s - self._began_s) * 1000, 3),
            "input_length": len(names) * prompt.page_size,
            "output_length": record.output_pages * prompt.page_size,
            "hash_ids": names,
            "page_size": prompt.page_size,
            "namespace": self._names.namespace(prompt.seed),
            "hit_pages": record.found.by_tier(),
            "bound_by": list(record.bound_by),
        }
        return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _bytes_of(record: RequestRecord) -> int:
    """Return the memory that a record keeps, about."""
    return len(record.prompt.tokens)
