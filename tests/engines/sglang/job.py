"""Runs of the engine, each in a process of its own, forked after the engine was imported once.

    python -m tests.engines.sglang.job SOCKET

A connection to the socket is a run. Its first line is JSON: ``job`` describes the run, ``log`` is the file that gets
what it says. Lines that come back: its process, and its outcomes as JSON; without them it has failed. It runs in the
engine's environment, with the repository on its path, until whoever has started it ends.
"""

import json
import logging
import os
import socketserver
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import Any

from tests.engines.sglang import absent
from tests.engines.sglang.outcome import EngineJob, JobOutcome

__all__: list[str] = []

RUNS_MAX = 8
"""Runs at a time."""


class _RunServer(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = RUNS_MAX
    # Threads of SGLang are daemons that wait for ever; a run ends by leaving them.
    block_on_close = False

    def __init__(self, path: str, run_job: Callable[[EngineJob], list[JobOutcome]]) -> None:
        super().__init__(path, _RunRequest)
        self.run_job = run_job
        self._parent = os.getppid()

    def service_actions(self) -> None:
        """Look now and then whether there is anybody left to serve."""
        super().service_actions()
        if os.getppid() != self._parent:
            raise SystemExit


class _RunRequest(socketserver.StreamRequestHandler):
    server: _RunServer

    def handle(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.readline())
        with open(asked["log"], "ab", buffering=0) as log:  # noqa: PTH123 - a descriptor for the native libraries too
            os.dup2(log.fileno(), sys.stderr.fileno())
        self.wfile.write(f"{os.getpid()}\n".encode())
        outcomes = self.server.run_job(EngineJob(**asked["job"]))
        told = [asdict(outcome) | {"is_whole": outcome.is_whole} for outcome in outcomes]
        self.wfile.write(json.dumps(told).encode() + b"\n")


def main() -> None:
    """Import the engine, and serve runs."""
    warnings.filterwarnings("ignore")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)
    absent.provide(os.environ["SGLANG_WHEEL"])
    # Only now can anything be imported that imports the engine.
    run_job = vars(import_module("tests.engines.sglang.running"))["run_job"]
    with _RunServer(sys.argv[1], run_job) as runs:
        runs.serve_forever()


if __name__ == "__main__":
    main()
