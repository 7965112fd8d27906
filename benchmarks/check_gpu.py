"""The checks of a GPU, each a case of pytest, which ``python -m benchmarks.gpu`` runs; skipped where there is none."""

from collections.abc import Callable

import pytest

from benchmarks.gpu_checks import CHECKS, FULL_SIZES, Found, GpuSizes
from tests.support.gpu import needs_gpu


@needs_gpu
@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def check_gpu(check: Callable[[GpuSizes], Found], record_property: Callable[[str, object], None]) -> None:
    found = check(FULL_SIZES)
    record_property("figure", found.figure)
    assert found.is_kept, f"{check.__doc__} Found: {found.figure}"
