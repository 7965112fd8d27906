"""The checks of a GPU, each a case of pytest, which ``python -m benchmarks.gpu`` runs; skipped where there is none."""

import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks.gpu_checks import CHECKS, FULL_SIZES, Found, GpuSizes
from benchmarks.machine import ROOT
from tests.support.gpu import needs_gpu

SANITIZER = "compute-sanitizer"
SANITIZED_S = 200


@needs_gpu
@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def check_gpu(check: Callable[[GpuSizes], Found], record_property: Callable[[str, object], None]) -> None:
    found = check(FULL_SIZES)
    record_property("figure", found.figure)
    assert found.is_kept, f"{check.__doc__} Found: {found.figure}"


@needs_gpu
@pytest.mark.skipif(shutil.which(SANITIZER) is None, reason=f"no {SANITIZER}")
def check_that_copies_touch_no_memory_but_their_own() -> None:
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "pytest", "--noconftest"]
    command += ["-p", "no:cacheprovider", "-W", "default", "-m", "gpu", "-k", "pieces or duplicated"]
    command.append("tests/unit/core/test_device_copies.py")
    done = subprocess.run(command, cwd=ROOT, timeout=SANITIZED_S, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout[-2000:]
