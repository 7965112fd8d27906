"""Reads request traces, Mooncake's and others: one JSON object a line, one line a request, plain or gzip.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

``hash_ids`` names the prompt's blocks of 512 tokens, the last one possibly partial. Equal ids are equal blocks
after equal prefixes. Lines that are not exactly this are refused, with file and line.

A recording of a cache (``unified_cache.cache.recording``) says its ``page_size`` in each line: its blocks have that
many tokens, and its ids are any of 63 bits.

A trace of Alibaba's Bailian says ``chat_id`` and ``parent_chat_id`` in each line. Its timestamps are seconds, its
blocks have 16 tokens, and equal ids may stand after different prefixes.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import ConfigError, TraceError
from unified_cache.core.files import parse_json

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for; as the Mooncake trace release says."""

BAILIAN_FIELDS = frozenset({"chat_id", "parent_chat_id"})
BAILIAN_BLOCK_TOKENS = 16
"""Tokens of a block of Bailian's traces; as their release says."""

NAME_MAX = 2**63 - 1
"""Largest id of a block: the name of a page in a recording has 63 bits."""

PAGE_SIZE_MAX = 1 << 20
"""Largest page of a recording, in tokens."""

BLOCKS_MAX = 1 << 20
"""Most blocks of a prompt: 16 million tokens in a recording's pages of 16."""

TOKENS_MAX = 2**31 - 1
"""Most tokens of a prompt, or of an answer."""

TIMESTAMP_MAX = 2.0**53
"""Milliseconds either side of 0: whole numbers up to here are exact."""

LINE_BYTES_MAX = 32 * 1024 * 1024
"""Longest line read: ``BLOCKS_MAX`` names of 19 digits. Bounds memory and time where a file is no trace at all."""

BLANK_BYTES_MAX = 1 << 20
"""Most bytes of blank lines in a row."""

_GZIP_MAGIC = b"\x1f\x8b"
_OFFSETS = np.arange(BLOCK_TOKENS, dtype=np.int32)
_FOUND_CHARACTERS_MAX = 60


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: its time, the lengths of prompt and answer, and the blocks of its prompt."""

    timestamp: float
    """Milliseconds since the trace began; orders requests, never paces them."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens of the answer."""
    hash_ids: tuple[int, ...]
    """One id for each block of the prompt."""
    block_tokens: int = BLOCK_TOKENS
    """Tokens of a block; the same in all requests of a trace."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """Make up the prompt's token ids, the tail block padded to a full one: a function of the hash ids alone."""
        size = self.block_tokens
        offsets = _OFFSETS if size == BLOCK_TOKENS else np.arange(size, dtype=np.int32)
        tokens = np.empty((len(self.hash_ids), size), np.int32)
        np.add(np.array(self.hash_ids, np.int32)[:, None] * size, offsets, out=tokens)
        return tokens.reshape(-1)


OnProgress = Callable[[int, str], None]
"""Called often with how many are done, and a note to show beside the number."""


def no_progress(_done: int, _note: str) -> None:
    """Report to nobody."""


def read_trace(path: Path, limit: int | None = None, on_progress: OnProgress = no_progress) -> list[TraceRequest]:
    """Read a trace, or its first ``limit`` requests, line by line; sort by timestamp, equal ones as they stand.

    Blocks are numbered, so that equal ids stand after equal prefixes, whatever the file's do. ``on_progress`` is
    called after each request with how many were read.

    Raises:
        TraceError: the file is missing, unreadable, empty or malformed; the message says where and how.
        ConfigError: ``limit`` is not positive.

    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, found {limit}")
    requests: list[TraceRequest] = []
    for place, line in _lines(path):
        requests.append(_request_of(_entry_of(line, place), place))
        first, found = requests[0].block_tokens, requests[-1].block_tokens
        if found != first:
            raise TraceError(f"{place}: expected the page_size of the lines before, {first}, found {found}")
        on_progress(len(requests), "")
        if len(requests) == limit:
            break
    if not requests:
        raise TraceError(f"{path}: expected at least one request, found an empty file")
    requests.sort(key=attrgetter("timestamp"))
    return _numbered(requests, path)


def _numbered(requests: Sequence[TraceRequest], path: Path) -> list[TraceRequest]:
    """Return the requests with a number for each block and all before it, from 0 as they come first."""
    numbers: dict[tuple[int, int], int] = {}
    numbered: list[TraceRequest] = []
    for request in requests:
        ids: list[int] = []
        before = -1
        for block in request.hash_ids:
            before = numbers.setdefault((before, block), len(numbers))
            ids.append(before)
        numbered.append(replace(request, hash_ids=tuple(ids)))
    blocks_max = 2**31 // requests[0].block_tokens
    if len(numbers) > blocks_max:
        raise TraceError(f"{path}: expected at most {blocks_max} different blocks, found {len(numbers)}")
    return numbered


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every line that is not blank, with its file and line."""
    number = blank_bytes = 0
    try:
        with path.open("rb") as raw, _unpacked(raw, path) as file:
            while True:
                number += 1
                line = file.readline(LINE_BYTES_MAX + 1)
                if not line:
                    return
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(
                        f"{path}:{number}: expected a line of JSON, found more than {LINE_BYTES_MAX} bytes"
                    )
                blank_bytes = blank_bytes + len(line) if line.isspace() else 0
                if blank_bytes > BLANK_BYTES_MAX:
                    raise TraceError(f"{path}:{number}: expected a request, found {blank_bytes} blank bytes")
                if not blank_bytes:
                    yield f"{path}:{number}", line
    except FileNotFoundError:
        raise TraceError(f"{path}: expected a trace, found no such file") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: expected a trace, found a directory") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}:{number}: expected whole gzip data, found: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _unpacked(raw: io.BufferedReader, path: Path) -> io.BufferedIOBase:
    """Unpack what begins or is named like gzip."""
    if path.suffix == ".gz" or raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=raw)
    return raw


