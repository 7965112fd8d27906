"""A cluster that this process owns: it starts, takes faults, and leaves nothing behind."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import TIMEOUT_S, all_end, descendants, has_ended, mounted, slowness
from tests.support.mooncake_needed import needs_mooncake
from unified_cache.cluster.child import Child, wait_until
from unified_cache.cluster.directory import ClusterDirectory
from unified_cache.cluster.event_log import EventLog
from unified_cache.cluster.host_port import HostPort
from unified_cache.cluster.local import ClusterPlan, LocalCluster
from unified_cache.cluster.master import MasterSettings
from unified_cache.cluster.restarts import DELAYS_S, ProcessPhase
from unified_cache.cluster.supervisor import Supervisor
from unified_cache.errors import StorageError
from unified_cache.storage_backends.mooncake.admin import MasterAdmin

READY_MAX_S = 3.0
SEGMENT_BYTES = 16 << 20

pytestmark = needs_mooncake


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster.running(nodes=2, segment_bytes=SEGMENT_BYTES, master=MasterSettings(client_ttl_s=2)) as cluster:
        yield cluster


def all_mounted(cluster: LocalCluster) -> bool:
    return {node.address for node in cluster.nodes} <= mounted(cluster.admin)


def test_three_nodes_are_ready_within_three_seconds() -> None:
    started_s = time.monotonic()
    with LocalCluster.running(nodes=3):
        assert time.monotonic() - started_s < READY_MAX_S * slowness()


def test_the_end_leaves_no_process(cluster: LocalCluster) -> None:
    pids = [child.pid for child in (cluster.master, *cluster.nodes)]
    assert set(pids) <= {child.pid for child in psutil.Process().children()}
    cluster.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_master_listens_on_the_loopback_address_alone(cluster: LocalCluster) -> None:
    listening = [each for each in psutil.Process(cluster.master.pid).net_connections() if each.status == "LISTEN"]
    assert {(each.laddr[0], each.laddr[1]) for each in listening} == {
        ("127.0.0.1", cluster.rpc.port),
        ("127.0.0.1", cluster.admin.port),
    }


def test_a_killed_node_is_noticed_and_another_takes_its_place(cluster: LocalCluster) -> None:
    first, second = cluster.nodes
    first.kill()
    assert not first.is_alive
    with pytest.raises(StorageError, match=f"cannot reach the node at {first.address}|are not all there"):
        cluster.check()
    replacement = cluster.replace_node(first)
    assert cluster.nodes == [replacement, second]
    cluster.start_node()
    cluster.check()


def test_a_stopped_node_is_forgotten_and_comes_back(cluster: LocalCluster) -> None:
    node = cluster.nodes[0]
    node.stop()
    assert wait_until(lambda: not all_mounted(cluster), TIMEOUT_S)
    assert node.is_alive
    node.cont()
    assert wait_until(lambda: all_mounted(cluster), TIMEOUT_S)
    cluster.check()


def test_nodes_join_a_restarted_master_by_themselves(cluster: LocalCluster) -> None:
    cluster.master.kill()
    assert not MasterAdmin(cluster.admin.host, cluster.admin.port).is_serving()
    assert not all_mounted(cluster)
    cluster.restart_master()
    assert wait_until(lambda: all_mounted(cluster), TIMEOUT_S)
    cluster.check()


def test_a_master_does_not_start_where_another_process_listens(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"the master needs {cluster.rpc}, where another process listens"):
        cluster._description.start(tmp_path / "master.log")


def test_a_master_that_cannot_start_says_why(cluster: LocalCluster, tmp_path: Path) -> None:
    nowhere = HostPort("192.0.2.1", cluster.rpc.port)
    with pytest.raises(StorageError, match=r"the master does not serve at .*: master ended with status [1-9]"):
        replace(cluster._description, rpc=nowhere, admin=nowhere).start(tmp_path / "master.log")


def test_a_node_ends_gracefully_and_its_segment_goes_at_once(cluster: LocalCluster) -> None:
    assert cluster.nodes[0].terminate(TIMEOUT_S) == 0
    assert cluster.nodes[0].address not in mounted(cluster.admin)


def test_a_supervisor_restarts_what_dies_and_gives_up_on_what_dies_again_and_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    log = StringIO()
    directory = ClusterDirectory.create(tmp_path)
    supervisor = Supervisor(cluster, ClusterPlan(2, SEGMENT_BYTES), directory, EventLog(log, time.time), 0.0)
    now_s = 0.0
    for delay_s in (*DELAYS_S, 0.0):
        cluster.nodes[1].kill()
        supervisor.check_members(now_s)
        now_s += delay_s
        supervisor.check_members(now_s)
    state = directory.read()
    assert state is not None
    assert [(member.name, member.phase, member.restarts_count) for member in state.members] == [
        ("master", ProcessPhase.RUNNING.value, 0),
        ("node-0", ProcessPhase.RUNNING.value, 0),
        ("node-1", ProcessPhase.LOST.value, len(DELAYS_S)),
    ]
    assert log.getvalue().count('"restarted"') == len(DELAYS_S)


def test_a_supervisor_restarts_the_master_before_its_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    log = StringIO()
    directory = ClusterDirectory.create(tmp_path)
    supervisor = Supervisor(cluster, ClusterPlan(2, SEGMENT_BYTES), directory, EventLog(log, time.time), 0.0)
    cluster.master.kill()
    cluster.nodes[0].kill()
    supervisor.check_members(0.0)
    assert log.getvalue().count('"died"') == 1
    supervisor.check_members(DELAYS_S[0])
    supervisor.check_members(2 * DELAYS_S[0])
    assert wait_until(lambda: all_mounted(cluster), TIMEOUT_S)
    cluster.check()


def test_a_process_of_ours_dies_with_the_one_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from unified_cache.cluster.child import Child\n"
        "child = Child.start('sleeper', '', ['/bin/sleep', '600'], log=Path(sys.argv[1]))\n"
        "print(child.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        sleeper = psutil.Process(int(parent.stdout.readline()))
        assert wait_until(lambda: sleeper.name() == "sleep", TIMEOUT_S)
        assert [sleeper] == descendants(parent.pid)
        assert not has_ended(sleeper)
        parent.kill()
    assert all_end([sleeper])


def test_a_process_whose_parent_is_gone_does_not_begin(tmp_path: Path) -> None:
    tether = Path(sys.modules[Child.__module__].__file__ or "").with_name("tether.py")
    begun = tmp_path / "begun"
    command = [sys.executable, "-I", "-S", str(tether), "1", "/bin/touch", str(begun)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    assert not begun.exists()
