"""Whatever comes, what reads it answers, or refuses with an error of its own."""

import importlib.util
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.budget import LONG

SECONDS = 60 if LONG else 2
START_S = 120.0
RUNS_MIN = 100
GROWTH_MIB_MAX = 2048
"""Memory that fuzzing may take; what libFuzzer has by default."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel here")


@pytest.mark.threat("bad input")
@pytest.mark.parametrize("target", ["requests", "pages"])
def test_no_bytes_cause_an_error_without_a_type(target: str, tmp_path: Path) -> None:
    # A child begins with its parent's peak as its own, and the peak is what libFuzzer goes by.
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    options = [f"-max_total_time={SECONDS}", "-max_len=4096", "-seed=1", f"-artifact_prefix={tmp_path}/"]
    options.append(f"-rss_limit_mb={peak_mib + GROWTH_MIB_MAX}")
    command = [sys.executable, "-m", "tests.fuzz", target, str(tmp_path / "corpus"), *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + START_S, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    done = re.search(r"Done (\d+) runs", ended.stderr)
    assert done is not None
    assert int(done[1]) >= RUNS_MIN
