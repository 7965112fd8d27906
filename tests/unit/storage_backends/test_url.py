"""Stores by URL."""

from pathlib import Path

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.url import open_storage


def test_a_scheme_names_a_module_of_ours(tmp_path: Path) -> None:
    assert isinstance(open_storage("memory:"), MemoryStorage)
    assert open_storage("keys_only:").capability().name == "keys_only"
    storage = open_storage(f"file:{tmp_path / 'a:b'}", bytes_max=5)
    assert isinstance(storage, FileStorage)
    assert storage.path == tmp_path / "a:b"
    assert storage.capability().bytes_max == 5
    storage.close()


def test_a_directory_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_storage("file:some/store").close()
    assert (tmp_path / "some" / "store" / "store.json").exists()


def test_a_scheme_with_a_dot_names_a_third_partys_factory(tmp_path: Path) -> None:
    plugin = "unified_cache.storage_backends.file.store:open_url"
    storage = open_storage(f"{plugin}:{tmp_path / 'store'}")
    assert isinstance(storage, FileStorage)
    storage.close()
    with pytest.raises(ConfigError, match="file: needs a directory"):
        open_storage(plugin)


@pytest.mark.parametrize("url", ["", "memory", ":x", "s3:bucket", "protocol:", "directory:x", "url:x"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(ConfigError, match=r"file:, .*keys_only:, .*memory:.* or package\.module:"):
        open_storage(url)


@pytest.mark.parametrize(
    "url", ["memory:rest", "file:", "no.such.module:open", "os.path:", "os.path:absent", "os.path:sep"]
)
def test_a_url_that_names_nothing_usable_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(url)
