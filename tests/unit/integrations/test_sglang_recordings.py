"""Calls that SGLang 0.5.23 made on its storage, made again: every answer as then, every page's bytes as stored.

``python -m tests.engines.sglang.record`` makes the recordings.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sglang_names import (
    HeadsPool,
    LogicalPool,
    PoolNames,
    SglangConfig,
    SglangExtraInfo,
    SglangTransfer,
    StatesPool,
    TensorPool,
    adapter_class,
)

RECORDINGS = sorted((Path(__file__).parent / "sglang_recordings").glob("*.json"))
BUFFER_BYTES = 24
"""A page's buffers here; the engine's are larger, and as many."""


class Replay:
    """One recording, over a store."""

    def __init__(self, recording: Mapping[str, Any], cls: type, url: str) -> None:
        self.calls: Sequence[Mapping[str, Any]] = recording["calls"]
        self.keys: Sequence[str] = recording["keys"]
        self.pools = {name: _pool(pool) for name, pool in recording["pools"].items()}
        extra = {"interface_v1": 1, "url": url, "revision": "recorded"}
        self.storage = cls(SglangConfig(**recording["config"], extra_config=extra), {})
        self.checked = 0

    def run(self) -> None:
        for number, call in enumerate(self.calls):
            method = call["call"]
            if method == "register_mem_pool_host":
                self.storage.register_mem_pool_host(self.pools[call["pool"]])
            elif method == "register_mem_host_pool_v2":
                self.storage.register_mem_host_pool_v2(self.pools[call["pool"]], PoolNames(call["pool"]))
            else:
                said = {"batch_exists": self._exists, "batch_exists_v2": self._exists_v2}.get(method, self._move)(call)
                assert said == call["said"], f"call {number}, {method}"

    def _exists(self, call: Mapping[str, Any]) -> object:
        return self.storage.batch_exists(self._hashes(call["keys"]))

    def _exists_v2(self, call: Mapping[str, Any]) -> object:
        transfers = [self._transfer(noted, {}) for noted in call["transfers"]]
        found = self.storage.batch_exists_v2(self._hashes(call["keys"]), transfers)
        return [found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages]

    def _move(self, call: Mapping[str, Any]) -> object:
        noted = call.get("transfers") or [{"pool": "kv", "keys": call["keys"], "indices": call["indices"]}]
        is_get = "get" in call["call"]
        for each in noted:
            for key, index in zip(each["keys"], each["indices"], strict=True):
                self._fill(each["pool"], index, None if is_get else key)
        prefix = None if call["prefix"] is None else [self.keys[call["prefix"]]]
        said: Any
        if "transfers" in call:
            places: dict[int, torch.Tensor] = {}
            transfers = [self._transfer(each, places) for each in noted]
            found = vars(type(self.storage))[call["call"]](self.storage, transfers, SglangExtraInfo(prefix))
            said = {str(pool): done for pool, done in found.items()}
        else:
            indices = self._indices("kv", call["indices"])
            arguments = (self._hashes(call["keys"]), indices, SglangExtraInfo(prefix))
            said = vars(type(self.storage))[call["call"]](self.storage, *arguments)
        if is_get:
            for each in noted:
                done = said[each["pool"]] if isinstance(said, dict) else said
                for key, index, hit in zip(each["keys"], each["indices"], done, strict=True):
                    if hit:
                        self._check(each["pool"], index, key)
        return said

    def _transfer(self, noted: Mapping[str, Any], places: dict[int, torch.Tensor]) -> SglangTransfer:
        keys = noted.get("keys")
        hashes = ["__placeholder__"] * keys if isinstance(keys, int) else keys and self._hashes(keys)
        indices = None
        if "indices" in noted:
            indices = places.setdefault(noted["place"], self._indices(noted["pool"], noted["indices"]))
        source = noted["from"] and PoolNames(noted["from"])
        return SglangTransfer(PoolNames(noted["pool"]), indices, hashes, noted["policy"], source)

    def _indices(self, pool: str, starts: Sequence[int]) -> torch.Tensor:
        size = self.pools[pool].page_size
        return (torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(size)).reshape(-1)

    def _hashes(self, numbers: Sequence[int]) -> list[str]:
        return [self.keys[number] for number in numbers]

    def _fill(self, pool: str, index: int, key: int | None) -> None:
        for number, buffer in enumerate(self.pools[pool].buffers):
            buffer[index // self.pools[pool].page_size] = _content(pool, number, key)

    def _check(self, pool: str, index: int, key: int) -> None:
        for number, buffer in enumerate(self.pools[pool].buffers):
            self.checked += 1
            assert torch.equal(buffer[index // self.pools[pool].page_size], _content(pool, number, key))


def _content(pool: str, buffer: int, key: int | None) -> torch.Tensor:
    if key is None:
        return torch.full((BUFFER_BYTES,), 0x5A, dtype=torch.uint8)
    digest = hashlib.sha256(f"{pool} {buffer} {key}".encode()).digest()[:BUFFER_BYTES]
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _pool(noted: Mapping[str, Any]) -> TensorPool:
    kinds = {"LogicalHostPool": LogicalPool, "MHATokenToKVPoolHost": HeadsPool, "MambaPoolHost": StatesPool}
    kind = kinds.get(noted["kind"], TensorPool)
    return kind(noted["slots"], noted["page_size"], [BUFFER_BYTES] * noted["buffers"])


@pytest.fixture(params=RECORDINGS, ids=lambda path: path.stem)
def recording(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    read: Mapping[str, Any] = json.loads(request.param.read_text(encoding="utf-8"))
    return read


@pytest.fixture
def storage_class() -> Iterator[type]:
    with adapter_class({}) as cls:
        yield cls


def test_there_is_a_recording_of_every_kind_of_model() -> None:
    assert {path.stem.partition("_")[0] for path in RECORDINGS} == {"full", "mla", "swa", "dsv4", "mamba"}


@pytest.mark.parametrize("kind", ["file", "packed", "memory"])
def test_the_calls_of_the_engine_are_answered_as_they_were(
    recording: Mapping[str, Any], storage_class: type, kind: str, tmp_path: Path
) -> None:
    replay = Replay(recording, storage_class, "memory:" if kind == "memory" else f"{kind}:{tmp_path}")
    replay.run()
    replay.storage.close()
    assert replay.checked
