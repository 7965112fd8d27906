"""A replicated cluster that loses machines in the middle of calls: answers stay right, and no request is aborted."""

import time
from pathlib import Path

import pytest

from tests.engines.stores import FaultSwitch, faulty_url
from tests.engines.vllm.engine import prompt_of
from tests.engines.vllm.faults import (
    BOUND_S,
    CACHED,
    SHORT_S,
    LogPath,
    ModelPath,
    Right,
    answered_rightly,
    engine_with,
    store_and_forget,
)
from tests.support.mooncake import LASTING, LocalCluster
from tests.support.mooncake_needed import needs_etcd
from unified_cache.storage_backends.wrappers import Method

NODES, SEGMENT_BYTES = 3, 128 << 20


@needs_etcd
@pytest.mark.parametrize("machine", ["node", "leader"])
def check_a_machine_of_a_replicated_cluster_that_is_killed_in_the_middle_of_a_call(
    machine: str, right: Right, model_path: ModelPath, log_path: LogPath, tmp_path: Path
) -> None:
    with LocalCluster.running(NODES, SEGMENT_BYTES, LASTING, masters=2) as cluster:
        url, switch = faulty_url(tmp_path / "faults", f"{cluster.url}&replicas=2"), FaultSwitch(tmp_path / "faults")
        with engine_with(url, model_path, log_path("engine"), deadline_s=5 * SHORT_S) as engine:
            store_and_forget(engine, right)
            for seed, method in enumerate((Method.EXISTS, Method.GET, Method.PUT), start=70):
                prompt, leader, node = prompt_of(803, seed), cluster.leading(), cluster.nodes[0]
                if method is not Method.PUT:
                    store_and_forget(engine, right, prompt)
                cluster.settle()
                switch.kill_process_in(method, node.pid if machine == "node" else cluster.master.pid)
                answered_rightly(engine, right, prompt)
                engine.settle()
                assert switch.is_struck
                # What was stored before any machine died comes back as a whole, as soon as somebody leads.
                until_s = time.monotonic() + BOUND_S
                engine.reset()
                while answered_rightly(engine, right).cached < CACHED:
                    assert time.monotonic() < until_s
                    engine.settle()
                    engine.reset()
                engine.reset()
                if machine == "node":
                    cluster.replace_node(node)
                else:
                    cluster.restart_master(leader)
