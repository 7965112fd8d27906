"""A process of a cluster that is left behind is found, whoever its parent is, and tests that are ended leave none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.leftovers import SESSION_VARIABLE, processes_of
from tests.support.cluster import all_end
from tests.support.waiting import wait_until

TIMEOUT_S = 30.0
ORPHANED = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "mooncake_client"])
"""
"""Starts a process that reads its standard input to the end, and leaves it."""

WAITS = """
import subprocess, sys

def test_waits_for_a_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        print(child.pid, flush=True)
        child.wait()
    finally:
        child.kill()
        child.wait()
"""


def test_an_orphan_of_this_run_is_found_and_those_of_others_are_not() -> None:
    mine = f"mine of {os.getpid()}"  # two runs on one machine must not take each other's orphans for their own
    environment = {**os.environ, SESSION_VARIABLE: mine}
    with subprocess.Popen([sys.executable, "-c", ORPHANED], stdin=subprocess.PIPE, env=environment) as parent:
        assert parent.wait(TIMEOUT_S) == 0
        assert wait_until(lambda: len(processes_of(mine)) == 1, TIMEOUT_S)
        assert processes_of("others") == []
        found = processes_of(mine)
        assert parent.stdin is not None
        parent.stdin.close()
        assert all_end(found)


def test_a_run_of_tests_that_is_told_to_end_cleans_up_after_itself(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n0"]
    with subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = psutil.Process(next(int(line) for line in run.stdout if line.strip().isdecimal()))
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=TIMEOUT_S)
        is_left = child.is_running()
        if is_left:
            child.kill()
        assert not is_left
