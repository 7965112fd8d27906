"""The stores of LMCache 0.5.6, for ``benchmarks.lmcache``: ``KIND ROOT PAGE_BYTES PAGES``, run by its own Python."""

# pyright: reportMissingImports=false
import asyncio
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from benchmarks.lmcache_child import (
    BATCH_PAGES,
    WAIT_S,
    Found,
    PageStore,
    digest_of,
    free_port,
    serve,
    serve_beside,
)

_T = TypeVar("_T")


class NativeFiles:
    """``fs_native``, the C++ reader and writer of files below ``lmcache server``."""

    server = None

    def __init__(self, root: str, page_bytes: int) -> None:
        shape = torch.Size([2, 1, 16, page_bytes // 64])
        memory = MixedMemoryAllocator(max(64 << 20, 3 * BATCH_PAGES * page_bytes))
        self._layout = MemoryLayoutDesc([shape], [torch.bfloat16])
        config = get_l2_adapter_config_class("fs_native").from_dict({"type": "fs_native", "base_path": root})
        self._adapter = create_l2_adapter(config)
        taken = [memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(2 * BATCH_PAGES)]
        self._from, self._to = taken[:BATCH_PAGES], taken[BATCH_PAGES:]
        self.sources = [memoryview(each.byte_array).cast("B") for each in self._from]

    def put(self, pages: Sequence[int]) -> None:
        self._adapter.submit_store_task([self._keyed(page) for page in pages], self._from[: len(pages)])
        done = self._done(self._adapter.get_store_event_fd(), self._adapter.pop_completed_store_tasks)
        assert all(each.is_successful() for each in done.values())

    def get(self, pages: Sequence[int]) -> Found:
        objects = self._to[: len(pages)]
        task = self._adapter.submit_load_task([self._keyed(page) for page in pages], objects)
        found = self._done(
            self._adapter.get_load_event_fd(), lambda: self._adapter.query_load_result(task)
        ).get_indices_list()
        return [
            memoryview(each.byte_array).cast("B") if number in found else None for number, each in enumerate(objects)
        ]

    def exists(self, pages: Sequence[int]) -> int:
        keys = [self._keyed(page) for page in pages]
        task = self._adapter.submit_lookup_and_lock_task(keys, {0: self._layout})
        fd = self._adapter.get_lookup_and_lock_event_fd()
        found = self._done(fd, lambda: self._adapter.query_lookup_and_lock_result(task))
        self._adapter.submit_unlock(keys)
        return int(found.popcount())

    def _keyed(self, page: int) -> ObjectKey:
        return ObjectKey(digest_of(page), "bench", ObjectKey.ComputeKVRank(1, 0, 1, 0), 0, "")

    def _done(self, fd: int, ask: Callable[[], _T | None]) -> _T:
        end_s = time.monotonic() + WAIT_S
        while not (found := ask()):
            assert select.select([fd], [], [], end_s - time.monotonic())[0], "LMCache did not answer in time"
            os.read(fd, 8)
        return found


class LocalDisk:
    """``local_disk``, the documented disk tier of LMCache in an engine's process; or ``lm://``, its Python server."""

    def __init__(self, root: str, page_bytes: int, port: int | None = None) -> None:
        self.server = None
        if port is not None:
            command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
            self.server = serve_beside(command, port)
        heads = page_bytes // 64
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, (1, 2, 16, 1, heads), chunk_size=16)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=16,
            local_cpu=False,
            max_local_cpu_size=max(0.1, 4 * BATCH_PAGES * page_bytes / 2**30),
            local_disk=root,
            max_local_disk_size=16.0,
            **({} if port is None else {"remote_url": f"lm://127.0.0.1:{port}", "remote_serde": "naive"}),
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        if port is None:
            self._disk = LocalDiskBackend(config, loop, memory, dst_device="cpu", metadata=metadata)
        else:
            self._disk = RemoteBackend(config, metadata, loop, memory, dst_device="cpu")
        shape = torch.Size([2, 1, 16, heads])
        self._from = [memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(BATCH_PAGES)]
        self.sources = [memoryview(each.byte_array).cast("B") for each in self._from]
        self._held: list[MemoryObj] = []

    def put(self, pages: Sequence[int]) -> None:
        done = threading.Semaphore(0)
        keys, objects = [self._keyed(page) for page in pages], self._from[: len(pages)]
        self._disk.batched_submit_put_task(keys, objects, on_complete_callback=lambda _key: done.release())
        assert all(done.acquire(timeout=WAIT_S) for _ in pages)

    def get(self, pages: Sequence[int]) -> Found:
        for each in self._held:
            each.ref_count_down()
        found = self._disk.batched_get_blocking([self._keyed(page) for page in pages])
        self._held = [each for each in found if each is not None]
        return [None if each is None else memoryview(each.byte_array).cast("B") for each in found]

    def exists(self, pages: Sequence[int]) -> int:
        return sum(self._disk.contains(self._keyed(page)) for page in pages)

    def _keyed(self, page: int) -> CacheEngineKey:
        return CacheEngineKey("bench", 1, 0, int.from_bytes(digest_of(page)[:8], "big"), torch.bfloat16)


if __name__ == "__main__":
    kind, root, page_bytes, pages = sys.argv[1:]
    opened: PageStore
    if kind == "fs_native":
        opened = NativeFiles(root, int(page_bytes))
    else:
        opened = LocalDisk(root, int(page_bytes), free_port() if kind == "lm" else None)
    serve(opened, Path(root), int(page_bytes), int(pages))
