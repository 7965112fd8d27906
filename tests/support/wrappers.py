"""Support of the wrappers' tests: a clock that only sleeping moves, and pages by number."""

import random
from collections.abc import Mapping, Sequence

from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import PageIO, StorageBackend
from unified_cache.testing.faulty_storage import FaultyStorage, ScriptedFaults, StorageFault
from unified_cache.testing.storage_contract import blank_page, label, sealed_page

PATIENCE_S = 60.0
"""Longest wait for what must happen; reached only by a bug."""


def scripted(script: Mapping[int, StorageFault], backend: StorageBackend | None = None, seed: int = 0) -> FaultyStorage:
    """Put these faults, by call number, before a backend, or an empty one in memory."""
    return FaultyStorage(backend or MemoryStorage(), ScriptedFaults(script), random.Random(seed))


def sealed(numbers: Sequence[int]) -> list[PageIO]:
    """Make the sealed pages of these numbers."""
    return [sealed_page(label(number)) for number in numbers]


def blank(numbers: Sequence[int]) -> list[PageIO]:
    """Make buffers for the pages of these numbers."""
    return [blank_page(label(number)) for number in numbers]
