"""Manifest: the description of an identity that a store keeps, so that a tool can read its pages without an engine."""

from dataclasses import dataclass, replace

from google.protobuf.json_format import Parse, ParseError

from unified_cache.core.errors import InputError, StorageError
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import FORMAT_VERSION
from unified_cache.core.shards import NamedShard
from unified_cache.proto import manifest_pb2 as proto

MANIFEST_BYTES_MAX = 1 << 20
"""A larger manifest is not one of ours."""

EVERYBODY = "*"
"""Owner of the pages of an engine's own store."""


@dataclass(frozen=True, slots=True)
class Description:
    """A manifest as values: the identity, and the layout of its pages."""

    identity: Identity
    layout: ModelLayout

    def differences(self, other: "Description") -> tuple[str, ...]:
        """Name what another identity has otherwise, in words; engines with both share no page."""
        names = self.identity.differences(other.identity)
        here, there = self.layout.page_size, other.layout.page_size
        if here != there:
            names.append(f"page size ({there} there, {here} here)")
        return tuple(names) or ("layout of its pools",)


def model_of_tenant(tenant: str, model: str) -> str:
    """Return the name under which a service stores pages of a tenant's model, so that no two tenants share a digest."""
    return f"@{tenant}/{model}"


def owner_of(model: str) -> str:
    """Return the owner of the pages of a model, as a service or an engine names it: ``@TENANT``, or everybody."""
    return model.partition("/")[0] if model.startswith("@") else EVERYBODY


def model_without_tenant(model: str) -> str:
    """Return a model's name as its tenant has it. No tenant's name has a slash."""
    return model.partition("/")[2] or model if model.startswith("@") else model


def tenant_of(manifest: proto.Manifest) -> str:
    """Return whose pages a service stores under an identity; empty where they are no tenant's, or nobody can say."""
    tenant, slash, _ = manifest.model.removeprefix("@").partition("/")
    return tenant if manifest.model.startswith("@") and slash and is_sound(manifest, manifest.identity) else ""


def description_for(tenant: str, manifest: proto.Manifest) -> Description | None:
    """Return what a tenant's clients say of an identity in a service; None where it is not the tenant's."""
    if not manifest.model.startswith(model_of_tenant(tenant, "")):
        return None
    described = described_by(manifest)
    model = model_without_tenant(described.identity.model)
    return Description(replace(described.identity, model=model), described.layout)


def manifest_of(identity: Identity, layout: ModelLayout) -> proto.Manifest:
    """Describe an identity and its layout field by field, under the digest that names both."""
    return proto.Manifest(
        format_version=FORMAT_VERSION,
        identity=identity.digest(layout),
        model=identity.model,
        revision=identity.revision,
        dtype=identity.dtype,
        shard=identity.shard.text,
        generation=identity.generation,
        facts=[proto.Fact(name=name, value=value) for name, value in identity.facts],
        page_size=layout.page_size,
        components=[
            proto.Component(
                name=component.name,
                span=component.span,
                pools=[
                    proto.Pool(name=pool.name, page_bytes=pool.page_bytes, tensors=pool.tensors)
                    for pool in component.pools
                ],
                page_size=size if (size := layout.page_size_of(component)) != layout.page_size else 0,
            )
            for component in layout.components
        ],
    )


def described_by(manifest: proto.Manifest) -> Description:
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
            Component(
                component.name,
                component.span,
                tuple(PoolSpec(pool.name, pool.page_bytes, tensors=pool.tensors) for pool in component.pools),
                page_size=component.page_size or None,
            )
            for component in manifest.components
        )
        layout = ModelLayout(manifest.page_size, components)
        identity = Identity(
            manifest.model,
            manifest.revision,
            manifest.dtype,
            NamedShard(manifest.shard),
            manifest.generation,
            tuple((fact.name, fact.value) for fact in manifest.facts),
        )
    except InputError as error:
        raise StorageError(f"{name} must describe a model and its layout: {error}", retryable=False) from error
    if identity.digest(layout) != manifest.identity:
        raise StorageError(
            f"{name} must have that digest, found one of {identity.digest(layout).hex()}", retryable=False
        )
    return Description(identity, layout)


def parsed_manifest(text: bytes) -> proto.Manifest | None:
    """Read a manifest as stores keep it, protobuf's JSON; None where the text is none."""
    try:
        return Parse(text, proto.Manifest())
    except (ParseError, UnicodeDecodeError, RecursionError):
        return None


def is_sound(found: proto.Manifest, identity: bytes) -> bool:
    """Return whether a manifest describes what has the digest under which it stands."""
    try:
        return found.identity == identity and described_by(found) is not None
    except StorageError:
        return False
