"""The storage contract over the store that shows how to write one."""

from pathlib import Path

import pytest

from tests.contract.own_store import SqliteStore
from tests.sources import ROOT
from unified_cache.storage_backends.protocol import Store
from unified_cache.testing.storage_contract import StorageContract

LINES_MAX = 60
"""As long as a third party's store has to be."""


class TestOwnStore(StorageContract):
    rounds_of_each_thread = 10

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Store:
        return SqliteStore(str(tmp_path / "pages.db"))


def test_a_third_party_s_store_is_four_methods_and_few_lines() -> None:
    assert len((ROOT / "tests/contract/own_store.py").read_text(encoding="utf-8").splitlines()) <= LINES_MAX
    own = {name for name in vars(SqliteStore) if not name.startswith("_")}
    assert own == Store.__abstractmethods__
