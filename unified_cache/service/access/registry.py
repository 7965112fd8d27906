"""Whose pages this server takes: identities by tenant, each with its layout, and what the store calls it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock

import grpc

from unified_cache.errors import InputError, StorageError
from unified_cache.pool import ModelLayout
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import FORMAT_VERSION, HEADER_BYTES, Label
from unified_cache.service.access.errors import Refused
from unified_cache.service.settings import LimitSettings
from unified_cache.storage_backends.manifest import described_by, manifest_of
from unified_cache.wire.calls import REASON, REASON_HELLO
from unified_cache.wire.layouts import differences

__all__ = ["Registration", "Registry"]

POOLS_MAX = 256
"""Pools of one layout; the largest published one has eight."""

TEXT_CHARS_MAX = 256
"""Names of models, revisions, dtypes, shards and components."""

_TEXT = re.compile(r"[^\x00-\x1f\x7f]*")


@dataclass(frozen=True, slots=True)
class Registration:
    """One identity of one tenant."""

    manifest: Manifest
    """As the client has it."""
    layout: ModelLayout
    object_bytes: Mapping[str, int]
    """Length of a page by pool, header included; pools without bytes have no objects."""
    stored: Manifest
    """The same for the store: the model's name holds the tenant, so that no two tenants share a digest."""
    vocabulary: int
    """One more than the largest token id; 0 where nobody said."""

    def scoped(self, label: Label) -> Label:
        """Return what the store calls a page.

        Raises:
            InputError: the layout has no such pool, or no objects in it.
        """
        if label.pool not in self.object_bytes:
            raise InputError(f"a pool is one of {', '.join(self.object_bytes)}, found {label.pool!r}")
        return label._replace(identity=self.stored.identity)

    def plain(self, label: Label) -> Label:
        """Return what the client calls a page that the store lists."""
        return label._replace(identity=self.manifest.identity)


class Registry:
    """Remember who said Hello for what. A model's name, revision and shard mean one layout within a tenant.

    Thread-safe. Lost with the process: clients say Hello again.
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits
        self._known: dict[str, dict[bytes, Registration]] = {}
        self._guard = Lock()

    def add(self, tenant: str, manifest: Manifest, vocabulary: int) -> Registration:
        """Check a manifest and remember it; idempotent.

        Raises:
            Refused: it makes no sense, it differs from what is registered under that name, or there are too many.
        """
        registration = self._checked(tenant, manifest, vocabulary)
        with self._guard:
            known = self._known.setdefault(tenant, {})
            for other in known.values():
                if _name(other.manifest) == _name(manifest) and other.manifest.identity != manifest.identity:
                    raise Refused(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"model {manifest.model!r} is registered with another layout; "
                        + "; ".join(differences(other.manifest, manifest)),
                    )
            if manifest.identity not in known and len(known) >= self._limits.identities_max:
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"a tenant has at most {self._limits.identities_max} identities"
                )
            known[manifest.identity] = registration
            return registration

    def find(self, tenant: str, identity: bytes) -> Registration:
        """Return what a tenant registered.

        Raises:
            Refused: it did not, or not with this process.
        """
        with self._guard:
            registration = self._known.get(tenant, {}).get(identity)
        if registration is None:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, "say Hello for this identity first", [(REASON, REASON_HELLO)]
            )
        return registration

    def of(self, tenant: str) -> list[Registration]:
        """Return all that a tenant registered."""
        with self._guard:
            return list(self._known.get(tenant, {}).values())

    def forget(self, tenant: str, identity: bytes) -> None:
        """Forget an identity, so that its name may mean another layout."""
        with self._guard:
            self._known.get(tenant, {}).pop(identity, None)

    def _checked(self, tenant: str, manifest: Manifest, vocabulary: int) -> Registration:
        if manifest.format_version != FORMAT_VERSION:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"format version: expected {FORMAT_VERSION}, found {manifest.format_version}",
            )
        texts = [manifest.model, manifest.revision, manifest.dtype, manifest.shard]
        texts += [component.name for component in manifest.components]
        if not manifest.model or not all(len(text) <= TEXT_CHARS_MAX and _TEXT.fullmatch(text) for text in texts):
            raise InputError(f"names in a manifest are printable and at most {TEXT_CHARS_MAX} long; a model has one")
        if sum(len(component.pools) for component in manifest.components) > POOLS_MAX:
            raise InputError(f"a layout has at most {POOLS_MAX} pools")
        try:
            described = described_by(manifest)
        except StorageError as error:
            raise InputError(str(error)) from error
        layout = described.layout
        object_bytes = {pool.name: HEADER_BYTES + pool.page_bytes for pool in layout.pools if pool.page_bytes}
        if max(object_bytes.values(), default=0) > self._limits.page_bytes_max:
            raise InputError(f"a page has at most {self._limits.page_bytes_max} bytes in one pool")
        # No tenant's name has a slash, so where the model begins is certain.
        scoped = replace(described.identity, model=f"@{tenant}/{described.identity.model}")
        return Registration(manifest, layout, object_bytes, manifest_of(scoped, layout), vocabulary)


def _name(manifest: Manifest) -> tuple[str, str, str]:
    return manifest.model, manifest.revision, manifest.shard
