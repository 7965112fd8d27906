"""A known mistake, and how it is planted."""

from dataclasses import dataclass

TESTS = [
    "tests/unit/core/test_tree.py",
    "tests/unit/core/test_cache.py",
    "tests/unit/core/test_bad_calls.py",
    "tests/unit/core/test_checkpoints.py",
    "tests/unit/core/test_last_token.py",
    "tests/unit/core/test_transfer_order.py",
    "tests/unit/core/test_operations.py",
    "tests/unit/core/test_prefetch.py",
    "tests/unit/core/test_layerwise_load.py",
    "tests/unit/core/test_clear_storage.py",
    "tests/unit/core/test_ledger.py",
    "tests/unit/core/test_paired_slots.py",
    "tests/unit/forward/test_forward.py",
    "tests/property/test_eviction_policies.py",
    "tests/property/test_device_histories.py",
    "tests/property/test_window_grid.py",
]
"""What must catch a mutant, quickest first."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: in ``path``, ``sound`` (which occurs there once) becomes ``broken``."""

    name: str
    path: str
    sound: str
    broken: str
    tests: tuple[str, ...] = ()
    """What must catch it, if not TESTS."""


def planted(mutant: Mutant, text: str) -> str:
    """Return ``text``, that of the mutant's file, with the mistake in it.

    Raises:
        ValueError: the sound text does not stand there exactly once.
    """
    count = text.count(mutant.sound)
    if count != 1:
        raise ValueError(f"{mutant.name}: expected its text once in {mutant.path}, found it {count} times")
    return text.replace(mutant.sound, mutant.broken)
