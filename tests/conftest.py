"""Set-up of every test run: interrupts, threads, garbage collection, and a summary of skips and of what is left."""

import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

from tests.support.bucket import LocalBucket


def pytest_configure() -> None:
    """Have children that are interrupted end, also where whoever started the tests ignores interrupts itself.

    torch computes in one thread, here and in every process that a test starts: as many as there are cores wait for each
    other by spinning, and other tests have the other cores.

    Nor does hypothesis fail a test because the machine was slow.
    """
    settings.register_profile(
        "any-machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any-machine")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if threading.current_thread() is threading.main_thread():
        # Who tells the tests to end, as a limit of time does, leaves no engine or cluster of theirs behind.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
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


@pytest.fixture(scope="session")
def bucket() -> Iterator[LocalBucket]:
    """Yield a bucket of a real S3 server, which URLs find by the environment; started once, when it is first needed."""
    with LocalBucket.running() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(params=["", "#compress=lossless&keys=env:PAGE_KEYS"], ids=["plain", "coded"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return what names a new store of a kind, ``file``, ``packed`` or ``bucket``; once plain, once coded."""
    monkeypatch.setenv("PAGE_KEYS", f"* {'6f' * 32}")
    coding: str = request.param

    def new_url(kind: str) -> str:
        bare: str = request.getfixturevalue("bucket").new_url() if kind == "bucket" else f"{kind}:{tmp_path}"
        return bare + coding

    return new_url


@pytest.fixture
def memory_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a directory in memory, where there is some: a file made on a disk costs a hundred times as much."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("disk")
        return
    with TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)
