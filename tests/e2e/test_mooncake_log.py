"""The log of Mooncake's own library: a miss is no line on standard error, unless our logger shows debug lines."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sources import ROOT
from tests.support.mooncake import small_cluster
from tests.support.mooncake_needed import needs_mooncake
from unified_cache.cluster.local import LocalCluster

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

MISS = "OBJECT_NOT_FOUND"


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


def test_a_miss_is_no_line_on_standard_error(cluster: LocalCluster) -> None:
    assert MISS not in asked_for_a_missing_page(cluster, "INFO")


def test_a_miss_is_shown_to_who_debugs_and_to_an_operator_who_has_set_a_level(cluster: LocalCluster) -> None:
    assert MISS in asked_for_a_missing_page(cluster, "DEBUG")
    assert MISS in asked_for_a_missing_page(cluster, "INFO", MC_LOG_LEVEL="WARNING")
