"""Budget of the randomised tests: enough for every commit, or the long mode of ``make test-long``."""

import os
import secrets
import sys
from collections.abc import Sequence

import pytest
from hypothesis import Phase

LONG = os.environ.get("UNIFIED_CACHE_TEST_LONG") == "1"

PHASES = [Phase.explicit, Phase.generate] if os.environ.get("UNIFIED_CACHE_TEST_FIRST_FAILURE") == "1" else list(Phase)
"""What hypothesis does: everything, or only look for a failure, where how it fails does not matter."""


def examples(short: int, long: int) -> int:
    """Return how many random histories to try."""
    return long if LONG else short


def fresh_seeds(count: int) -> range:
    """Return seeds that no run has tried, said where their test fails; one that ever fails is kept by name."""
    first = secrets.randbelow(1 << 24)
    sys.stdout.write(f"seeds from {first} on\n")
    return range(first, first + count)


def one_in_every_run(values: Sequence[object]) -> list[object]:
    """Return values for a parameter of which the last is in every run, and the others in the long mode."""
    *others, last = values
    each = [value if isinstance(value, tuple) else (value,) for value in others]
    return [*(pytest.param(*value, marks=pytest.mark.long) for value in each), last]
