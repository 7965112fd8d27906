"""Engines over a directory that they may not write: they read it, and nothing in it changes."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster import ask
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill, restored_pages
from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import label, sealed_page

LAYOUT = LAYOUTS["full_swa_mamba"]
PROMPT = Prompt.of(np.random.default_rng(1).integers(0, 1000, PAGES * PAGE_SIZE).tolist(), PAGE_SIZE, whole=True)
NOBODY = 65534


@contextmanager
def without_rights() -> Iterator[None]:
    """Be nobody, where we are root: root may write everywhere."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory that everybody may come into."""
    place = Path(tempfile.mkdtemp(prefix="unified-cache-read-alone-"))
    place.chmod(0o755)
    yield place
    for path in (place, *place.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(place)


def test_a_directory_without_a_store_that_may_not_be_written_is_refused_for_that(directory: Path) -> None:
    (directory / "store").mkdir()
    sealed_off(directory / "store")
    with without_rights(), pytest.raises(StorageError, match="Permission denied"):
        open_storage(f"file:{directory / 'store'}")


def sealed_off(store: Path) -> dict[Path, tuple[int, int]]:
    """Take the rights to write from a store that belongs to nobody; return the times and sizes of all in it."""
    found = [store, *store.rglob("*")]
    for path in found:
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        path.chmod(0o500 if path.is_dir() else 0o400)
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


@pytest.mark.parametrize("coding", ["", "#compress=lossless&keys=env:PAGE_KEYS"], ids=["plain", "coded"])
@pytest.mark.parametrize("kind", ["file", "packed"])
def test_a_cache_restores_its_prompts_from_a_directory_that_it_may_not_write(
    kind: str, coding: str, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PAGE_KEYS", f"* {'3d' * 32}")
    url = f"{kind}:{directory / 'store'}{coding}"
    other = f"file:{directory / 'other'}"
    for each in (url, other):
        fill(open_storage(each), LAYOUT, [PROMPT])
    sealed_off(directory / "other")
    before = sealed_off(directory / "store")
    with without_rights():
        assert restored_pages(open_storage(url), LAYOUT, PROMPT) == PAGES
        with closing(open_storage(url)) as storage:
            assert storage.put([sealed_page(label(1))], Level.CACHED) == [Answer.DECLINED]
            storage.touch([label(1)])
            assert storage.remove([label(1)]) == 0
            with pytest.raises(StorageError, match="may not be written"):
                storage.clear(label(1).identity)
        said = [each for each in caplog.records if each.name.startswith("unified_cache.storage_backends")]
        assert len(said) == 2, "once for each opening"
        assert ask("backup", other, url).status == 1, "a tool that is to write does not read"
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in before} == before
