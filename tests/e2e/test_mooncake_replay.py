"""A trace replayed by two engines over one cluster, beside two with stores of their own."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.mooncake import LocalCluster, open_mooncake
from tests.support.mooncake_needed import needs_mooncake

pytestmark = needs_mooncake

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
NODES = 3
SEGMENT_BYTES = 32 << 20
COMMAND = (sys.executable, "-c", "from unified_cache.cli.main import main; main()", "replay", str(TRACE))
SIZES = ("--engines", "2", "--device-pages", "300", "--host-pages", "600", "--page-bytes", "8KiB", "--limit", "300")
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster.running(NODES, SEGMENT_BYTES) as cluster:
        yield cluster


def replay(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *SIZES, *arguments], check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_two_engines_over_a_cluster_hit_more_than_over_halves_of_it(cluster: LocalCluster) -> None:
    shared = replay("--storage", cluster.url, "--json")
    assert shared.returncode == 0, shared.stderr
    found = json.loads(shared.stdout)
    assert (found["wrong_pages"], found["leaked_slots"], found["flawed_pages"]) == (0, 0, 0)
    assert found["pages_verified"] == sum(found["hit_blocks"].values())
    assert found["hit_blocks"]["storage"] > 0
    assert found["block_hit_ratio"] > found["block_hit_ratio_apart"]

    apart = ("--storage", "memory:", "--storage-bytes", str(NODES * SEGMENT_BYTES), "--no-bytes", "--json")
    capped = ask("replay", TRACE, *SIZES, *apart)
    assert capped.status == 0, capped.err
    assert json.loads(capped.out)["block_hit_ratio_apart"] == found["block_hit_ratio_apart"], "of the same size"


def test_a_cluster_has_the_cap_that_its_nodes_give_it(cluster: LocalCluster) -> None:
    storage = open_mooncake(cluster)
    assert storage.capability().bytes_max == NODES * SEGMENT_BYTES
    storage.close()
    refused = ask("replay", TRACE, *SIZES, "--storage", cluster.url, "--storage-bytes", "1GiB")
    assert refused.status == 2
    assert refused.error.startswith("error: a Mooncake cluster has the cap that its nodes give it")
