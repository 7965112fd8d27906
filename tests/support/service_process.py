"""A server in a process of its own, over a directory: ``python -m tests.support.service_process DIRECTORY PORT``."""

import subprocess
import sys
import threading

from tests.sources import ROOT
from tests.support.service import LoopbackServer
from unified_cache.core.settings.limits import LimitSettings
from unified_cache.storage_backends.file.store import FileStorage

__all__ = ["ServerProcess"]


class ServerProcess:
    """Such a process, that can be killed and started again at its port."""

    def __init__(self, directory: str, *, hash_seed: str = "0") -> None:
        self._directory = directory
        self._hash_seed = hash_seed
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def process(self) -> int:
        """Number that the system knows it by."""
        return self._running.pid

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.support.service_process", self._directory, str(self.port)]
        self._running = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONHASHSEED": self._hash_seed}
        )
        assert self._running.stdout is not None
        self.port = int(self._running.stdout.readline())

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        self._running.kill()
        self._running.wait()
        assert self._running.stdout is not None
        self._running.stdout.close()


if __name__ == "__main__":
    running = LoopbackServer.start(FileStorage.open(sys.argv[1]), LimitSettings(), port=int(sys.argv[2]))
    print(running.port, flush=True)  # noqa: T201  # its one output: where it listens
    threading.Event().wait()
