"""SGLang over a replicated cluster that loses a machine in the middle of a call: bytes stay right, no request fails."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.engines.sglang.check_linked import SMALL, unhurt
from tests.engines.sglang.check_surviving import directory_of, doomed, survived
from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.runner import EngineRunner, Outcome, whole
from tests.engines.stores import FaultSwitch
from tests.support.mooncake import LASTING, LocalCluster
from tests.support.mooncake_needed import needs_etcd
from unified_cache.storage_backends.wrappers.layer import Method

pytestmark = needs_etcd

DEADLINE_S = 5.0
NODES, SEGMENT_BYTES = 3, 512 << 20
REQUESTS = 200
METHODS = (Method.EXISTS, Method.GET, Method.PUT)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Run a cluster that may lose any machine."""
    with LocalCluster.running(NODES, SEGMENT_BYTES, LASTING, masters=2) as running:
        yield running


def bounded_and_whole(outcome: Outcome) -> list[str]:
    """Return what a run has to keep whose pages are all still there."""
    return survived(outcome) + whole(outcome)


def pid_of(cluster: LocalCluster, machine: str) -> int:
    return cluster.nodes[0].pid if machine == "node" else cluster.master.pid


@pytest.mark.parametrize("machine", ["node", "leader"])
def check_hicache_over_a_machine_that_is_killed_in_a_call(
    cluster: LocalCluster, runner: EngineRunner, machine: str
) -> None:
    for number, method in enumerate(METHODS):
        store = runner.store(f"{cluster.url}&replicas=2", revision=f"hicache {number}", deadline_s=DEADLINE_S)
        runner.run(EngineJob(stores=[store]))
        cluster.settle()
        leader, node = cluster.leading(), cluster.nodes[0]
        revision = store["revision"] if method is not Method.PUT else "hicache put"
        dying = store | {"url": doomed(runner, method, store, pid_of(cluster, machine)), "revision": revision}
        phases = "write read" if method is Method.PUT else "read"
        is_whole = machine == "node" and method is not Method.PUT
        runner.run(EngineJob(stores=[dying], phases=phases), bounded_and_whole if is_whole else survived)
        assert FaultSwitch(directory_of(dying)).is_struck, "no machine was killed"
        if machine == "node":
            cluster.replace_node(node)
        else:
            cluster.restart_master(leader)
        runner.run(EngineJob(stores=[store], phases="read"))


@pytest.mark.parametrize("machine", ["node", "leader"])
@pytest.mark.parametrize("method", METHODS)
def check_requests_over_a_linker_and_a_machine_that_is_killed_in_a_call(
    cluster: LocalCluster, runner: EngineRunner, machine: str, method: Method
) -> None:
    store = runner.store(f"{cluster.url}&replicas=2", revision="linked", deadline_s=DEADLINE_S, lookup_wait_s=0.1)
    dying = store | {"url": doomed(runner, method, store, pid_of(cluster, machine))}
    runner.run(replace(SMALL, stores=[dying], linked="requests", requests=REQUESTS), unhurt)
    assert FaultSwitch(directory_of(dying)).is_struck, "no machine was killed"
