"""Processes of clusters that tests started and that are still there when all tests have ended."""

import uuid
from collections.abc import Iterator

import psutil
import pytest

from tests.support.waiting import wait_until

SESSION_VARIABLE = "UNIFIED_CACHE_TEST_SESSION"
"""In the environment of whatever this run of the tests starts, however far down and whoever is its parent by now."""

CLUSTER_WORDS = ("mooncake_master", "mooncake_client", "-s3.config=")
"""In the command line of the master, of nodes, and of the server of a bucket."""

END_TIMEOUT_S = 10.0


@pytest.fixture(scope="session", autouse=True)
def no_cluster_process_is_left() -> Iterator[None]:
    """Fail at the end if one is; it is killed, so that it fails once."""
    session = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SESSION_VARIABLE, session)
        yield
    wait_until(lambda: not processes_of(session), END_TIMEOUT_S)
    left = processes_of(session)
    for orphan in left:
        orphan.kill()
    assert not left, f"processes of clusters must end with the tests, found {left}"


def processes_of(session: str) -> list[psutil.Process]:
    """Return the processes of clusters that carry a session's mark."""
    return [each for each in psutil.process_iter() if _is_of(each, session)]


def _is_of(candidate: psutil.Process, session: str) -> bool:
    try:
        command = " ".join(candidate.cmdline())
        return any(word in command for word in CLUSTER_WORDS) and candidate.environ().get(SESSION_VARIABLE) == session
    except psutil.Error:
        return False  # it ended, or is somebody else's
