"""What a store is told about the pages of one identity, so that a tool can read it without an engine."""

from dataclasses import dataclass, replace

from unified_cache.errors import LayoutError, StorageError
from unified_cache.pool import HitPolicy, Identity, ModelLayout, PoolSpec
from unified_cache.proto.manifest_pb2 import Component, Manifest, Pool
from unified_cache.seal import FORMAT_VERSION
from unified_cache.window import SPAN_ALL

__all__ = ["Description", "StoredComponent", "described_by", "manifest_of"]


@dataclass(frozen=True, slots=True)
class StoredComponent:
    """A component as a manifest describes it: enough for windows and objects, nothing of how an engine maps slots."""

    name: str
    span: int
    pools: tuple[PoolSpec, ...]
    mapped: bool = False
    """Never: slots are an engine's matter, no manifest speaks of them."""

    @property
    def hit_policy(self) -> HitPolicy:
        """The span in storage's words."""
        return HitPolicy.ALL_PAGES if self.span == SPAN_ALL else HitPolicy.TRAILING_PAGES

    def check_page_size(self, page_size: int) -> None:
        """Accept any: the manifest stands under the digest of span and page size together."""

    def with_pools(self, pools: tuple[PoolSpec, ...]) -> "StoredComponent":
        """Return the same component over other pools."""
        return replace(self, pools=pools)


@dataclass(frozen=True, slots=True)
class Description:
    """A manifest as values: whose pages these are, and what a page consists of."""

    identity: Identity
    layout: ModelLayout


def manifest_of(identity: Identity, layout: ModelLayout) -> Manifest:
    """Describe an identity and its layout field by field, under the digest that names both."""
    return Manifest(
        format_version=FORMAT_VERSION,
        identity=identity.digest(layout),
        model=identity.model,
        revision=identity.revision,
        dtype=identity.dtype,
        shard=identity.shard,
        page_size=layout.page_size,
        components=[
            Component(
                name=component.name,
                span=component.span,
                pools=[Pool(name=pool.name, page_bytes=pool.page_bytes) for pool in component.pools],
            )
            for component in layout.components
        ],
    )


def described_by(manifest: Manifest) -> Description:
    """Return what a manifest says: the inverse of ``manifest_of``, checked against the digest that it stands under.

    Raises:
        StorageError: pages of another format, a layout that makes no sense, or one that has another digest.
    """
    name = f"the manifest of identity {manifest.identity.hex()}"
    if manifest.format_version != FORMAT_VERSION:
        raise StorageError(
            f"{name} must say format version {FORMAT_VERSION}, found {manifest.format_version}; "
            f"use the version that wrote it",
            retryable=False,
        )
    try:
        components = tuple(
            StoredComponent(
                component.name, component.span, tuple(PoolSpec(pool.name, pool.page_bytes) for pool in component.pools)
            )
            for component in manifest.components
        )
        layout = ModelLayout(manifest.page_size, components)
    except LayoutError as error:
        raise StorageError(f"{name} must describe a layout: {error}", retryable=False) from error
    identity = Identity(manifest.model, manifest.revision, manifest.dtype, manifest.shard)
    if identity.digest(layout) != manifest.identity:
        raise StorageError(
            f"{name} must have that digest, found one of {identity.digest(layout).hex()}", retryable=False
        )
    return Description(identity, layout)
