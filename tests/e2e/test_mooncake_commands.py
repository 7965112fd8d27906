"""Mooncake's own library logs little, and where an operator has said."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.mooncake import LocalCluster
from tests.support.mooncake_needed import needs_mooncake

pytestmark = needs_mooncake

MISSING = """
import sys
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import blank_page, label, open_for_contract

storage = open_for_contract(open_storage(sys.argv[1]))
labels = [label(number) for number in range(100)]
answers = [*storage.exists(labels), *storage.get([blank_page(each) for each in labels])]
print(*{answer.value for answer in answers})
storage.close()
"""

RECORD = re.compile(r"^([IWEF])\d{4} ", re.MULTILINE)
"""Start of a line of glog: severity, month and day."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster.running() as cluster:
        yield cluster


def asked_for_missing_pages(cluster: LocalCluster, **environment: str) -> str:
    """Run a process that asks for a hundred of them; return what it writes on standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", MISSING, cluster.url],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "miss\n"), ended.stderr
    return ended.stderr


def test_the_library_logs_nothing_of_pages_that_are_not_there(cluster: LocalCluster) -> None:
    logged = asked_for_missing_pages(cluster)
    assert RECORD.findall(logged) == ["E"], logged  # of setting up


def test_an_operator_who_has_set_a_level_and_a_directory_finds_the_log_there(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    asked_for_missing_pages(cluster, MC_LOG_LEVEL="INFO", MC_LOG_DIR=str(tmp_path))
    assert any("I" in RECORD.findall(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir())
