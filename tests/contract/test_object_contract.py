"""The storage contract, over a bucket of a real S3 server, and over a service in front of it."""

from collections.abc import Iterator

import pytest

from tests.contract.test_remote_contract import ServiceContract
from tests.contract.test_storage_contract import stacked
from tests.support.bucket import LocalBucket
from tests.support.service import LoopbackServer
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import StorageContract


class ObjectContract(StorageContract):
    rounds_of_each_thread = 5


class TestObjectStorage(ObjectContract):
    @pytest.fixture
    def storage(self, bucket: LocalBucket) -> Iterator[Store]:
        storage = open_storage(bucket.new_url())
        yield storage
        storage.close()


class TestOneRequestAtATime(ObjectContract):
    @pytest.fixture
    def storage(self, bucket: LocalBucket) -> Iterator[Store]:
        storage = stacked(open_storage(f"{bucket.new_url()}?requests=1"))
        yield storage
        storage.close()


class TestServiceOverABucket(ServiceContract):
    @pytest.fixture
    def storage(self, bucket: LocalBucket) -> Iterator[Store]:
        running = LoopbackServer.start(open_storage(bucket.new_url()))
        storage = VerifiedStorage(running.client())
        yield storage
        storage.close()
        running.stop()
