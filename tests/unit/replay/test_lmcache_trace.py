"""Recordings of LMCache: one that its own recorder has written (0.5.6; two ranks, two groups), and bad ones."""

import json
import os
import struct
import threading
from pathlib import Path

import msgspec
import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from unified_cache.core.errors import ConfigError, TraceError
from unified_cache.sizing.replay.lmcache_trace import FRAME_BYTES_MAX, read_lmcache_trace
from unified_cache.sizing.replay.trace import is_of_lmcache, read_trace

RECORDED = ROOT / "tests" / "fixtures" / "lmcache_storage.lct"
PROMPTS = ("abcd", "abcef", "abcdgh", "x", "abcdghij")
"""Chunks of the prompts of the recording, a letter each."""


def lettered(chunks: tuple[int, ...]) -> str:
    return "".join("abcdefghxij"[chunk] for chunk in chunks)


def framed(*frames: object) -> bytes:
    encoded = [frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame) for frame in frames]
    return b"".join(struct.pack(">I", len(frame)) + frame for frame in encoded)


def header(**changed: object) -> dict[str, object]:
    said = {"type": "header", "magic": b"LMCT", "format_version": 1, "level": "storage", "trace_schema_version": 1}
    return {**said, **changed}


def lookup(*chunks: bytes, name: str = "StorageManager.submit_prefetch_task") -> dict[str, object]:
    keys = [{"__t__": "ObjectKey", "v": {"chunk_hash": chunk, "model_name": "m", "kv_rank": 0}} for chunk in chunks]
    return {"type": "record", "t_mono": 1.5, "t_wall": 0.0, "qualname": name, "args": {"keys": keys}}


def written(directory: Path, data: bytes) -> Path:
    path = directory / "trace.lct"
    path.write_bytes(data)
    return path


def test_each_look_up_of_a_recording_is_a_request_of_its_chunks() -> None:
    found = read_lmcache_trace(RECORDED, 256)
    assert found.is_whole
    assert [lettered(request.hash_ids) for request in found.requests] == list(PROMPTS)
    assert [request.timestamp for request in found.requests] == [250, 1500, 2750, 3000, 4000]
    assert [request.input_length for request in found.requests] == [256 * len(prompt) for prompt in PROMPTS]


def test_a_recording_that_was_cut_off_anywhere_gives_what_came_before(tmp_path: Path) -> None:
    data = RECORDED.read_bytes()
    whole = read_lmcache_trace(RECORDED, 256).requests
    ends = {0}
    while max(ends) < len(data):
        ends.add(max(ends) + 4 + struct.unpack_from(">I", data, max(ends))[0])
    told = 0
    for length in range(1, len(data), 97):
        path = written(tmp_path, data[:length])
        try:
            found = read_lmcache_trace(path, 256)
        except TraceError:
            assert not told  # nothing was looked up yet
            continue
        assert found.requests == whole[: len(found.requests)]
        assert len(found.requests) >= told
        assert found.is_whole == (length in ends)
        told = len(found.requests)
    assert told == len(whole)


def test_calls_that_look_nothing_up_and_prompts_below_a_chunk_are_no_requests(tmp_path: Path) -> None:
    calls = (lookup(), lookup(b"a", name="StorageManager.reserve_write"), lookup(b"a", b"b", b"a"))
    (request,) = read_lmcache_trace(written(tmp_path, framed(header(), *calls)), 16).requests
    assert (request.hash_ids, request.input_length, request.block_tokens) == ((0, 1), 32, 16)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "ends within its first record"),
        (framed(header())[:9], "ends within its first record"),
        (framed(header(format_version=2)), "expected format 1 .* found 2 with 1"),
        (framed(header(trace_schema_version=7)), "found 1 with 7"),
        (framed(header(level="events")), "found level 'events'"),
        (framed({"type": "record"}), "expected a record of LMCache, found: "),
        (framed(header(), b"\xc1"), "expected a record of LMCache, found: "),
        (framed(header(), {**lookup(b"a"), "args": [1]}), "expected a record of LMCache, found: "),
        (framed(header()) + struct.pack(">I", FRAME_BYTES_MAX + 1), "found a length of"),
        (framed(header()) + bytes(4), "found a length of 0"),
        (framed(header()), "found none"),
        (framed(header(), lookup()), "found none"),
    ],
)
def test_what_is_no_recording_of_look_ups_is_refused_by_what_is_wrong(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=rf"trace\.lct: .*{said}"):
        read_lmcache_trace(written(tmp_path, data), 256)


def test_chunks_without_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens must be at least 1, found 0"):
        read_lmcache_trace(RECORDED, 0)


def test_a_recording_of_lmcache_is_distinguished_from_traces_and_from_nothing(tmp_path: Path) -> None:
    assert is_of_lmcache(RECORDED)
    assert not is_of_lmcache(written(tmp_path, b'{"timestamp": 0, "LMCT": 1}\n'))
    assert not is_of_lmcache(tmp_path / "nothing")
    with pytest.raises(TraceError, match="a recording of LMCache: unified-cache trace convert it first"):
        read_trace(RECORDED)


def test_convert_writes_a_plain_trace_of_lmcaches_recording_and_says_where_it_was_cut_off(tmp_path: Path) -> None:
    target = tmp_path / "plain.jsonl.gz"
    said = ask("trace", "convert", RECORDED, target)
    assert (said.status, said.out) == (0, "5 requests in blocks of 512 tokens\n")
    assert [len(request.hash_ids) for request in read_trace(target)] == [2, 3, 3, 1, 4]
    assert ask("trace", "convert", RECORDED, target, "--block-tokens", "32", "--chunk-tokens", "32").status == 0
    assert [lettered(request.hash_ids) for request in read_trace(target)] == list(PROMPTS)
    cut = written(tmp_path, RECORDED.read_bytes()[:-5])
    said = ask("trace", "convert", cut, target)
    assert (said.status, "ends within a record" in said.err) == (0, True)


def test_a_trace_that_comes_through_a_pipe_is_read_from_its_beginning(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [3]})
    writer = threading.Thread(target=pipe.write_text, args=(line,), daemon=True)
    writer.start()
    assert [request.hash_ids for request in read_trace(pipe)] == [(3,)]
    writer.join(10)
