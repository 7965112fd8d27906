"""One line in the log where nothing is restored, with what shows the reason."""

import logging

import pytest

from unified_cache.integrations.engine_store import EngineStoreCounts, HitWatch
from unified_cache.integrations.engine_store.interface import REQUESTS_MIN
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

NOT_FOUND, FOUND = {(Method.EXISTS, Answer.MISS): 2}, {(Method.EXISTS, Answer.HIT): 3}
STORED, DECLINED = {(Method.PUT, Answer.STORED): 4}, {(Method.PUT, Answer.DECLINED): 5}


@pytest.mark.parametrize(
    ("answers", "error", "level", "said"),
    [
        (STORED, "", "WARNING", "0 of 0 pages looked up were found, 4 of 4 offered were stored. See"),
        (NOT_FOUND | DECLINED, "full", "WARNING", "0 of 2 pages looked up were found, 0 of 5 offered were stored; the"),
        (NOT_FOUND | FOUND | STORED | DECLINED, "", "INFO", "3 of 5 pages looked up were found, 4 of 9 offered"),
        (FOUND | STORED | {(Method.GET, Answer.HIT): 1}, "", "", ""),
    ],
    ids=["not looked up", "takes nothing", "prompts do not come again", "restored"],
)
def test_the_log_says_once_and_in_time_that_nothing_was_restored(
    answers: dict[tuple[Method, Answer], int], error: str, level: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="unified_cache")
    watch = HitWatch(lambda: EngineStoreCounts(answers, {}, {}, {}, 0, error), "file:/kv?key=secret", "docs/engine.md")
    for _ in range(REQUESTS_MIN - 1):
        watch.count_request()
    assert not caplog.records
    for _ in range(2 * REQUESTS_MIN):
        watch.count_request()
    assert [record.levelname for record in caplog.records] == [level] * bool(level)
    assert all(said in message and error in message and "secret" not in message for message in caplog.messages)
