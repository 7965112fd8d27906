"""The manifest of an identity in a cluster: protobuf as JSON, in an object beside the pages."""

import re
from collections.abc import Callable, Iterable, Mapping
from threading import Lock

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from unified_cache.errors import StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.mooncake.client import MooncakeClient

__all__ = ["ManifestObjects", "identity_in"]

MANIFEST_NAME = "manifest.json"

MANIFEST_BYTES_MAX = 1 << 20
"""A larger manifest is not one of ours."""

_OWNED_NAME = re.compile(r"([0-9a-f]{64})/.*", re.DOTALL)


def identity_in(name: str) -> bytes | None:
    """Return whose object a key names; None where it is nobody's of ours."""
    found = _OWNED_NAME.fullmatch(name)
    return bytes.fromhex(found[1]) if found else None


class ManifestObjects:
    """Keeps the manifests of the identities that this process registered. Thread-safe.

    They are pinned, so they are never evicted. They go with the node that holds them, or with the master; so whoever
    writes pages looks for them, and puts them again.
    """

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._kept: dict[bytes, Manifest] = {}
        self._single: set[bytes] = set()
        self._guard = Lock()

    def keep(self, manifest: Manifest) -> None:
        """Put a manifest beside its pages, unless the same is there.

        Raises:
            StorageError: what is there says something else under the same digest, or a fault.
        """
        name = _name_of(manifest.identity)
        found = self.read(manifest.identity)
        if found is None:
            self._put(name, MessageToJson(manifest).encode())
            found = self.read(manifest.identity)
        if found is None:
            raise StorageError(f"{name} was put and is not there; is the cluster full?", retryable=True)
        if found != manifest:
            raise StorageError(f"{name} describes another identity or layout under the same digest", retryable=False)
        with self._guard:
            self._kept[manifest.identity] = manifest
            if sum(pool.page_bytes > 0 for component in manifest.components for pool in component.pools) == 1:
                self._single.add(manifest.identity)

    def are_single(self, identities: set[bytes]) -> bool:
        """Tell whether every page of these identities is one object, whatever its component."""
        return identities <= self._single

    def names(self, identities: Iterable[bytes]) -> list[str]:
        """Name the manifests that pages of these identities should have beside them."""
        return [_name_of(identity) for identity in identities if identity in self._kept]

    def put_again(self, names: Iterable[str]) -> None:
        """Put manifests that are gone."""
        kept: Mapping[str, Manifest] = {_name_of(identity): manifest for identity, manifest in self._kept.items()}
        for name in names:
            self._put(name, MessageToJson(kept[name]).encode())

    def read(self, identity: bytes) -> Manifest | None:
        """Return the manifest of an identity; None where there is none.

        Raises:
            StorageError: there is something else in its place, or it cannot be read now.
        """
        name = _name_of(identity)
        location = self._client.locate([name]).get(name)
        if location is None:
            return None
        text = bytearray(min(location.object_bytes, MANIFEST_BYTES_MAX) or MANIFEST_BYTES_MAX)
        (code,) = self._with_registered(text, lambda pointer: self._client.get([name], [pointer], [len(text)]))
        if code <= 0:
            raise StorageError(f"{name} is there and cannot be read (code {code})", retryable=True)
        try:
            return Parse(bytes(text[:code]), Manifest())
        except (ParseError, UnicodeDecodeError) as error:
            raise StorageError(
                f"{name} must hold a manifest, found something else: {error}", retryable=False
            ) from error

    def _put(self, name: str, text: bytes) -> None:
        config = self._client.put_config(pinned=True)
        self._with_registered(bytearray(text), lambda pointer: self._client.put([name], [pointer], [len(text)], config))

    def _with_registered(self, memory: bytearray, call: Callable[[int], list[int]]) -> list[int]:
        """Make a call over memory that is registered for its length."""
        region = self._client.register(memoryview(memory))
        try:
            return call(region[0])
        finally:
            self._client.unregister(region)


def _name_of(identity: bytes) -> str:
    return f"{identity.hex()}/{MANIFEST_NAME}"
