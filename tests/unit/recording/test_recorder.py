"""A recorder never waits, keeps its bounds, and writes nothing that a prompt could be read or guessed from."""

import json
import os
from hashlib import blake2b
from pathlib import Path

import pytest

from unified_cache.cache import recording
from unified_cache.cache.recording import SALT_BYTES, RecorderCounts, RequestRecord, TraceRecorder, page_names
from unified_cache.core.errors import ConfigError
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Hits
from unified_cache.sizing.replay.trace import read_trace

PAGE_SIZE = 4
SALT = bytes(range(SALT_BYTES))


def record_of(number: int, pages: int = 3, namespace: str | None = None) -> RequestRecord:
    tokens = list(range(1_000 * number, 1_000 * number + pages * PAGE_SIZE))
    prompt = Prompt.of(tokens, PAGE_SIZE, Namespace(cache_salt=namespace) if namespace else Namespace())
    return RequestRecord(100.0 + number, prompt, 2, Hits(1, 1, 0), ("swa",))


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_is_of_the_mooncake_format_with_what_that_lacks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceRecorder.open(path, SALT) as recorder:
        recorder.record(record_of(1, namespace="acme"))
        recorder.record(record_of(2))
    first, second = lines_of(path)
    assert set(first) == {
        *("timestamp", "input_length", "output_length", "hash_ids"),
        *("page_size", "namespace", "hit_pages", "bound_by"),
    }
    assert (first["input_length"], first["output_length"], first["page_size"]) == (12, 8, 4)
    assert (first["hit_pages"], first["bound_by"]) == ({"device": 1, "host": 1, "storage": 0}, ["swa"])
    assert (second["timestamp"] - first["timestamp"]) == 1000  # type: ignore[operator]
    assert (first["namespace"] != "", second["namespace"]) == (True, "")
    assert len(read_trace(path)) == 2


@pytest.mark.threat("reading recordings")
def test_names_are_equal_for_equal_pages_and_say_nothing_of_them_without_the_salt(tmp_path: Path) -> None:
    ids: dict[str, list[list[int]]] = {}
    for name in ("one", "other"):
        path = tmp_path / f"{name}.jsonl"
        with TraceRecorder.open(path) as recorder:
            for number in (1, 1, 2):
                recorder.record(record_of(number, namespace="acme"))
        text = path.read_bytes()
        ids[name] = [json.loads(line)["hash_ids"] for line in text.splitlines()]
        assert b"acme" not in text
    first, again, other = ids["one"]
    assert first == again
    assert not set(first) & set(other)
    assert not set(first) & set(ids["other"][0]), "two recordings cannot be held against each other"
    keys = record_of(1, namespace="acme").prompt.keys
    guesses = [key[:8] for key in keys] + [blake2b(key, digest_size=8).digest() for key in keys]
    assert not {int.from_bytes(guess, "little") >> 1 for guess in guesses} & set(first), (
        "who guesses a prompt learns nothing"
    )
    assert page_names(keys, SALT) == page_names(keys, SALT)


def test_what_there_is_no_room_for_is_dropped_and_counted_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(1)
    monkeypatch.setattr(recording, "QUEUE_BYTES_MAX", 5 * len(record.prompt.tokens))
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder.open(path)
    path.unlink()
    os.mkfifo(path)  # the writer waits until somebody reads
    for number in range(8):
        recorder.record(record_of(number))
    recorder.record(record_of(9, pages=300))
    with path.open("rb"):
        counts = recorder.close()
    assert (counts.written, counts.dropped, counts.failed) == (5, 4, 0)
    recorder.record(record)
    assert recorder.counts().dropped == 5, "after the end, too"


def test_a_full_file_makes_way_for_the_next_and_is_kept_until_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceRecorder.open(path, SALT) as recorder:
        recorder.record(record_of(0))
    monkeypatch.setattr(recording, "FILE_BYTES_MAX", path.stat().st_size * 3 // 2)
    with TraceRecorder.open(path, SALT) as recorder:
        for number in range(1, 5):
            recorder.record(record_of(number))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["trace.jsonl", "trace.jsonl.1"]
    kept = [line["hash_ids"] for name in ("trace.jsonl.1", "trace.jsonl") for line in lines_of(tmp_path / name)]
    assert kept == [page_names(record_of(number).prompt.keys, SALT) for number in (2, 3, 4)]


def test_a_recording_goes_on_after_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for number in (1, 2):
        with TraceRecorder.open(path) as recorder:
            recorder.record(record_of(number))
    assert len(lines_of(path)) == 2


def test_a_disk_that_takes_half_a_line_costs_that_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    write = os.write
    with TraceRecorder.open(path) as recorder:
        recorder.record(record_of(1))
    with TraceRecorder.open(path) as recorder:
        monkeypatch.setattr(os, "write", lambda file, line: write(file, line[: len(line) // 2]))
        recorder.record(record_of(2))
        assert recorder.close() == RecorderCounts(written=0, dropped=0, failed=1)
    assert len(lines_of(path)) == 1


def test_a_file_that_cannot_be_written_costs_lines_and_raises_nothing(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    recorder = TraceRecorder.open(room / "trace.jsonl")
    (room / "trace.jsonl").unlink()
    room.rmdir()
    for number in (1, 2):
        recorder.record(record_of(number))
    assert recorder.close() == RecorderCounts(written=0, dropped=0, failed=2)


@pytest.mark.threat("reading recordings")
def test_only_its_owner_can_read_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceRecorder.open(path) as recorder:
        path.unlink()  # as a rotation does
        recorder.record(record_of(1))
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "salt", "match"),
    [
        ("trace.jsonl", b"short", "salt of a recording has 32 bytes, found 5"),
        ("nowhere/trace.jsonl", None, "a file that can be written"),
    ],
)
def test_a_recording_that_cannot_be_is_refused(tmp_path: Path, name: str, salt: bytes | None, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TraceRecorder.open(tmp_path / name, salt)
