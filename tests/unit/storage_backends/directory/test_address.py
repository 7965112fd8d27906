"""The text after ``file:`` in the name of a store."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import put
from unified_cache.core.errors import ConfigError
from unified_cache.storage_backends.directory.front import FREE_BYTES_MIN, DirectoryAddress, parse_address
from unified_cache.storage_backends.file.store import open_url


@pytest.mark.parametrize(
    ("rest", "directory", "free_bytes_min"),
    [
        ("pages", "pages", FREE_BYTES_MIN),
        ("/var/cache/pages", "/var/cache/pages", FREE_BYTES_MIN),
        ("pages?free=0", "pages", 0),
        ("pages?free=4096", "pages", 4096),
        ("a:b?free=3KiB", "a:b", 3 << 10),
        ("pages?free=512MiB", "pages", 512 << 20),
        ("pages?free=1GiB", "pages", 1 << 30),
        ("pages?free=2TiB", "pages", 2 << 40),
        ("pages?free=1.5GiB", "pages", 3 << 29),
        ("pages?free=5GB", "pages", 5_000_000_000),
        ("odd?name?", "odd?name", FREE_BYTES_MIN),
        ("odd?name?free=1", "odd?name", 1),
    ],
)
def test_an_address_names_a_directory_and_the_free_space_to_leave(
    rest: str, directory: str, free_bytes_min: int
) -> None:
    assert parse_address(rest) == DirectoryAddress(Path(directory), free_bytes_min)


@pytest.mark.parametrize("rest", ["", "?", "?free=1GiB"])
def test_an_address_without_a_directory_is_refused(rest: str) -> None:
    with pytest.raises(ConfigError, match="file: needs a directory"):
        parse_address(rest)


@pytest.mark.parametrize("rest", ["pages?size=1", "pages?free", "pages?name", "pages?free=1&free=2", "a?FREE=1"])
def test_an_unknown_option_is_refused_by_its_name(rest: str) -> None:
    with pytest.raises(ConfigError, match=r"free=SIZE alone|free= of file:"):
        parse_address(rest)


@pytest.mark.parametrize("size", ["", "-1", "GiB", "1.GiB", "1XiB", "0x10", "\u0661", "9" * 19])
def test_a_size_that_is_none_is_refused_with_an_example(size: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="free= of file: must be bytes as in 4096, 500MB or 4GiB"):
        open_url(f"{tmp_path / 'store'}?free={size}", None)
    assert list(tmp_path.iterdir()) == []


def test_a_store_opened_by_its_address_keeps_the_floor_that_it_names(tmp_path: Path) -> None:
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with closing(open_url(f"{tmp_path / 'high'}?free={free_bytes * 2}", None)) as storage:
        assert storage.path == tmp_path / "high"
        assert put(storage, [1]) == [False]
    with closing(open_url(f"{tmp_path / 'low'}?free=0", 1 << 20)) as storage:
        assert storage.capability().bytes_max == 1 << 20
        assert put(storage, [1]) == [True]
