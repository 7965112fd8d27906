"""Commands over Mooncake: what its own library logs is no line on standard error, and gc keeps a cap."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.mooncake import open_mooncake, small_cluster
from tests.support.mooncake_needed import needs_mooncake
from tests.support.offline import LAYOUTS, TOY, fill, prompt_of
from unified_cache.cluster.local import LocalCluster
from unified_cache.testing.storage_contract import listing

pytestmark = needs_mooncake

MISSING = """
import logging, sys
logging.getLogger("unified_cache").setLevel(sys.argv[2])
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import blank_page, label, open_for_contract
storage = open_for_contract(open_storage(sys.argv[1]))
print(storage.get([blank_page(label(1))])[0].value)
storage.close()
"""

ERROR_LINE = re.compile(r"^E\d{4} ", re.MULTILINE)
"""As glog writes it; setting up a client makes one."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with small_cluster() as cluster:
        yield cluster


def asked_for_a_missing_page(cluster: LocalCluster, level: str, **environment: str) -> str:
    """Return what a process that asks for it writes on standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", MISSING, cluster.url, level],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=60,
    )
    assert ended.stdout == "miss\n"
    return ended.stderr


def test_the_librarys_log_is_no_line_on_standard_error(cluster: LocalCluster) -> None:
    assert not ERROR_LINE.search(asked_for_a_missing_page(cluster, "INFO"))


def test_its_log_is_shown_to_who_debugs_and_to_an_operator_who_has_set_a_level(cluster: LocalCluster) -> None:
    assert ERROR_LINE.search(asked_for_a_missing_page(cluster, "DEBUG"))
    assert ERROR_LINE.search(asked_for_a_missing_page(cluster, "INFO", MC_LOG_LEVEL="WARNING"))


def test_gc_shrinks_a_cluster_to_a_cap(cluster: LocalCluster) -> None:
    layout = LAYOUTS["full_swa"]
    fill(open_mooncake(cluster), layout, [prompt_of(1), prompt_of(2)])
    with closing(open_mooncake(cluster)) as storage:
        before = sum(found.object_bytes for found in listing(storage, TOY.digest(layout)))
    collected = ask("storage", "gc", cluster.url, "--bytes-max", str(before // 2), "--json")
    assert collected.status == 0, collected.err
    said = json.loads(collected.out)
    assert 0 < said["bytes"] <= before // 2
    assert said["bytes"] + said["evicted_bytes"] == before
    with closing(open_mooncake(cluster)) as storage:
        assert sum(found.object_bytes for found in listing(storage, TOY.digest(layout))) == said["bytes"]
