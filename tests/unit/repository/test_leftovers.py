"""A process of a cluster that is left behind is found, whoever its parent is."""

import os
import subprocess
import sys

from tests.leftovers import SESSION_VARIABLE, processes_of
from tests.support.cluster import all_end
from unified_cache.cluster.child import wait_until

TIMEOUT_S = 30.0
ORPHANED = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "unified_cache.cluster.orphan"])
"""
"""Starts a process that reads its standard input to the end, and leaves it."""


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
