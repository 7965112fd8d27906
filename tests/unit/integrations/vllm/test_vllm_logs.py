"""Log lines of this package where vLLM's go: its logger does not pass them up, and ours has no handler of its own."""

import logging
from collections.abc import Iterator

import pytest

from unified_cache.integrations.vllm.logs import show_logs_with


class LineList(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def package() -> Iterator[logging.Logger]:
    """Yield this package's logger without a way up, as in a program whose root logger has no handler."""
    logger = logging.getLogger("unified_cache")
    handlers, level, propagate, parent = list(logger.handlers), logger.level, logger.propagate, logger.parent
    logger.parent = logging.RootLogger(logging.WARNING)
    yield logger
    logger.handlers[:], logger.level, logger.propagate, logger.parent = handlers, level, propagate, parent
    logger.setLevel(level)


@pytest.mark.parametrize("place", ["nowhere", "package", "root"])
def test_lines_go_where_the_engine_s_go_once_unless_somebody_shows_them_elsewhere(
    place: str, package: logging.Logger
) -> None:
    engine, shown, elsewhere = logging.Logger("engine", logging.INFO), LineList(), LineList()
    engine.addHandler(shown)
    assert package.parent is not None
    if place != "nowhere":
        (package if place == "package" else package.parent).addHandler(elsewhere)
    for _ in range(2):
        show_logs_with(engine)
    below = logging.getLogger("unified_cache.integrations.engine_store.retries")
    below.warning("away")
    below.info("opened")
    below.debug("too much")
    if place == "nowhere":
        assert (shown.lines, elsewhere.lines) == (["away", "opened"], [])
    else:
        assert (shown.lines, elsewhere.lines) == ([], ["away"])
