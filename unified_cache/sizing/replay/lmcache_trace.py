"""Reads what ``lmcache server --trace-level storage`` records, as requests: one for each look-up of a prompt.

The format is LMCache's, as its ``docs/design/mp_observability/trace.md`` and its release 0.5.6 have it: frames of a
length in 4 big-endian bytes and as many of msgpack, a header first, then calls of its storage manager. A look-up names
all whole chunks of its prompt, in order, once for each rank and group of objects; a chunk's hash covers all before it.
Answers are not recorded: their chunks come with the look-up of the turn after. Needs ``msgspec``.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from unified_cache.core.errors import ConfigError, TraceError
from unified_cache.core.extras import needs_extra
from unified_cache.sizing.replay.trace import OnProgress, TraceRequest, no_progress

with needs_extra("events", "reading a recording of LMCache"):
    import msgspec

__all__ = ["LmcacheTrace", "read_lmcache_trace"]

FORMAT_VERSION = 1
SCHEMA_VERSION = 1
LEVEL = "storage"
LOOKUP = ".submit_prefetch_task"
"""How the name of the call ends that looks a prompt up."""

FRAME_BYTES_MAX = 256 << 20
"""Longest frame read: bounds memory where a file is damaged. A look-up takes about 100 bytes a chunk and rank."""

_LENGTH = struct.Struct(">I")
# A key is {"__t__": "ObjectKey", "v": {"chunk_hash": bytes, ...}}; calls hold keys in other values of this form.
_TAG, _VALUE, _KEY_TAG, _HASH = "__t__", "v", "ObjectKey", "chunk_hash"


class _RecordingHeader(msgspec.Struct, tag="header"):
    format_version: int
    level: str
    trace_schema_version: int = SCHEMA_VERSION


class _RecordedCall(msgspec.Struct, tag="record"):
    t_mono: float
    qualname: str
    args: msgspec.Raw


_HEADERS = msgspec.msgpack.Decoder(_RecordingHeader)
_CALLS = msgspec.msgpack.Decoder(_RecordedCall)
_ARGUMENTS = msgspec.msgpack.Decoder(dict)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LmcacheTrace:
    """Look-ups of a recording, as requests without answers."""

    requests: list[TraceRequest]
    """In the order in which they came."""
    is_whole: bool
    """False if the file ends within a record, as where LMCache was killed."""


def read_lmcache_trace(path: Path, chunk_tokens: int, on_progress: OnProgress = no_progress) -> LmcacheTrace:
    """Read the look-ups of a recording, chunks numbered from 0; prompts shorter than a chunk are none.

    ``on_progress`` is called after each with how many were read.

    Raises:
        TraceError: the file cannot be read, is no such recording, or none of storage; the message says where and how.
        ConfigError: ``chunk_tokens`` is not positive.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens must be at least 1, found {chunk_tokens}")
    requests: list[TraceRequest] = []
    numbers: dict[bytes, int] = {}
    try:
        with path.open("rb") as file:
            _check_header(_frame(file, path), path)
            while frame := _frame(file, path):
                call = _decoded(_CALLS, frame, path)
                if not call.qualname.endswith(LOOKUP):
                    continue
                # Ranks and groups of objects name the same chunks again.
                chunks = dict.fromkeys(_chunks(_decoded(_ARGUMENTS, call.args, path)))
                ids = tuple(numbers.setdefault(chunk, len(numbers)) for chunk in chunks)
                if ids:
                    requests.append(TraceRequest(1000 * call.t_mono, len(ids) * chunk_tokens, 0, ids, chunk_tokens))
                    on_progress(len(requests), "")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not requests:
        raise TraceError(f"{path}: expected at least one look-up of a whole chunk, found none")
    return LmcacheTrace(requests, frame is not None)


def _frame(file: BinaryIO, path: Path) -> bytes | None:
    """Read the next frame; empty at the end of the file, None where the file ends within it."""
    head = file.read(_LENGTH.size)
    if not head:
        return b""
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    if not 0 < size <= FRAME_BYTES_MAX:
        raise TraceError(
            f"{path}: expected a record of 1 to {FRAME_BYTES_MAX} bytes at {file.tell()}, found a length of {size}"
        )
    frame = file.read(size)
    return frame if len(frame) == size else None


def _check_header(frame: bytes | None, path: Path) -> None:
    """Raise ``TraceError`` unless the first frame of a file says that it is a recording that is understood here."""
    if not frame:
        raise TraceError(f"{path}: expected a recording of LMCache, found a file that ends within its first record")
    header = _decoded(_HEADERS, frame, path)
    found = (header.format_version, header.trace_schema_version)
    if found != (FORMAT_VERSION, SCHEMA_VERSION):
        raise TraceError(
            f"{path}: expected format {FORMAT_VERSION} of LMCache's recordings with schema {SCHEMA_VERSION}, "
            f"found {found[0]} with {found[1]}"
        )
    if header.level != LEVEL:
        raise TraceError(
            f"{path}: expected calls of a storage manager (lmcache server --trace-level {LEVEL}), "
            f"found level {header.level!r}"
        )


def _decoded(decoder: "msgspec.msgpack.Decoder[_T]", data: bytes | msgspec.Raw, path: Path) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"{path}: expected a record of LMCache, found: {error}") from error


def _chunks(value: object) -> Iterator[bytes]:
    """Yield the hashes of the chunks that an argument names, in order, however deep they lie in it."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += reversed(each)
        elif isinstance(each, dict):
            held = each.get(_VALUE)
            if each.get(_TAG) == _KEY_TAG and isinstance(held, dict) and isinstance(held.get(_HASH), bytes):
                yield held[_HASH]
            else:
                waiting += reversed(each.values())
