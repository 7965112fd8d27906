"""Stores in a directory work where the operating system has less than Linux: as macOS, which has no fallocate."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.store_kinds import StoreKind

TIMEOUT_S = 60.0

PROGRAM = """
import ctypes, errno, os, sys

for name in ("fdatasync", "posix_fallocate"):
    delattr(os, name)
del errno.errorcode[errno.EUCLEAN], errno.EUCLEAN


class LesserLibrary(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "fallocate":
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = LesserLibrary

from tests.support.files import put
from tests.support.store_kinds import StoreKind
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

CUTS = (100, 600)

kind, path = StoreKind(sys.argv[1]), sys.argv[2]
store = kind.open(path)
assert all(put(store, range(8), Level.DURABLE))
assert all(store.put([sealed_page(label(8), cuts=CUTS)], Level.DURABLE))
assert store.remove([label(2), label(3)]) == 2
store.close()
store = kind.open(path)
LEFT = (0, 1, 4, 5, 6, 7, 8)
assert [number for number in range(9) if store.exists([label(number)])[0]] == list(LEFT)
for number in LEFT:
    for cuts in ((), CUTS):
        page = blank_page(label(number), cuts=cuts)
        assert all(store.get([page]))
        assert bytes_of(page) == bytes_of(sealed_page(label(number)))
store.close()
"""
"""Takes away what only Linux has, before anything of ours is imported; then uses a store."""


@pytest.mark.parametrize("kind", StoreKind, ids=lambda kind: kind.value)
def test_a_store_keeps_pages_where_only_linux_calls_are_missing(kind: StoreKind, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind.value, str(tmp_path / "store")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
