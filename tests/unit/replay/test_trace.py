import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from unified_cache.core.errors import ConfigError, TraceError
from unified_cache.sizing.replay.trace import (
    BLANK_BYTES_MAX,
    BLOCK_TOKENS,
    BLOCKS_MAX,
    LINE_BYTES_MAX,
    NAME_MAX,
    TraceRequest,
    read_trace,
)


def line(timestamp: object = 0, input_length: object = 600, hash_ids: object = (1, 2), **changed: object) -> str:
    entry: dict[str, object] = {"timestamp": timestamp, "input_length": input_length, "output_length": 7}
    return json.dumps({**entry, "hash_ids": hash_ids, **changed})


def written(directory: Path, *lines: str) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_requests_come_in_the_order_of_their_timestamps_and_equal_ones_as_they_stand(tmp_path: Path) -> None:
    path = written(tmp_path, line(5, 600), line(3.5, 601), line(5, 602))
    assert [request.input_length for request in read_trace(path)] == [601, 600, 602]


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace"])
def test_a_gzip_trace_reads_as_a_plain_one_whatever_its_name(tmp_path: Path, name: str) -> None:
    packed = tmp_path / name
    packed.write_bytes(gzip.compress(f"{line()}\n".encode()))
    assert read_trace(packed) == read_trace(written(tmp_path, line())) == [TraceRequest(0, 600, 7, (0, 1))]


def test_a_limit_stops_before_later_lines_are_looked_at(tmp_path: Path) -> None:
    path = written(tmp_path, line(), line(), "no trace")
    assert len(read_trace(path, 2)) == 2


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigError, match="limit must be at least 1"):
        read_trace(written(tmp_path, line()), limit)


def test_blank_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, "", line(), "  ", line(), ""))) == 2
    with pytest.raises(TraceError, match=r"trace\.jsonl:3: "):
        read_trace(written(tmp_path, line(), "", "{}"))


def test_names_of_a_recording_are_numbered_as_they_come_first(tmp_path: Path) -> None:
    name = 2**63 - 1
    lines = (
        line(5, 32, [name, 7], page_size=16),
        line(3, 48, [name, 9, name - 1], page_size=16),
    )
    first, second = read_trace(written(tmp_path, *lines))
    assert (first.hash_ids, second.hash_ids) == ((0, 1, 2), (0, 3))
    assert first.block_tokens == second.block_tokens == 16


def test_a_trace_of_bailian_is_in_seconds_and_blocks_of_16_tokens_that_name_no_prefix(tmp_path: Path) -> None:
    turn = {"chat_id": 7, "parent_chat_id": -1, "turn": 1, "type": "text"}
    lines = (line(61.5, 40, [5, 6, 9], **turn), line(2.25, 30, [6, 5], **turn), line(70, 33, [5, 6, 9], **turn))
    crossed, straight, again = read_trace(written(tmp_path, *lines))
    assert [each.timestamp for each in (crossed, straight, again)] == [2250, 61_500, 70_000]
    assert crossed.block_tokens == 16
    assert straight.hash_ids == again.hash_ids
    assert not {*crossed.hash_ids} & {*straight.hash_ids}


def test_an_id_behind_another_prefix_is_another_block(tmp_path: Path) -> None:
    lines = (line(0, hash_ids=[1, 2]), line(1, hash_ids=[3, 2]), line(2, hash_ids=[3, 2]), line(3, hash_ids=[1, 2]))
    assert [each.hash_ids for each in read_trace(written(tmp_path, *lines))] == [(0, 1), (2, 3), (2, 3), (0, 1)]


def test_a_line_of_another_page_size_than_those_before_is_refused_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, line(page_size=512), line(), line(0, 32, [1, 2], page_size=16))
    with pytest.raises(TraceError, match=r":3: expected the page_size of the lines before, 512, found 16"):
        read_trace(path)


def test_an_empty_prompt_is_a_request_without_blocks(tmp_path: Path) -> None:
    (request,) = read_trace(written(tmp_path, line(input_length=0, hash_ids=[])))
    assert request.tokens().shape == (0,)


