"""Mooncake clusters on loopback for tests, and what tests do to them from outside."""

from collections.abc import Iterator
from contextlib import contextmanager

from unified_cache.cluster.local import LocalCluster
from unified_cache.cluster.master import MasterSettings
from unified_cache.storage_backends.mooncake.store import MooncakeStorage
from unified_cache.storage_backends.url import open_storage

__all__ = ["open_mooncake", "small_cluster"]

SETTINGS = MasterSettings(lease_ms=2_000, client_ttl_s=2, put_discard_s=2)
"""So that what takes its time in production is over within a test."""


@contextmanager
def small_cluster(
    nodes: int = 1, segment_bytes: int = 64 << 20, settings: MasterSettings = SETTINGS
) -> Iterator[LocalCluster]:
    """Run a cluster; it is gone in the end, whatever happened."""
    with LocalCluster.running(nodes, segment_bytes, settings) as cluster:
        yield cluster


def open_mooncake(cluster: LocalCluster) -> MooncakeStorage:
    """Open a store of its own in a cluster."""
    storage = open_storage(cluster.url)
    assert isinstance(storage, MooncakeStorage)
    return storage
