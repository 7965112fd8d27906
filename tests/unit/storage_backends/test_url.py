"""Stores by URL."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.operations import engine
from tests.support.store_kinds import StoreKind
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.integrations.engine_store import EngineStore
from unified_cache.storage_backends.memory import KeysOnlyStorage, MemoryStorage
from unified_cache.storage_backends.offline.stores import open_to_read
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import LAYOUT, MODEL


def test_a_scheme_names_a_module_of_ours(tmp_path: Path) -> None:
    assert isinstance(open_storage("memory:"), MemoryStorage)
    assert open_storage("keys_only:").capability().name == "keys_only"
    storage = open_storage(f"file:{tmp_path / 'a:b'}", bytes_max=5)
    assert storage.capability().name == "file"
    assert (tmp_path / "a:b" / "store.json").exists()
    assert storage.capability().bytes_max == 5
    storage.close()


@pytest.mark.parametrize("url", ["file:$NO_SUCH_VARIABLE/kv", "packed:/tmp/${NO_SUCH_VARIABLE}"])
def test_a_path_that_names_a_variable_that_is_not_set_is_refused_and_made_nowhere(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must name variables that are set"):
        open_storage(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("server", ["127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1:http", ":50051", "127.0.0.1"])
def test_a_service_whose_port_is_none_is_refused_and_not_away_for_ever(server: str) -> None:
    with pytest.raises(ConfigError, match="a service is named as"):
        open_storage(f"grpc://{server}")


@pytest.mark.parametrize("kind", StoreKind)
@pytest.mark.parametrize("directory", ["~/cache/kv", "$HOME/cache/kv", "${HOME}/cache/kv", "cache/kv"])
def test_a_directory_may_be_relative_and_a_home_and_a_variable_are_replaced_as_by_a_shell(
    directory: str, kind: StoreKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    url = f"{kind.value}:{directory}?free=0"
    open_storage(url).close()
    open_to_read(url).close()
    assert (tmp_path / "cache" / "kv" / "store.json").exists()


@pytest.mark.parametrize("url", [f"{__name__}:opens_nothing", "./kv:x", ".:x", "..kv.old:x"])
def test_a_factory_of_no_store_and_a_path_with_a_colon_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"must open a Store|must begin with one of"):
        open_storage(url)


def opens_nothing(_rest: str, _bytes_max: int | None) -> None:
    """Return no store: a factory of a third party that forgot to."""


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("of_one", StorageError),
        ("Confused", ConfigError),
        ("away:redis://:secret@host", StorageError),
        ("Failing", StorageError),
    ],
)
def test_whatever_a_third_partys_code_raises_is_an_error_of_ours_that_names_the_url(
    name: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        open_storage(f"tests.support.third_party:{name}")
    assert caught.value.__cause__ is not None or name == "Confused"
    assert "secret" not in str(caught.value)


def test_a_layer_says_that_the_store_beneath_it_may_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStorage, "is_read_only", True)
    assert VerifiedStorage(MemoryStorage()).is_read_only


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="~nobody-at-all"):
        open_storage("file:~nobody-at-all/kv")


@pytest.mark.parametrize(("size", "bytes_max"), [("10TiB", 10 << 40), ("400GB", 400 * 10**9), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("scheme", ["memory:", "keys_only:", "file:", "packed:"])
def test_a_cap_is_a_size_as_text_or_a_number(size: str | int, bytes_max: int, scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}{tmp_path / 'store'}" if scheme in ("file:", "packed:") else scheme
    with closing(open_storage(url, bytes_max=size)) as storage:
        assert storage.capability().bytes_max == bytes_max


@pytest.mark.parametrize("size", ["", "ten", "-1", -1, True, "10 tebibytes"])
def test_a_cap_that_is_no_size_is_refused(size: str | int) -> None:
    for opened in (open_storage, EngineStore.open):
        with pytest.raises(ConfigError, match="bytes_max must be bytes as in 4096"):
            opened("memory:", bytes_max=size)


@pytest.mark.parametrize("cap", [0, 100])
def test_a_cap_below_a_page_is_refused_once_the_layout_is_known(cap: int, tmp_path: Path) -> None:
    for url in ("memory:", f"file:{tmp_path / 'file'}", f"packed:{tmp_path / 'packed'}"):
        with EngineStore.open(url, bytes_max=cap) as store, pytest.raises(ConfigError, match="must hold a page of kv"):
            store.register(MODEL, LAYOUT)


@pytest.mark.parametrize("cap", [0, 100])
def test_a_cache_refuses_a_store_whose_cap_is_below_a_page(cap: int) -> None:
    with pytest.raises(ConfigError, match="must hold a page"):
        engine(MemoryStorage(bytes_max=cap))


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


@pytest.mark.parametrize(
    ("opened", "costs_io", "is_bounded"),
    [
        (lambda path: MemoryStorage(), False, True),
        (lambda path: KeysOnlyStorage(), False, True),
        (StoreKind.FILE.open, True, False),
        (StoreKind.PACKED.open, False, False),
        (lambda path: VerifiedStorage(MemoryStorage()), False, True),
        (lambda path: StorageGuard(MemoryStorage(), MemoryStorage().capability(), GuardConfig()), False, False),
    ],
)
def test_a_store_says_whether_a_look_up_waits_for_a_disk_and_whether_a_call_ends_by_itself(
    opened: Callable[[Path], Store], costs_io: bool, is_bounded: bool, tmp_path: Path
) -> None:
    with closing(opened(tmp_path / "store")) as storage:
        capability = storage.capability()
        assert (capability.exists_costs_io, capability.bounded) == (costs_io, is_bounded)
