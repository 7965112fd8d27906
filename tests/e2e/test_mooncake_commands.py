"""Commands over Mooncake: what its own library logs comes to our logger or nowhere, and gc keeps a cap."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

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
import logging, sys, threading
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import blank_page, label, open_for_contract

class Printed(logging.Handler):
    has_come = threading.Event()

    def emit(self, record):
        if record.getMessage().startswith("E"):
            print(record.levelname, record.name, record.getMessage(), flush=True)
            self.has_come.set()

ours = logging.getLogger("unified_cache")
ours.setLevel(sys.argv[2])
ours.addHandler(Printed())
storage = open_for_contract(open_storage(sys.argv[1]))
print(storage.get([blank_page(label(1))])[0].value)
storage.close()
"""

WAITED_FOR = "assert Printed.has_come.wait(60)"
"""The line comes while the process goes on, not only when it ends."""

FATAL = """
import ctypes
(path,) = {line.split(maxsplit=5)[-1] for line in open("/proc/self/maps").read().splitlines() if "/libglog" in line}
ctypes.CDLL(path)["_ZN6google17InitGoogleLoggingEPKc"](b"again")
"""
"""To begin twice is what the library's logger takes for fatal."""

ERROR_LINE = re.compile(r"^E\d{4} ", re.MULTILINE)
"""As glog writes it; setting up a client makes one."""

OUR_LINE = re.compile(r"^DEBUG unified_cache\.storage_backends\.mooncake\.own_log E\d{4} ", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with small_cluster() as cluster:
        yield cluster


def asked_for_a_missing_page(
    cluster: LocalCluster, directory: Path, level: str, more: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a process that asks for it, and then ``more``, with its temporary files in a directory."""
    return subprocess.run(
        [sys.executable, "-c", f"{MISSING}\n{more}", cluster.url, level],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(directory), **environment},
        timeout=120,
    )


def test_the_librarys_log_goes_nowhere_if_nobody_debugs(cluster: LocalCluster, tmp_path: Path) -> None:
    ended = asked_for_a_missing_page(cluster, tmp_path, "INFO")
    assert (ended.returncode, ended.stdout) == (0, "miss\n"), ended.stderr
    assert not ERROR_LINE.search(ended.stderr)


def test_the_librarys_log_comes_to_our_logger_at_debug_and_leaves_nothing_behind(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    ended = asked_for_a_missing_page(cluster, tmp_path, "DEBUG", WAITED_FOR)
    assert ended.returncode == 0, ended.stderr
    assert len(OUR_LINE.findall(ended.stdout)) == 1
    assert ended.stderr == ""
    assert not list(tmp_path.iterdir())


def test_the_last_words_of_the_library_are_on_standard_error_even_then(cluster: LocalCluster, tmp_path: Path) -> None:
    ended = asked_for_a_missing_page(cluster, tmp_path, "DEBUG", FATAL)
    assert ended.returncode == -signal.SIGABRT
    assert "You called InitGoogleLogging() twice!" in ended.stderr
    assert not ERROR_LINE.search(ended.stderr)


def test_an_operator_who_has_set_a_level_or_a_directory_finds_the_log_there(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    assert ERROR_LINE.search(asked_for_a_missing_page(cluster, tmp_path, "INFO", MC_LOG_LEVEL="WARNING").stderr)
    directory = tmp_path / "logs"
    directory.mkdir()
    asked_for_a_missing_page(cluster, tmp_path, "DEBUG", MC_LOG_DIR=str(directory))
    assert any(ERROR_LINE.search(path.read_text(encoding="utf-8")) for path in directory.iterdir())


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
