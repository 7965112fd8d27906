"""How much the randomised tests do: enough for every commit, or the long mode of ``make test-long``."""

import os

LONG = os.environ.get("UNIFIED_CACHE_TEST_LONG") == "1"


def examples(short: int, long: int) -> int:
    """Return how many random histories to try."""
    return long if LONG else short
