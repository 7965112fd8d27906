"""The Mooncake store without Mooncake: addresses, batches, and what is known of nodes."""

import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import permutations
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.support.clock import ManualClock
from unified_cache.core.errors import ClosedError, ConfigError, StateError, StorageError
from unified_cache.storage_backends.mooncake.address import MooncakeAddress, address_of_url, check_resolves, source_host
from unified_cache.storage_backends.mooncake.client import (
    AGED_OBJECTS,
    BATCH_BYTES,
    BATCH_OBJECTS,
    MasterAdmin,
    MooncakeClient,
    ObjectBuffers,
    batches,
)
from unified_cache.storage_backends.mooncake.endpoints import (
    LISTING_FRESH_S,
    LISTING_PAUSES,
    LOCATION_FRESH_S,
    LOCATIONS_MAX,
    REST,
    STAY_S,
    Endpoints,
    LocationCache,
    NodeChoice,
    ReplicaLocation,
)
from unified_cache.storage_backends.mooncake.leader import leader_of
from unified_cache.storage_backends.mooncake.native import ResultCode
from unified_cache.storage_backends.url import open_storage

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore

PORT_OF_NOBODY = 1


def item(number: int, object_bytes: int, name: str = "") -> ObjectBuffers:
    return ObjectBuffers(number, name or f"{number}", object_bytes, [0], [object_bytes])


@contextmanager
def answering(status: int, said: str) -> Iterator[int]:
    """Answer one request over HTTP, at the port returned."""

    class OneReply(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(said.encode())

        def do_POST(self) -> None:
            self.do_GET()

    with HTTPServer(("127.0.0.1", 0), OneReply) as server:
        answering = Thread(target=server.handle_request)
        answering.start()
        yield server.server_port
        answering.join()


# ---- addresses -----------------------------------------------------------------------------------------------------


def test_a_url_names_the_master_and_what_this_process_is_to_it() -> None:
    assert address_of_url("//10.0.0.1:50051") == MooncakeAddress("10.0.0.1", 50051)
    options = "replicas=2&admin=10.0.0.2:2&protocol=rdma&devices=mlx5_0&host=here&segment_bytes=16777216"
    full = address_of_url(f"//master:1?{options}")
    assert full == MooncakeAddress("master", 1, "10.0.0.2", 2, "rdma", "mlx5_0", "here", 1 << 24, replicas=2)
    assert address_of_url("//master:1?admin=2") == MooncakeAddress("master", 1, admin_port=2)
    several = address_of_url("etcd://one:1,two:2,three:3?admin=9&replicas=2")
    members = ("one:1", "two:2", "three:3")
    assert several == MooncakeAddress("one", 1, admin_port=9, replicas=2, etcd=members)
    assert several.master == "etcd://one:1;two:2;three:3"


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "127.0.0.1:50051",
        "//127.0.0.1",
        "//127.0.0.1:0",
        "//127.0.0.1:70000",
        "//127.0.0.1:50051/path",
        "//127.0.0.1:50051#there",
        "//user@127.0.0.1:50051",
        "//127.0.0.1:50051?colour=red",
        "//127.0.0.1:50051?admin=none",
        "//127.0.0.1:50051?protocol=carrier",
        "//127.0.0.1:50051?place=anywhere",
        "//127.0.0.1:50051?segment_bytes=1048576",
        "//127.0.0.1:50051?segment_bytes=-1",
        "//one:1,two:2",
        "etcd://one:1,two",
        "etcd://one:1,,two:2",
        "etcd://one:1,two:2?admin=one:3",
        "//127.0.0.1:50051?replicas=0",
        "//127.0.0.1:50051?replicas=5",
    ],
)
def test_a_url_of_another_form_is_refused_in_one_line(rest: str) -> None:
    with pytest.raises(ConfigError) as refused:
        address_of_url(rest)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "."])
def test_a_host_that_nobody_resolves_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="host must be a host that all machines resolve"):
        check_resolves("host", host)
    with pytest.raises(ConfigError, match=re.escape(host)):
        MooncakeAddress("127.0.0.1", 1, local_host=host).resolved_host()


def test_the_way_to_the_loopback_address_is_the_loopback_address() -> None:
    assert MooncakeAddress("127.0.0.1", 1).resolved_host() == source_host("127.0.0.1", 9) == "127.0.0.1"


def test_a_url_without_a_master_behind_it_and_a_cap_of_our_own_are_refused() -> None:
    with pytest.raises(StorageError, match="no Mooncake master answers"):
        open_storage(f"mooncake://127.0.0.1:{PORT_OF_NOBODY}")
    with pytest.raises(ConfigError, match="cap"):
        open_storage("mooncake://127.0.0.1:50051", bytes_max=1)


