"""The storage contract, over a Mooncake cluster of real processes, and over a service in front of it."""

from collections.abc import Iterator

import pytest

from tests.contract.test_remote_contract import ServiceContract
from tests.support.mooncake import LocalCluster, open_mooncake
from tests.support.mooncake_needed import needs_mooncake
from tests.support.service import LoopbackServer
from unified_cache.storage_backends.mooncake.store import MooncakeStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import StorageContract, listing

pytestmark = needs_mooncake


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster.running(nodes=2) as cluster:
        yield cluster


def emptied(storage: MooncakeStorage) -> MooncakeStorage:
    """Remove what the test before left; a cluster is too dear to have one for each."""
    for identity in storage.manifests():
        storage.remove([found.label for found in listing(storage, identity)])
    return storage


class TestServiceOverMooncake(ServiceContract):
    @pytest.fixture
    def storage(self, cluster: LocalCluster) -> Iterator[Store]:
        running = LoopbackServer.start(emptied(open_mooncake(cluster)))
        storage = VerifiedStorage(running.client())
        yield storage
        storage.close()
        running.stop()


class TestMooncakeStorage(StorageContract):
    # Verified, as every cache has it: an object that is removed while it is read brings other bytes.
    @pytest.fixture
    def storage(self, cluster: LocalCluster) -> Iterator[Store]:
        storage = VerifiedStorage(emptied(open_mooncake(cluster)))
        yield storage
        storage.close()
