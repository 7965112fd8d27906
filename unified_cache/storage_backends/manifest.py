"""What a store is told about the pages of one identity, so that a tool can read it without an engine."""

from unified_cache.pool import Identity, ModelLayout
from unified_cache.proto.manifest_pb2 import Component, Manifest, Pool
from unified_cache.seal import FORMAT_VERSION

__all__ = ["manifest_of"]


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
