"""Stores that go wrong while an engine runs, by URL: ``tests.engines.vllm.stores:faulty:DIRECTORY``."""

import random
from pathlib import Path

from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import Method
from unified_cache.testing.faulty_storage import FaultyStorage, StorageFault

__all__ = ["FaultSwitch", "faulty", "faulty_url"]

HANG_S = 600.0
"""Longer than anybody waits."""


class FaultSwitch:
    """Faults of a store in another process: a line for each method that has one, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self, **faults: StorageFault) -> None:
        """Give methods a fault each, by name; all others have none."""
        swap = self._path.with_suffix(".new")
        swap.write_text("".join(f"{method}={fault.value}\n" for method, fault in faults.items()))
        swap.replace(self._path)

    def fault_of(self, number: int, method: Method) -> StorageFault | None:
        """Return the fault of a method now."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        faults = dict(line.split("=") for line in lines)
        return StorageFault(faults[method.value]) if method.value in faults else None


def faulty_url(directory: Path) -> str:
    """Name a store whose faults a switch in the same directory says."""
    return f"{__name__}:faulty:{directory}"


def faulty(rest: str, bytes_max: int | None) -> FaultyStorage:
    """Open such a store."""
    directory = Path(rest)
    backend = open_storage(f"file:{directory / 'pages'}", bytes_max=bytes_max)
    return FaultyStorage(backend, FaultSwitch(directory / "faults"), random.Random(0), hang_s_max=HANG_S)
