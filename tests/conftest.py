"""Set-up of every test run: interrupts, garbage collection, and a summary of skips and of processes left behind."""

import gc
import signal
from collections import Counter

import pytest

from tests.leftovers import no_cluster_process_is_left

__all__ = [
    "no_cluster_process_is_left",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_terminal_summary",
]


def pytest_configure() -> None:
    """Have children that are interrupted end, also where whoever started the tests ignores interrupts itself."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later collection of garbage: it stays until the end."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for every reason."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
