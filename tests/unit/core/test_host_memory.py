"""Memory that a process may still take, as the files of a machine and of its control groups say."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support.cache import IDENTITY, ToyEngine, toy_layout
from tests.support.operations import PAGE, SPANS
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers
from unified_cache.core import sizes
from unified_cache.core.config import CacheConfig
from unified_cache.core.errors import ConfigError
from unified_cache.core.sizes import available_bytes, check_available, memory_bytes

GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {2 << 20} kB\n"}
V2 = {
    "proc/self/cgroup": "0::/kube/pod\n",
    "sys/fs/cgroup/kube/memory.max": "max\n",
    "sys/fs/cgroup/kube/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/kube/memory.stat": "inactive_file 0\nactive_file 0\n",
    "sys/fs/cgroup/kube/pod/memory.max": f"{GIB}\n",
    "sys/fs/cgroup/kube/pod/memory.current": f"{GIB // 2}\n",
    "sys/fs/cgroup/kube/pod/memory.stat": f"anon {GIB // 4}\ninactive_file {GIB // 8}\nactive_file {GIB // 8}\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/seen-by-the-host-alone\n1:cpu:/\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
    "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 8}\ntotal_active_file {GIB // 8}\n",
}


def machine(root: Path, files: Mapping[str, str]) -> Path:
    """Write the files of a machine."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize("groups", [V2, V1], ids=["v2", "v1"])
def test_the_limit_of_the_control_group_less_what_is_taken_but_for_cached_files_is_available(
    groups: Mapping[str, str], tmp_path: Path
) -> None:
    root = machine(tmp_path, {**MACHINE, **groups})
    assert available_bytes(root) == 3 * GIB // 4
    assert memory_bytes(root) == min(GIB, memory_bytes(tmp_path / "nothing"))
    check_available(3 * GIB // 4, "pages", root)
    with pytest.raises(ConfigError, match=r"pages need 2.0 GiB of memory, found 768.0 MiB available"):
        check_available(2 * GIB, "pages", root)


def test_without_a_limit_it_is_what_the_machine_says_and_without_that_all_memory(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, MACHINE)) == min(2 * GIB, memory_bytes(tmp_path))
    assert available_bytes(tmp_path / "nothing") == memory_bytes(tmp_path / "nothing")


def test_a_cache_whose_host_tier_does_not_fit_is_refused_before_a_page_of_it_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = ToyEngine(toy_layout(SPANS, PAGE), (12, 8), (12, 8), None, InlineWorkers())
    pools = list(toy.pools.values())
    monkeypatch.setattr(sizes, "available_bytes", lambda _: 3 * GIB // 4)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("memory was touched"))
    pages = 2 * GIB // toy.layout.page_bytes
    with pytest.raises(ConfigError, match=r"the pages of the host tier need .* found 768.0 MiB available"):
        UnifiedCache.open(toy.layout, CacheConfig((12, 8), (pages, 8)), pools, identity=IDENTITY)
