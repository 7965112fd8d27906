"""What every run of the tests says at its end: how many were skipped, and why; and whether it left processes."""

from collections import Counter

import pytest

from tests.leftovers import no_cluster_process_is_left

__all__ = ["no_cluster_process_is_left", "pytest_terminal_summary"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for every reason."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
