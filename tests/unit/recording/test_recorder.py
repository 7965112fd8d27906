"""A recorder never waits, keeps its bounds, and writes nothing that a prompt could be read or guessed from."""

import gzip
import json
import threading
from hashlib import blake2b
from pathlib import Path

import pytest

from unified_cache.cache.recording.recorder import (
    SALT_BYTES,
    RecorderCounts,
    RecorderSettings,
    TraceNames,
    TraceRecorder,
)
from unified_cache.cache.recording.requests import RequestRecord
from unified_cache.core.errors import ConfigError
from unified_cache.core.hits import Hits
from unified_cache.core.page import Namespace, Prompt
from unified_cache.sizing.replay.trace import read_trace

PAGE_SIZE = 4
SALT = bytes(range(SALT_BYTES))


def record_of(number: int, pages: int = 3, namespace: str | None = None) -> RequestRecord:
    tokens = list(range(1_000 * number, 1_000 * number + pages * PAGE_SIZE))
    prompt = Prompt.of(tokens, PAGE_SIZE, Namespace(cache_salt=namespace) if namespace else Namespace())
    return RequestRecord(100.0 + number, prompt, 2, Hits(1, 1, 0), ("swa",))


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_a_line_is_of_the_mooncake_format_with_what_that_lacks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with TraceRecorder.open(path, RecorderSettings(salt=SALT)) as recorder:
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
        path = tmp_path / f"{name}.gz"
        with TraceRecorder.open(path) as recorder:
            for number in (1, 1, 2):
                recorder.record(record_of(number, namespace="acme"))
        text = gzip.decompress(path.read_bytes())
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
    assert TraceNames(SALT).pages(keys) == TraceNames(SALT).pages(keys)


def test_what_there_is_no_room_for_is_dropped_and_counted_and_nobody_waits(tmp_path: Path) -> None:
    record = record_of(1)
    size = len(record.prompt.tokens)
    recorder = TraceRecorder.open(tmp_path / "trace.gz", RecorderSettings(queue_bytes_max=5 * size))
    with recorder._guard:  # the writer cannot take anything meanwhile
        held = threading.Thread(target=lambda: None)
        held.start()
        held.join()
        recorder._queue.extend([record] * 5)
        recorder._queue_bytes = 5 * size
    for _ in range(3):
        recorder.record(record_of(2, pages=300))
    counts = recorder.close()
    assert (counts.written, counts.dropped, counts.failed) == (5, 3, 0)
    recorder.record(record)
    assert recorder.counts().dropped == 4, "after the end, too"


def test_files_are_rotated_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    for number in range(6):
        with TraceRecorder.open(path, RecorderSettings(file_bytes_max=1, files_max=3, salt=SALT)) as recorder:
            recorder.record(record_of(number))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["trace.1.jsonl.gz", "trace.2.jsonl.gz"]
    names = [lines_of(tmp_path / f"trace.{number}.jsonl.gz")[0]["hash_ids"] for number in (1, 2)]
    assert names == [TraceNames(SALT).pages(record_of(number).prompt.keys) for number in (5, 4)]


def test_a_file_that_is_cut_short_keeps_what_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    for number in (1, 2):
        with TraceRecorder.open(path) as recorder:
            recorder.record(record_of(number))
    assert len(lines_of(path)) == 2, "a recording goes on after what is there"


def test_a_file_that_cannot_be_written_costs_lines_and_raises_nothing(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    recorder = TraceRecorder.open(room / "trace.gz")
    (room / "trace.gz").unlink()
    room.rmdir()
    recorder.record(record_of(1))
    assert recorder.close() == RecorderCounts(written=0, dropped=0, failed=1)


@pytest.mark.threat("reading recordings")
def test_only_its_owner_can_read_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    with TraceRecorder.open(path) as recorder:
        path.unlink()  # as a rotation does
        recorder.record(record_of(1))
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("trace.jsonl", {}, "NAME.gz"),
        ("trace.gz", {"salt": b"short"}, "salt of a recording has 32 bytes, found 5"),
        ("trace.gz", {"files_max": 0}, "at least one file"),
        ("trace.gz", {"queue_bytes_max": 0}, "queue_bytes_max must be positive"),
        ("nowhere/trace.gz", {}, "a directory that is there"),
    ],
)
def test_a_recording_that_cannot_be_is_refused(
    tmp_path: Path, name: str, settings: dict[str, int | bytes], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        TraceRecorder.open(tmp_path / name, RecorderSettings(**settings))  # type: ignore[arg-type]
