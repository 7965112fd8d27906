"""Logs: one line of JSON for each anomaly, and of one kind not too many."""

import json
import logging
from collections.abc import Iterator
from io import StringIO

import pytest

from tests.support.clock import ManualClock
from unified_cache.service.operations.logs import KINDS_MAX, LINES_AT_ONCE, JsonLines, Log, LogRateLimit, log_to


@pytest.fixture
def kept_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def lines(stream: StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_anomaly_is_one_line_of_json_whatever_its_text() -> None:
    stream = StringIO()
    log = Log(JsonLines(stream, lambda: 0.0), LogRateLimit(5, 1.0, ManualClock()))
    log.anomaly("odd", 'a "quoted"\nsecond line\u2028\x00')
    (line,) = lines(stream)
    assert line == {
        "time": "1970-01-01T00:00:00.000+00:00",
        "level": "warning",
        "kind": "odd",
        "text": 'a "quoted"\nsecond line\u2028\x00',
    }


def test_beyond_a_burst_one_line_of_a_kind_passes_now_and_then_and_says_how_many_did_not() -> None:
    stream, clock = StringIO(), ManualClock()
    log = Log(JsonLines(stream, lambda: 0.0), LogRateLimit(2, 10.0, clock))
    for _ in range(100):
        log.anomaly("flood", "x")
    log.anomaly("other", "y")
    assert [line["kind"] for line in lines(stream)] == ["flood", "flood", "other"]
    clock.sleep(10.0)
    log.anomaly("flood", "z")
    log.anomaly("flood", "z")
    assert lines(stream)[-1]["left_out"] == 98
    assert len(lines(stream)) == 4


@pytest.mark.threat("endless labels and log lines")
def test_kinds_are_few_and_lines_are_short() -> None:
    stream = StringIO()
    log = Log(JsonLines(stream, lambda: 0.0), LogRateLimit(1, 10.0, ManualClock()))
    for number in range(KINDS_MAX * 2):
        log.anomaly(f"kind {number}", "x" * 1_000_000)
    assert len(lines(stream)) == KINDS_MAX + 1
    assert len(stream.getvalue()) < KINDS_MAX * 4_000


def test_a_stream_that_is_gone_stops_nobody() -> None:
    stream = StringIO()
    log = Log(JsonLines(stream, lambda: 0.0), LogRateLimit(1, 10.0, ManualClock()))
    stream.close()
    log.anomaly("odd", "x")
    log.event("stopped", "x")


@pytest.mark.usefixtures("kept_logging")
def test_what_libraries_warn_of_is_in_the_log_with_its_traceback_and_paced() -> None:
    stream = StringIO()
    log_to(stream)
    logger = logging.getLogger("grpc._server")
    for _ in range(50):
        try:
            raise ValueError("spoiled")
        except ValueError:
            logger.exception("Exception calling application")
    logger.info("quiet")
    found = lines(stream)
    assert [line["kind"] for line in found] == ["log.grpc._server"] * LINES_AT_ONCE
    assert "spoiled" in str(found[0]["text"])
