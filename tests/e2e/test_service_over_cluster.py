"""Engines that know nothing of Mooncake share a cluster of it through two servers: the whole distributed store."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.cluster import ServeProcess
from tests.support.exactness import L3, after_a_restart
from tests.support.mooncake import LocalCluster
from tests.support.mooncake_needed import needs_mooncake

pytestmark = needs_mooncake


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServeProcess]]:
    """Two servers in front of three nodes."""
    directory = tmp_path_factory.mktemp("servers")
    with LocalCluster.running(nodes=3) as cluster, ExitStack() as ends:
        settings = {"STORAGE": cluster.url, "AUDIT__FILE": str(directory / "audit")}
        yield [ends.enter_context(ServeProcess(variables=settings)) for _ in range(2)]


def test_two_engines_share_a_cluster_through_two_servers_and_through_the_one_that_is_left(
    servers: list[ServeProcess],
) -> None:
    service = L3(f"grpc://{','.join(server.address for server in servers)}", is_shared=True)
    after_a_restart("tiny-llama", service, is_aligned=True)
    servers[0].kill()
    after_a_restart("tiny-gpt-oss", service, is_aligned=False)
