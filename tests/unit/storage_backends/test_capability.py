"""Words of stores and wrappers about waiting for them."""

from contextlib import closing
from pathlib import Path

from tests.support.store_kinds import StoreKind
from tests.support.wrappers import scripted
from unified_cache.core.config import GuardConfig
from unified_cache.storage_backends.memory import KeysOnlyStorage, MemoryStorage
from unified_cache.storage_backends.protocol import StorageReader
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.storage_backends.wrappers import StorageGuard


def waiting(storage: StorageReader) -> tuple[bool, bool]:
    """Return whether a look-up costs I/O, and whether calls end by themselves."""
    capability = storage.capability()
    return capability.exists_costs_io, capability.bounded


def test_memory_waits_for_nothing_and_a_disk_may_hold_any_call(tmp_path: Path) -> None:
    assert waiting(MemoryStorage()) == waiting(KeysOnlyStorage()) == (False, True)
    with closing(StoreKind.FILE.open(tmp_path / "file")) as storage:
        assert waiting(storage) == (True, False)
    with closing(StoreKind.PACKED.open(tmp_path / "packed")) as storage:
        assert waiting(storage) == (False, False)


def test_wrappers_say_what_their_store_says_but_where_a_call_runs_on_or_is_made_again() -> None:
    store = MemoryStorage()
    guard = StorageGuard(store, store.capability(), GuardConfig())
    assert waiting(VerifiedStorage(store)) == (False, True)
    assert waiting(guard) == (False, False)
    assert waiting(scripted({})) == (True, False)  # any of its calls may hang
    guard.close()