@pytest.mark.parametrize(
    ("status", "said", "leader"),
    [
        (
            200,
            {"header": {}, "kvs": [{"key": "aw==", "value": b64encode(b"10.0.0.1:50051").decode()}]},
            "10.0.0.1:50051",
        ),
        (200, {"header": {}}, "no Mooncake master leads"),
        (503, {"error": "no leader"}, "no member of etcd says"),
        (200, [], "no member of etcd says"),
    ],
)
def test_the_first_member_of_etcd_that_answers_says_which_master_leads(status: int, said: object, leader: str) -> None:
    with answering(status, json.dumps(said)) as port:
        members = (f"127.0.0.1:{PORT_OF_NOBODY}", f"127.0.0.1:{port}")
        try:
            found = ":".join(map(str, leader_of(members)))
        except StorageError as error:
            found = str(error)
            assert all(member in found for member in members) == (leader == "no member of etcd says")
        assert found.startswith(leader)


@pytest.mark.parametrize(("said", "capacity_bytes"), [("0", None), ("4096", 4096), ("none", None)])
def test_the_cap_of_a_cluster_whose_nodes_are_not_there_yet_is_not_known(said: str, capacity_bytes: int | None) -> None:
    with answering(200, f"master_total_capacity_bytes {said}\n") as port:
        assert MasterAdmin(MooncakeAddress("127.0.0.1", 1, admin_port=port)).capacity_bytes() == capacity_bytes


# ---- batches -------------------------------------------------------------------------------------------------------


def test_batches_keep_order_and_bounds_and_a_large_object_goes_alone() -> None:
    objects = [item(n, size) for n, size in enumerate([1 << 20] * 3 + [BATCH_BYTES * 2] + [10] * (BATCH_OBJECTS + 1))]
    cut = list(batches(objects))
    assert [each for batch in cut for each in batch] == objects
    assert [len(batch) for batch in cut] == [2, 1, 1, BATCH_OBJECTS, 1]
    assert list(batches([])) == []


def test_a_batch_names_no_object_twice() -> None:
    objects = [item(number, 1, name) for number, name in enumerate("aaba")]
    assert [[each.number for each in batch] for batch in batches(objects)] == [[0], [1, 2], [3]]


# ---- nodes ---------------------------------------------------------------------------------------------------------


def test_a_place_is_known_while_it_is_fresh_and_until_it_is_forgotten() -> None:
    clock = ManualClock()
    locations = LocationCache(clock)
    locations.learn([("a", ReplicaLocation("node", 1)), ("b", ReplicaLocation("node", 2))])
    locations.forget(["b"])
    assert locations.find(["a", "b", "c"]) == {"a": ReplicaLocation("node", 1)}
    clock.sleep(LOCATION_FRESH_S + 1)
    assert locations.find(["a"]) == {}


def test_places_are_bounded_and_the_oldest_go() -> None:
    locations = LocationCache(ManualClock())
    locations.learn((f"{number}", ReplicaLocation("node", 1)) for number in range(LOCATIONS_MAX + 1))
    assert list(locations.find(["0", "1"])) == ["1"]


def test_a_node_rests_after_a_failure_longer_each_time_and_is_asked_again() -> None:
    clock = ManualClock()
    endpoints = Endpoints(clock)
    for failures_count in (1, 2, 3, 4):
        endpoints.failed("node")
        assert not endpoints.is_up("node")
        assert not endpoints.is_up("node")
        clock.sleep(REST.pause_s(failures_count))
        assert endpoints.is_up("node")
    probe = endpoints.admit("node")
    assert probe is not None
    with probe:
        pass
    endpoints.failed("node")
    clock.sleep(REST.first_s)
    assert endpoints.is_up("node")
    assert endpoints.is_up("another")


def test_after_a_rest_one_call_is_the_probe_and_no_other_hangs_with_it() -> None:
    clock = ManualClock()
    endpoints = Endpoints(clock)
    endpoints.failed("node")
    assert endpoints.admit("node") is None
    clock.sleep(REST.first_s)
    probe = endpoints.admit("node")
    assert probe is not None
    with probe:
        assert not endpoints.is_up("node")
        assert endpoints.admit("node") is None
    assert endpoints.is_up("node")


class Library:
    """The library, of which one call is asked for."""

    asked_count = 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.asked_count += 1
        return [1] * len(keys)


def test_no_call_of_the_library_begins_once_the_process_ends_nor_in_a_process_that_was_forked() -> None:
    library = Library()
    client = MooncakeClient(cast("MooncakeDistributedStore", library), MooncakeAddress("127.0.0.1", PORT_OF_NOBODY))
    assert client.exist(["a"]) == [True]
    child = os.fork()
    if not child:
        try:
            client.exist(["a"])
        except StateError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    client.end()
    with pytest.raises(ClosedError, match="as the process ends"):
        client.exist(["a"])
    assert library.asked_count == 1


