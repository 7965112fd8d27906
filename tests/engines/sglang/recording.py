"""Calls of the real engine on its storage, kept as JSON, so that tests without the engine can make them again.

Keys and places of pages are kept, their bytes are not: who replays makes them up by pool and key.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.storage import StorageBackendFactory

MOVES = ("batch_get_v1", "batch_set_v1", "batch_get_v2", "batch_set_v2")


class Recording:
    """Calls on one storage, in the order in which they ended."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._calls: list[dict[str, Any]] = []
        self._pools: dict[str, dict[str, Any]] = {}
        self._config: dict[str, Any] = {}

    def listen(self) -> None:
        """Record every storage that the engine makes from now on."""
        make = StorageBackendFactory.create_backend

        def make_and_listen(name: str, config: Any, *args: Any, **options: Any) -> Any:
            backend = make(name, config, *args, **options)
            self._config = {key: value for key, value in vars(config).items() if key != "extra_config"}
            for method in ("register_mem_pool_host", "register_mem_host_pool_v2"):
                self._wrap(backend, method, self._pool)
            for method in ("batch_exists", "batch_exists_v2"):
                self._wrap(backend, method, self._look_up)
            for method in MOVES:
                self._wrap(backend, method, self._move)
            return backend

        StorageBackendFactory.create_backend = make_and_listen

    def save(self, path: Path, stack: str) -> None:
        """Write what was recorded, one call a line."""
        head = {"stack": stack, "config": self._config, "pools": self._pools, "keys": list(self._keys)}
        lines = [json.dumps(head)[:-1] + ', "calls": [', ",\n".join(json.dumps(call) for call in self._calls), "]}"]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _wrap(self, backend: Any, method: str, note: Callable[..., dict[str, Any]]) -> None:
        original = vars(type(backend))[method]

        def call(*args: Any, **options: Any) -> Any:
            said = original(backend, *args, **options)
            self._calls.append({"call": method, **note(said, *args, **options)})
            return said

        vars(backend)[method] = call

    def _pool(self, said: Any, pool: Any, name: Any = "kv") -> dict[str, Any]:
        located = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        self._pools[str(name)] = {
            "kind": type(pool).__name__,
            "layout": pool.layout,
            "page_size": pool.page_size,
            "slots": pool.size // pool.page_size,
            "buffers": 0 if located is None else len(located[1]),
        }
        return {"pool": str(name)}

    def _look_up(self, said: Any, keys: Sequence[str], transfers: Any = None, extra: Any = None) -> dict[str, Any]:
        noted: dict[str, Any] = {"keys": self._numbers(keys)}
        if isinstance(said, int):
            return noted | {"said": said}
        found = {str(pool): pages for pool, pages in said.extra_pool_hit_pages.items()}
        noted["transfers"] = [self._transfer(transfer, {}) for transfer in transfers or ()]
        return noted | {"said": [said.kv_hit_pages, found, said.restorable_prefix_pages]}

    def _move(self, said: Any, what: Any, indices: Any = None, extra: Any = None, **options: Any) -> dict[str, Any]:
        extra = options.get("extra_info", indices if not isinstance(indices, torch.Tensor) else extra)
        prefix = None if extra is None or not extra.prefix_keys else self._numbers(extra.prefix_keys[-1:])[0]
        if isinstance(indices, torch.Tensor):
            return {
                "keys": self._numbers(what),
                "indices": indices.tolist()[:: self._page("kv")],
                "prefix": prefix,
                "said": list(said),
            }
        places: dict[int, int] = {}
        transfers = [self._transfer(transfer, places) for transfer in what]
        return {
            "transfers": transfers,
            "prefix": prefix,
            "said": {str(pool): list(done) for pool, done in said.items()},
        }

    def _transfer(self, transfer: Any, places: dict[int, int]) -> dict[str, Any]:
        pool = str(transfer.name)
        noted: dict[str, Any] = {
            "pool": pool,
            "policy": transfer.hit_policy.value,
            "from": transfer.indices_from_pool and str(transfer.indices_from_pool),
        }
        if transfer.keys is not None:
            noted["keys"] = (
                len(transfer.keys) if transfer.keys[:1] == ["__placeholder__"] else self._numbers(transfer.keys)
            )
        if transfer.host_indices is not None:
            noted["place"] = places.setdefault(id(transfer.host_indices), len(places))
            noted["indices"] = transfer.host_indices.tolist()[:: self._page(pool)]
        return noted

    def _page(self, pool: str) -> int:
        return int(self._pools[pool]["page_size"])

    def _numbers(self, keys: Sequence[str]) -> list[int]:
        return [self._keys.setdefault(key, len(self._keys)) for key in keys]
