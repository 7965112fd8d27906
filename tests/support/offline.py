"""Stores that outlive a cache, filled by caches with real bytes, on every kind of component set."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.support.cache import ToyEngine, toy_layout, with_toy_tensors
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import Label
from unified_cache.core.window import SPAN_ALL
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import Description
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store, StoredObject
from unified_cache.testing.storage_contract import listing

PAGE_SIZE = 8
PAGES = 12
"""Of the prompts that are served here."""

TOY = Identity("toy")
"""As ``ToyEngine`` has it."""

LAYOUTS: Mapping[str, ModelLayout] = {
    "full": toy_layout((SPAN_ALL,), PAGE_SIZE),
    "full_swa": toy_layout((SPAN_ALL, 2), PAGE_SIZE),
    "full_mamba": toy_layout((SPAN_ALL, 1), PAGE_SIZE),
    "full_swa_mamba": toy_layout((SPAN_ALL, 3, 1), PAGE_SIZE),
    "deepseek_v4": with_toy_tensors(
        ModelLayout(
            PAGE_SIZE,
            (
                Component("full", SPAN_ALL, (PoolSpec("kv", 0), PoolSpec("c4", 96), PoolSpec("c128", 40))),
                Component("swa", 2, (PoolSpec("swa", 64), PoolSpec("c4_state", 32)), mapped=True),
            ),
        )
    ),
}


class ListedMemory(MemoryStorage):
    """A memory store of a third party's: it keeps manifests, and its pages until the test ends."""

    def __init__(self, bytes_max: int | None = None) -> None:
        super().__init__(bytes_max)
        self._manifests: dict[bytes, Manifest | None] = {}

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        super().register(manifest, slabs)
        self._manifests[manifest.identity] = manifest

    def manifests(self) -> dict[bytes, Manifest | None]:
        return dict(self._manifests)

    def close(self) -> None:
        """Stay: whoever opens it again by its name finds its pages."""


_MEMORIES: dict[str, ListedMemory] = {}


def shared(rest: str, bytes_max: int | None) -> ListedMemory:
    """Open the memory store of that name, as ``tests.support.offline:shared:NAME``."""
    return _MEMORIES.setdefault(rest, ListedMemory(bytes_max))


STORE_KINDS = ("memory", "file", "packed")
"""What ``open_store`` opens."""


def url_of(kind: str, path: Path) -> str:
    return f"tests.support.offline:shared:{path}" if kind == "memory" else f"{kind}:{path}"


def open_store(kind: str, path: Path) -> Store:
    match kind:
        case "file":
            return FileStorage.open(path)
        case "packed":
            return PackedStorage.open(path)
    return shared(str(path), None)


def description_of(layout: ModelLayout) -> Description:
    return Description(TOY, layout)


def prompt_of(seed: int, pages: int = PAGES) -> Prompt:
    tokens = np.random.default_rng(seed).integers(0, 1000, pages * PAGE_SIZE)
    return Prompt.of(tokens, PAGE_SIZE, whole=True)


def engine_on(storage: Store, layout: ModelLayout) -> ToyEngine:
    sizes = tuple(2 * PAGES for _ in layout.components)
    return ToyEngine(layout, sizes, sizes, storage, None)


def fill(storage: Store, layout: ModelLayout, prompts: Sequence[Prompt]) -> None:
    """Serve prompts and store what was computed; the store is closed afterwards."""
    toy = engine_on(storage, layout)
    for prompt in prompts:
        back_up(toy, prompt)
    assert toy.cache.close() == []


def back_up(toy: ToyEngine, prompt: Prompt) -> None:
    """Serve a prompt, and back it up as far as there are tiers."""
    lock = toy.serve(prompt)
    assert lock is not None
    toy.cache.backup(prompt)
    assert all(operation.error is None for operation in toy.cache.wait_all(60))
    toy.cache.release(lock)


def read_back(toy: ToyEngine, prompt: Prompt) -> tuple[int, int]:
    """Bring a prompt up from wherever it lies, and compare every byte; return its pages, and those compared."""
    for start in (toy.cache.prefetch, toy.cache.load):
        start(prompt)
        assert all(operation.error is None for operation in toy.cache.wait_all(60))
    lock = toy.cache.lock(toy.cache.match(prompt))
    found = lock.end, toy.verify(prompt, lock)
    toy.cache.release(lock)
    toy.cache.check()
    return found


def restored_pages(storage: Store, layout: ModelLayout, prompt: Prompt) -> int:
    """Tell how far a fresh cache restores a prompt from a store, every byte compared; the store is closed."""
    toy = engine_on(storage, layout)
    restored, _ = read_back(toy, prompt)
    assert toy.cache.close() == []
    return restored


def objects_of(storage: Store, layout: ModelLayout) -> dict[Label, bytes]:
    """Read everything that a store holds of the toy model."""
    found = {known.label: bytearray(known.object_bytes) for known in listing(storage, TOY.digest(layout))}
    assert all(storage.get([PageIO(label, (memoryview(page),)) for label, page in found.items()]))
    return {label: bytes(page) for label, page in found.items()}


def replace(storage: Store, label: Label, content: bytes) -> None:
    """Put other bytes in the place of an object."""
    storage.remove([label])
    assert storage.put([PageIO(label, (memoryview(bytearray(content)),))], Level.CACHED) == [Answer.STORED]


def flip(storage: Store, found: StoredObject) -> None:
    """Flip the last bit of an object's payload."""
    content = bytearray(found.object_bytes)
    assert storage.get([PageIO(found.label, (memoryview(content),))]) == [Answer.HIT]
    content[-1] ^= 1
    replace(storage, found.label, bytes(content))
