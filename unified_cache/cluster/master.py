"""Process of a cluster's master, which knows the location of every page and keeps that in memory alone."""

from dataclasses import dataclass
from pathlib import Path

from unified_cache.cluster.child import Child, wait_until
from unified_cache.cluster.host_port import HostPort
from unified_cache.errors import StorageError
from unified_cache.storage_backends.mooncake.admin import MasterAdmin

__all__ = ["Master", "MasterSettings"]

START_TIMEOUT_S = 3.0
"""It takes 75 ms on an idle machine."""
ADMIN_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class MasterSettings:
    """Settings of a master. The defaults suit one machine, where a dead node is to be noticed soon.

    ``lease_ms`` protects a page that was asked for or read; it must exceed the slowest batch of reads. A node that is
    silent for ``client_ttl_s`` is forgotten, its pages with it. Above the part ``watermark`` of all memory, the part
    ``eviction_ratio`` of it is freed. A put that its writer did not finish blocks its key for ``put_discard_s``.
    """

    lease_ms: int = 10_000
    client_ttl_s: int = 3
    watermark: float = 0.8
    eviction_ratio: float = 0.1
    put_discard_s: int = 30
    threads: int = 2

    def arguments(self) -> list[str]:
        """Return the arguments of ``mooncake_master`` that say so."""
        return [
            f"--default_kv_lease_ttl={self.lease_ms}",
            f"--client_ttl={self.client_ttl_s}",
            f"--eviction_high_watermark_ratio={self.watermark}",
            f"--eviction_ratio={self.eviction_ratio}",
            f"--put_start_discard_timeout_sec={self.put_discard_s}",
            f"--rpc_thread_num={self.threads}",
        ]


@dataclass(frozen=True, slots=True)
class Master:
    """Starts one master, the first time and after it died. ``admin`` is its HTTP server."""

    program: Path
    rpc: HostPort
    admin: HostPort
    settings: MasterSettings

    def start(self, log: Path) -> Child:
        """Start the process and wait until it serves.

        Raises:
            StorageError: another process serves there, the master ended, or it does not serve in time.
        """
        for address in (self.rpc, self.admin):
            if not address.refusal(ADMIN_TIMEOUT_S):
                raise StorageError(f"the master needs {address}, where another process listens", retryable=True)
        command = [
            str(self.program),
            f"--rpc_address={self.rpc.host}",
            f"--rpc_port={self.rpc.port}",
            f"--metrics_host={self.admin.host}",
            f"--metrics_port={self.admin.port}",
            "--enable_metric_reporting=false",
            "--logtostderr=true",
            "--minloglevel=1",
            *self.settings.arguments(),
        ]
        child = Child.start("master", str(self.rpc), command, log=log)
        wait_until(lambda: not child.is_alive or self._serves(), START_TIMEOUT_S)
        if child.is_alive and self._serves():
            return child
        reason = child.ending()
        child.kill()
        raise StorageError(f"the master does not serve at {self.rpc}: {reason}", retryable=True)

    def _serves(self) -> bool:
        return MasterAdmin(self.admin.host, self.admin.port).is_serving() and not self.rpc.refusal(ADMIN_TIMEOUT_S)