class LeaderlessLibrary(Library):
    """The library while nobody leads: it waits for seconds before it says so of a copy."""

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[object]]:
        place = SimpleNamespace(transport_endpoint="node", size=1)
        memory = SimpleNamespace(buffer_descriptor=place)
        return {
            key: [SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)] for key in keys
        }

    def create_copy_task(self, key: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        self.asked_count += 1
        return (0, 0), ResultCode.RPC_FAILED


class SilentLibrary(Library):
    """The library while nobody leads: it waits for seconds, and then knows nothing of any page."""

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[object]]:
        self.asked_count += 1
        return {}


def test_while_nobody_leads_one_copy_is_asked_for_and_not_one_of_each_page() -> None:
    library = LeaderlessLibrary()
    address = MooncakeAddress("127.0.0.1", PORT_OF_NOBODY, replicas=2)
    client = MooncakeClient(cast("MooncakeDistributedStore", library), address, cast("TransferEngine", object()))
    client.choice = NodeChoice(NodeLister("node", "other"), client.endpoints)
    assert client.locations_of(["a", "b", "c"]).keys() == {"a", "b", "c"}
    assert library.asked_count == 1


def test_a_look_up_of_many_pages_ends_with_the_first_answer_of_which_the_master_gave_nothing() -> None:
    library = SilentLibrary()
    client = MooncakeClient(cast("MooncakeDistributedStore", library), MooncakeAddress("127.0.0.1", PORT_OF_NOBODY))
    with pytest.raises(StorageError, match="no Mooncake master answers"):
        client.locations_of([f"{number}" for number in range(4 * AGED_OBJECTS)])
    assert library.asked_count == 1


# ---- placement -----------------------------------------------------------------------------------------------------


class NodeLister:
    """Lists nodes, and counts how often."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = frozenset(nodes)
        self.asked_count = 0

    def __call__(self) -> frozenset[str]:
        self.asked_count += 1
        return self.nodes


@pytest.mark.parametrize("every", [1, 2, 3])
def test_one_node_is_put_on_for_a_while_and_all_alike_in_the_end(every: int) -> None:
    clock, lister = ManualClock(), NodeLister("c", "a", "b")
    choice = NodeChoice(lister, Endpoints(clock), clock, seed=1)
    chosen: Counter[str] = Counter()
    for _ in range(300):
        ((node,),) = {tuple(choice.nodes(1)) for _ in range(3)}
        chosen[node] += 1
        clock.now_s += every * STAY_S
    assert 70 < min(chosen.values()) <= max(chosen.values()) < 130
    assert lister.asked_count <= 1 + 300 * every * STAY_S / LISTING_FRESH_S


def test_two_replicas_go_to_two_nodes_and_all_pairs_are_drawn_alike() -> None:
    clock = ManualClock()
    choice = NodeChoice(NodeLister("a", "b", "c"), Endpoints(clock), clock, seed=1)
    chosen: Counter[tuple[str, ...]] = Counter()
    for _ in range(600):
        chosen[tuple(choice.nodes(2))] += 1
        clock.now_s += STAY_S
    assert set(chosen) == set(permutations("abc", 2))
    assert 70 < min(chosen.values()) <= max(chosen.values()) < 130
    assert len(choice.nodes(4)) == 3


def test_processes_put_on_different_nodes_at_one_time() -> None:
    clock = ManualClock()
    firsts = {NodeChoice(NodeLister("a", "b"), Endpoints(clock), clock).nodes(1)[0] for _ in range(64)}
    assert firsts == {"a", "b"}


def test_a_node_on_which_a_put_failed_is_not_chosen_while_it_rests() -> None:
    clock = ManualClock()
    endpoints = Endpoints(clock)
    choice = NodeChoice(NodeLister("a", "b"), endpoints, clock, seed=0)
    endpoints.failed("a")
    assert choice.nodes(1) == ["b"]
    endpoints.failed("b")
    assert choice.nodes(1) == NodeChoice(frozenset, endpoints, clock).nodes(1) == [], "the master is to choose"
    again = set()
    for _ in range(20):
        clock.now_s += STAY_S
        again.update(choice.nodes(1))
    assert again == {"a", "b"}


def test_nodes_that_come_and_go_are_noticed_and_a_master_that_lists_none_is_seldom_asked() -> None:
    clock, lister = ManualClock(), NodeLister("a")
    choice = NodeChoice(lister, Endpoints(clock), clock)
    assert choice.nodes(1) == ["a"]
    lister.nodes = frozenset({"b"})
    assert choice.nodes(1) == ["a"]
    clock.now_s += LISTING_FRESH_S
    assert choice.nodes(1) == ["b"]
    lister.nodes = frozenset()
    before = lister.asked_count
    for _ in range(100):
        clock.now_s += LISTING_FRESH_S
        assert choice.nodes(1) == ["b"], "those it had are believed"
    assert lister.asked_count - before < 100 * LISTING_FRESH_S / LISTING_PAUSES.max_s + 6
    lister.nodes = frozenset({"c"})
    clock.now_s += LISTING_PAUSES.max_s
    assert choice.nodes(1) == ["c"]
