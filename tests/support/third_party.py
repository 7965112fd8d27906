"""Stores of third parties that go wrong, by URL: ``tests.support.third_party:NAME``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from unified_cache.core.seal import Label
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Capability, Contents, Scan, Store

OWNER = bytes(32)


def of_one(rest: str) -> MemoryStorage:
    return MemoryStorage()


def away(rest: str, _bytes_max: int | None) -> Store:
    raise ConnectionError(f"nobody at {rest}")


class Plain(MemoryStorage):
    """Names one identity and counts nothing."""

    def __init__(self, rest: str, _bytes_max: int | None) -> None:
        super().__init__()

    def manifests(self) -> dict[bytes, Manifest | None]:
        return {OWNER: None}

    def contents(self, identity: bytes) -> Contents | None:
        return None


class Speechless(Plain):
    def capability(self) -> Capability:
        return cast("Capability", None)


class Confused(Plain):
    def capability(self) -> Capability:
        return replace(super().capability(), bytes_max=cast("int", "12"))


class Failing(Plain):
    def capability(self) -> Capability:
        raise RuntimeError("no capability")


class NoManifests(Plain):
    def manifests(self) -> dict[bytes, Manifest | None]:
        return {b"x": cast("Manifest", 5)}


class NoScan(Plain):
    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        return cast("Scan", None)


class NoCount(Plain):
    def remove(self, labels: Sequence[Label]) -> int:
        super().remove(labels)
        return cast("int", None)


class NoClose(Plain):
    def close(self) -> None:
        raise KeyError("no close")


class ShortLengths(Plain):
    def capability(self) -> Capability:
        return replace(super().capability(), durable=True)

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        return super().lengths(labels)[1:]
