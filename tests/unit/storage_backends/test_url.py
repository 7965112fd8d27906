"""Stores by URL."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.store_kinds import StoreKind
from tests.support.wrappers import scripted
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.memory import KeysOnlyStorage, MemoryStorage
from unified_cache.storage_backends.protocol import StorageReader
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.storage_backends.wrappers import StorageGuard


def test_a_scheme_names_a_module_of_ours(tmp_path: Path) -> None:
    assert isinstance(open_storage("memory:"), MemoryStorage)
    assert open_storage("keys_only:").capability().name == "keys_only"
    storage = open_storage(f"file:{tmp_path / 'a:b'}", bytes_max=5)
    assert storage.capability().name == "file"
    assert (tmp_path / "a:b" / "store.json").exists()
    assert storage.capability().bytes_max == 5
    storage.close()


def test_a_directory_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_storage("file:some/store").close()
    assert (tmp_path / "some" / "store" / "store.json").exists()


def test_a_scheme_with_a_dot_names_a_third_partys_factory(tmp_path: Path) -> None:
    plugin = "unified_cache.storage_backends.file.store:open_url"
    storage = open_storage(f"{plugin}:{tmp_path / 'store'}")
    assert storage.capability().name == "file"
    storage.close()
    with pytest.raises(ConfigError, match="file: needs a directory"):
        open_storage(plugin)


@pytest.mark.parametrize("url", ["", "memory", ":x", "redis:x", "protocol:", "directory:x", "url:x"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(ConfigError, match=r"file:, .*keys_only:, .*memory:.* or package\.module:"):
        open_storage(url)


@pytest.mark.parametrize(
    "url", ["memory:rest", "file:", "no.such.module:open", "os.path:", "os.path:absent", "os.path:sep"]
)
def test_a_url_that_names_nothing_usable_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(url)


# Words of stores and wrappers about waiting for them


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
