"""Looking into a file store's directory, and filling it."""

from collections.abc import Sequence
from pathlib import Path

from unified_cache.seal import Label
from unified_cache.storage_backends.file import FileStorage
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import label, sealed_page


def path_of(root: Path, named: Label) -> Path:
    """Return where an object of that label lies."""
    key = named.key.hex()
    return root / named.identity.hex() / key[:2] / f"{key}.{named.pool}"


def put(storage: FileStorage, numbers: Sequence[int], level: Level = Level.CACHED) -> list[bool]:
    """Put the pages of these numbers."""
    return storage.put([sealed_page(label(number)) for number in numbers], level)


def temps(root: Path) -> list[str]:
    """Return the names of temp files, of any writer."""
    return sorted(path.name for path in (root / "tmp").rglob("*") if path.is_file() and path.name != "lock")
