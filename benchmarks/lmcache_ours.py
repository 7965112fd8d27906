"""A store of ours as an engine's adapter uses it, for ``benchmarks.lmcache``: ``KIND ROOT PAGE_BYTES PAGES``."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lmcache_child import BATCH_PAGES, WAIT_S, Found, digest_of, serve
from unified_cache import Full, Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import Label
from unified_cache.integrations.engine_store import EnginePage, EngineStore


class OurStore:
    """A store of ours as an engine's adapter uses it: sealed, verified, each call with a deadline."""

    def __init__(self, url: str, page_bytes: int) -> None:
        layout = ModelLayout(16, (Full((PoolSpec("kv", page_bytes),)),))
        identity = Identity("bench", dtype="bf16")
        self._store = EngineStore.open(url)
        self._store.register(identity, layout)
        self._digest = identity.digest(layout)
        self.sources = [memoryview(bytearray(page_bytes)) for _ in range(BATCH_PAGES)]
        self._rows = [memoryview(bytearray(page_bytes)) for _ in range(BATCH_PAGES)]
        end_s = time.monotonic() + WAIT_S
        while not self._store.is_up:
            assert time.monotonic() < end_s
            time.sleep(0.01)

    def put(self, pages: Sequence[int]) -> None:
        assert all(self._store.put(self._engine_pages(pages, self.sources))), self._store.counts()

    def get(self, pages: Sequence[int]) -> Found:
        answers = self._store.get(self._engine_pages(pages, self._rows))
        return [row if answer else None for row, answer in zip(self._rows, answers, strict=True)]

    def exists(self, pages: Sequence[int]) -> int:
        return sum(map(bool, self._store.exists([self._labelled(page) for page in pages])))

    def _engine_pages(self, pages: Sequence[int], rows: Sequence[memoryview]) -> list[EnginePage]:
        return [EnginePage(self._labelled(page), (row,)) for page, row in zip(pages, rows, strict=True)]

    def _labelled(self, page: int) -> Label:
        return Label(self._digest, digest_of(page), "kv")


if __name__ == "__main__":
    kind, root, page_bytes, pages = sys.argv[1:]
    serve(OurStore(f"{kind}:{root}", int(page_bytes)), Path(root), int(page_bytes), int(pages))