def _entry_of(line: bytes, place: str) -> dict[object, object]:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise TraceError(f"{place}: expected a JSON object, found {_shown(line)} ({error})") from error
    if not isinstance(entry, dict):
        raise TraceError(f"{place}: expected a JSON object, found {_shown(line)}")
    return entry


def _request_of(entry: dict[object, object], place: str) -> TraceRequest:
    timestamp = _field(entry, "timestamp", place)
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not abs(timestamp) <= TIMESTAMP_MAX:
        raise TraceError(f"{place}: expected timestamp to be a number of milliseconds, found {_shown(timestamp)}")
    input_length = _count(entry, "input_length", place)
    output_length = _count(entry, "output_length", place)
    is_bailian = entry.keys() >= BAILIAN_FIELDS
    block_tokens = BAILIAN_BLOCK_TOKENS if is_bailian else BLOCK_TOKENS
    if "page_size" in entry:
        block_tokens = _count(entry, "page_size", place)
    if not 0 < block_tokens <= PAGE_SIZE_MAX:
        raise TraceError(f"{place}: expected page_size to be in [1, {PAGE_SIZE_MAX}], found {block_tokens}")
    hash_ids = _hash_ids(entry, place)
    blocks = -(-input_length // block_tokens)
    if len(hash_ids) != blocks:
        raise TraceError(
            f"{place}: expected {blocks} hash_ids for an input_length of {input_length} "
            f"in blocks of {block_tokens}, found {len(hash_ids)}"
        )
    timestamp = timestamp * 1000 if is_bailian else timestamp
    return TraceRequest(timestamp, input_length, output_length, hash_ids, block_tokens)


def _field(entry: dict[object, object], name: str, place: str) -> object:
    if name not in entry:
        raise TraceError(f"{place}: expected a field {name}, found {_shown(', '.join(map(str, entry)))}")
    return entry[name]


def _count(entry: dict[object, object], name: str, place: str) -> int:
    value = _field(entry, name, place)
    if type(value) is not int or not 0 <= value <= TOKENS_MAX:
        raise TraceError(f"{place}: expected {name} to be a number of tokens, found {_shown(value)}")
    return value


def _hash_ids(entry: dict[object, object], place: str) -> tuple[int, ...]:
    listed = _field(entry, "hash_ids", place)
    if not isinstance(listed, list):
        raise TraceError(f"{place}: expected hash_ids to be a list, found {_shown(listed)}")
    if len(listed) > BLOCKS_MAX:
        raise TraceError(f"{place}: expected at most {BLOCKS_MAX} hash_ids, found {len(listed)}")
    ids: list[int] = []
    for value in listed:
        if type(value) is not int or not 0 <= value <= NAME_MAX:
            raise TraceError(f"{place}: expected hash_ids to be integers in [0, {NAME_MAX}], found {_shown(value)}")
        ids.append(value)
    return tuple(ids)


def _shown(value: object) -> str:
    """Show what was found, cut to what fits on a line."""
    text = value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else str(value)
    text = repr(text) if isinstance(value, bytes | str) else text
    return text if len(text) <= _FOUND_CHARACTERS_MAX else f"{text[: _FOUND_CHARACTERS_MAX - 3]}..."
