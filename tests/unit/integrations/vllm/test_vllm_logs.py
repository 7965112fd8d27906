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


@pytest.fixture
def engine() -> tuple[logging.Logger, LineList]:
    """Return an engine's logger, which shows lines from INFO on."""
    logger, shown = logging.Logger("engine", logging.INFO), LineList()
    logger.addHandler(shown)
    return logger, shown


def test_lines_go_where_the_engine_s_go_once_however_often_that_is_asked_for(
    package: logging.Logger, engine: tuple[logging.Logger, LineList]
) -> None:
    logger, shown = engine
    below = logging.getLogger("unified_cache.integrations.engine_store.retries")
    for _ in range(2):
        show_logs_with(logger)
    below.info("opened")
    below.debug("too much")
    assert shown.lines == ["opened"]


def test_lines_that_somebody_has_sent_elsewhere_stay_there(
    package: logging.Logger, engine: tuple[logging.Logger, LineList]
) -> None:
    logger, shown = engine
    elsewhere = LineList()
    package.addHandler(elsewhere)
    show_logs_with(logger)
    package.warning("away")
    assert (shown.lines, elsewhere.lines) == ([], ["away"])


def test_lines_that_the_root_logger_shows_are_not_shown_twice(
    package: logging.Logger, engine: tuple[logging.Logger, LineList]
) -> None:
    logger, shown = engine
    root = LineList()
    assert package.parent is not None
    package.parent.addHandler(root)
    show_logs_with(logger)
    package.warning("away")
    assert (shown.lines, root.lines) == ([], ["away"])
