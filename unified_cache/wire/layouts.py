"""In what two manifests differ, in words: what a server says when it does not take a layout."""

from collections.abc import Iterator

from unified_cache.proto.manifest_pb2 import Manifest

__all__ = ["differences"]


def differences(expected: Manifest, found: Manifest) -> list[str]:
    """Name every field of format and layout that differs, as ``field: expected X, found Y``; identities aside."""
    ours, theirs = dict(_fields(expected)), dict(_fields(found))
    return [
        f"{name}: expected {ours.get(name, 'none')}, found {theirs.get(name, 'none')}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]


def _fields(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "format version", str(manifest.format_version)
    yield "dtype", manifest.dtype or "none"
    yield "page size", str(manifest.page_size)
    yield "components", ", ".join(component.name for component in manifest.components)
    for component in manifest.components:
        yield f"span of {component.name}", str(component.span)
        yield f"pools of {component.name}", ", ".join(pool.name for pool in component.pools)
        for pool in component.pools:
            yield f"page bytes of {pool.name}", str(pool.page_bytes)
