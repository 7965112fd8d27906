"""A backend that moves no bytes: what a prompt costs the engine itself, whatever the store is."""

# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, PoolTransfer, PoolTransferResult

__all__ = ["NoBytesBackend"]


class NoBytesBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Knows which pages were stored, and says that they came back, with whatever the pools hold."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object]) -> None:
        self._keys: set[str] = set()

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        stored = [key in self._keys for key in keys]
        return stored.index(False) if False in stored else len(stored)

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        pages = self.batch_exists(keys)
        reach = {str(transfer.name): pages for transfer in pool_transfers or ()}
        return PoolTransferResult(pages, reach, list(range(1, pages + 1)))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return [True] * len(keys)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self._keys.update(keys)
        return [True] * len(keys)

    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return {transfer.name: [True] * len(transfer.keys or ()) for transfer in transfers}

    batch_set_v2 = batch_get_v2

    def exists(self, key: str) -> bool:
        return key in self._keys

    # The interface before both generations, which zero-copy backends are not asked by.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return None

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False