BAD = (
    ("{", r"expected a JSON object, found '\{'"),
    ("[1]", "expected a JSON object, found"),
    ("7", "expected a JSON object, found"),
    ("\x00\x01", "expected a JSON object, found"),
    ("[" * 100_000, "expected a JSON object, found"),
    ("{}", "expected a field timestamp"),
    (json.dumps({"timestamp": 1, "input_length": 2, "output_length": 3}), "expected a field hash_ids"),
    (line(timestamp="now"), "expected timestamp to be a number of milliseconds, found 'now'"),
    (line(timestamp=True), "expected timestamp to be a number"),
    (line(timestamp=float("nan")), "expected timestamp to be a number"),
    (line(timestamp=10**400), "expected timestamp to be a number"),
    (line(timestamp=-1e308), "expected timestamp to be a number"),
    (line(input_length=600.0), "expected input_length to be a number of tokens, found 600.0"),
    (line(input_length=-1, hash_ids=[]), "expected input_length to be a number of tokens, found -1"),
    (line(output_length=None), "expected output_length to be a number of tokens"),
    (line(output_length=10**400), "expected output_length to be a number of tokens"),
    (line(input_length=10**400), "expected input_length to be a number of tokens"),
    (line(hash_ids=[1] * (BLOCKS_MAX + 1)), f"expected at most {BLOCKS_MAX} hash_ids, found {BLOCKS_MAX + 1}"),
    (line(hash_ids=7), "expected hash_ids to be a list, found 7"),
    (line(hash_ids=[1, "2"]), "expected hash_ids to be integers in .* found '2'"),
    (line(hash_ids=[1, True]), "expected hash_ids to be integers in .* found True"),
    (line(hash_ids=[1, -2]), "expected hash_ids to be integers in .* found -2"),
    (line(hash_ids=[1, NAME_MAX + 1]), f"expected hash_ids to be integers in .* found {NAME_MAX + 1}"),
    (line(hash_ids=[1]), "expected 2 hash_ids for an input_length of 600 in blocks of 512, found 1"),
    (line(hash_ids=[1, 2, 3]), "expected 2 hash_ids for an input_length of 600 in blocks of 512, found 3"),
)


@pytest.mark.parametrize(("text", "expected"), BAD)
def test_a_malformed_line_is_refused_with_its_place_and_what_is_wrong(tmp_path: Path, text: str, expected: str) -> None:
    path = written(tmp_path, line(), text, line())
    with pytest.raises(TraceError, match=expected) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: expected")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["trace", "trace.jsonl.gz"])
def test_lines_that_are_too_long_or_blank_are_read_no_further_than_their_bound(name: str, tmp_path: Path) -> None:
    """The rest, which is never read, is damaged gzip where it is packed."""
    for found, text in (
        ("blank bytes", b"\n" * (2 * BLANK_BYTES_MAX)),
        ("blank bytes", (b" " * 1000 + b"\n") * (2 * BLANK_BYTES_MAX // 1001)),
        ("more than", b"1," * LINE_BYTES_MAX),
    ):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text)[:-9] if path.suffix == ".gz" else text)
        with pytest.raises(TraceError, match=found):
            read_trace(path)
    assert len(read_trace(written(tmp_path, line(), "\n" * (BLANK_BYTES_MAX - 2), line()))) == 2


def test_a_file_that_is_missing_empty_or_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    for path, found in ((tmp_path / "none", "found no such file"), (tmp_path, "found a directory")):
        with pytest.raises(TraceError, match=found) as caught:
            read_trace(path)
        assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(TraceError, match="expected at least one request, found an empty file"):
        read_trace(written(tmp_path, "\n"))


@pytest.mark.parametrize("cut", [4, 20, -9, -2])
def test_gzip_that_ends_early_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(f"{line()}\n".encode() * 9)[:cut])
    with pytest.raises(TraceError, match="expected whole gzip data"):
        read_trace(path)


def test_gzip_that_is_damaged_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    packed = bytearray(gzip.compress(f"{line()}\n".encode() * 99))
    packed[len(packed) // 2] ^= 0x55
    for content in (bytes(packed), line().encode()):
        path.write_bytes(content)
        with pytest.raises(TraceError):
            read_trace(path)


def test_tokens_are_a_function_of_block_and_offset_within_the_range_of_token_ids() -> None:
    tokens = TraceRequest(0, 513, 1, (2**31 // BLOCK_TOKENS - 1, 0)).tokens()
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*range(2**31 - BLOCK_TOKENS, 2**31), *range(BLOCK_TOKENS)]
