"""The first deaths of what ``make soak-cluster`` does for minutes, in a process of its own: it may follow one etcd."""

import subprocess
import sys

import pytest

from tests.sources import ROOT
from tests.support.mooncake_needed import needs_etcd, needs_mooncake

SECONDS = 85


@needs_mooncake
@needs_etcd
@pytest.mark.long
def test_neither_a_node_nor_the_leader_that_is_killed_under_load_costs_a_page_or_a_late_answer() -> None:
    command = [sys.executable, "-m", "tests.soak.cluster", f"--seconds={SECONDS}"]
    played = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert played.returncode == 0, played.stdout + played.stderr[-2000:]
