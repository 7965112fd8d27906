"""Runs of the engine over stores in one temporary directory, and what has to hold of what they tell."""

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cached_property
from itertools import cycle
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.engines.sglang.install import Installation, install
from tests.engines.sglang.outcome import EngineJob
from tests.support.cluster import ServeProcess
from tests.support.mooncake import LASTING, LocalCluster
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
STACKS = ("full", "mla", "swa", "dsv4", "mamba")
CORES = ("python", "rust")
STACKS_BY_TURNS = tuple(zip(STACKS, cycle(CORES), strict=False))
"""Every stack, the tree cores by turns: for what takes its time on any of them."""

STORES = ("file", "packed", "coded", "grpc", "mooncake")
"""Kinds of stores; ``coded`` is a ``file:`` store whose pages are compressed and encrypted."""

CODED = "#compress=lossless&keys=file:"
RUN_S = 240.0
"""Longest time of one run, the engine's start included."""

IMPORT_S = 240.0
"""Longest time until the engine is imported; the first time all of it is compiled."""

UNDERSTOOD_S = 600.0
"""Longest time for an answer of ``spoken``, the engine's start included."""

SEGMENT_BYTES = 512 << 20
REVISION = "e2e"

IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Directory of the stores, where it is there."""

ERROR_CHARACTERS_MAX = 300
"""Of the last line that a run wrote, shown where it did not end."""

Outcome = dict[str, Any]


def complaints(outcome: Outcome) -> list[str]:
    """Return what must never be, whatever a store does."""
    found = [outcome["error"]] if outcome["error"] else []
    found += [f"wrong: {', '.join(outcome['wrong'])}"] if outcome["rows_wrong"] else []
    found += [] if outcome["recomputed"] else ["a prompt could not be computed again"]
    found += [] if outcome["detached"] else ["not detached"]
    found += [] if outcome["collected"] else ["the adapter is held after it was detached"]
    found += [f"threads are left: {', '.join(outcome['threads_left'])}"] if outcome["threads_left"] else []
    found += [f"{outcome['views_left']} views of memory are left"] if outcome["views_left"] > 0 else []
    return found


def whole(outcome: Outcome) -> list[str]:
    """Return a complaint unless every prompt came back, byte by byte."""
    return [] if outcome["is_whole"] and outcome["rows_checked"] else ["it did not come back as a whole"]


Missing = Callable[[Outcome], list[str]]
"""What returns the complaints about an outcome beside those that must never be."""


class EngineRun:
    """One run in a process of its own, begun."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection, self._log = connection, log

    def end(self) -> list[Outcome]:
        """Wait for the run; return what it told.

        Raises:
            RuntimeError: it did not end well.
        """
        self._connection.settimeout(RUN_S)
        process, told, failure = "", "", "it did not end"
        with self._connection, self._connection.makefile(encoding="utf-8") as lines:
            try:
                process = lines.readline()
                told = lines.readline()
            except TimeoutError:
                failure = f"not over after {RUN_S:.0f} s"
                if process:
                    os.kill(int(process), signal.SIGKILL)
        if told:
            return json.loads(told)  # type: ignore[no-any-return]  # a list, by the run's own word
        said = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        errors = [line for line in said if "Error" in line] or said
        raise RuntimeError(f"{failure}: {(errors or [''])[-1][:ERROR_CHARACTERS_MAX]}; see {self._log}")


class EngineRunner:
    """Runs of the engine over stores in one temporary directory, and what they told."""

    def __init__(self, installation: Installation, root: Path, stores: Sequence[str]) -> None:
        self.installation, self.root, self.stores = installation, root, stores
        self._urls: dict[str, str] = {}
        self._numbers = 0
        self._services: dict[str, ServeProcess] = {}
        self._cluster = ExitStack()
        self._socket = root / "runs"

    @cached_property
    def linker_refusal(self) -> str:
        """What a version of the engine is told that loads no linker but its own; nothing for the others."""
        return str(self.understood("linker")["refusal"])

    @classmethod
    @contextmanager
    def running(cls, stores: Sequence[str], directory: Path | None = IN_MEMORY) -> Iterator["EngineRunner"]:
        """Install the engine if need be, and run its process; keep the directory with its logs after a failure."""
        runner = cls(install(), Path(mkdtemp(prefix="e2e-sglang-", dir=directory)), stores)
        with runner._engine():
            yield runner
        shutil.rmtree(runner.root, ignore_errors=True)

    @contextmanager
    def _engine(self) -> Iterator[None]:
        """Run the process that imports the engine, and is forked for every run."""
        command = [str(self.installation.python), "-W", "ignore", "-m", "tests.engines.sglang.job", str(self._socket)]
        environment = {**self.installation.environment, "PYTHONPATH": str(ROOT)}
        with (self.root / "engine.log").open("wb") as log:
            running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            if not wait_until(lambda: self._socket.exists() or running.poll() is not None, IMPORT_S):
                raise RuntimeError(f"the engine was not imported in {IMPORT_S:.0f} s, see {self.root}/engine.log")
            yield
        finally:
            self.stop_services()
            running.kill()
            running.wait()

    def fresh(self, kind: str) -> dict[str, Any]:
        """Return the extra configuration of an empty store."""
        self._numbers += 1
        directory = self.root / f"{kind}-{self._numbers}"
        if kind == "grpc" and kind not in self._urls:
            self._urls[kind] = self.serve(directory)
        if kind == "mooncake" and kind not in self._urls:
            cluster = self._cluster.enter_context(LocalCluster.running(2, SEGMENT_BYTES, LASTING))
            self._urls[kind] = cluster.url
        if kind in self._urls:
            # All runs of a check share the service, and the cluster; the revision keeps them apart.
            return self.store(self._urls[kind], revision=f"{REVISION} {self._numbers}")
        if kind == "coded":
            keys = self.root / "keys"
            keys.write_text(f"* {'3d' * 32}\n", encoding="ascii")
            keys.chmod(0o600)
            return self.store(f"file:{directory}{CODED}{keys}")
        return self.store(f"{kind}:{directory}")

    def all_fresh(self, *without: str, **settings: object) -> list[dict[str, Any]]:
        """Return an empty store of each kind."""
        return [self.fresh(kind) | settings for kind in self.stores if kind not in without]

    def store(self, url: str, **settings: object) -> dict[str, Any]:
        """Return an extra configuration."""
        return {"url": url, "revision": REVISION, **settings}

    def serve(self, directory: Path) -> str:
        """Start a service over a directory; return its URL."""
        server = ServeProcess(variables={"STORAGE": f"file:{directory}"})
        url = f"grpc://{server.address}"
        self._services[url] = server
        return url

    def pid_of(self, url: str) -> int:
        """Return the process of a service."""
        return self._services[url].child.pid

    def stop_services(self) -> None:
        """End every service."""
        for server in self._services.values():
            server.kill()
        self._services.clear()
        self._urls.pop("grpc", None)

    def clear(self) -> None:
        """End every service and the cluster, and remove their stores."""
        self.stop_services()
        self._cluster.close()
        self._urls.clear()
        for left in self.root.glob("*-*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)

    def start(self, job: EngineJob) -> EngineRun:
        """Start a run; one over a linker ends the check where there is none, and says why."""
        if job.linked and self.linker_refusal:
            pytest.skip(self.linker_refusal)
        self._numbers += 1
        log = self.root / f"run-{self._numbers}.log"
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(RUN_S)
        connection.connect(str(self._socket))
        connection.sendall(json.dumps({"job": asdict(job), "log": str(log)}).encode() + b"\n")
        return EngineRun(connection, log)

    def run(self, job: EngineJob, missing: Missing = whole, labels: Sequence[str] = ()) -> None:
        """Run it; nothing may be missing or complained of, store by store. Stores without a label have their URL."""
        self.end(self.start(job), missing, labels)

    def end(self, run: EngineRun, missing: Missing = whole, labels: Sequence[str] = ()) -> list[Outcome]:
        """Wait for a run of which nothing may be missing or complained of."""
        outcomes = run.end()
        named = zip(labels or [outcome["store"] for outcome in outcomes], outcomes, strict=True)
        complained = {label: found for label, outcome in named if (found := complaints(outcome) + missing(outcome))}
        assert not complained, complained
        return outcomes

    def prepare(self, job: EngineJob) -> None:
        """Run something that others stand on."""
        self.start(job).end()

    def understood(self, *words: str, packages: Path | None = None) -> Outcome:
        """Return what the engine understands by words of ``spoken``.

        ``packages`` is a directory of more packages for it.

        Raises:
            RuntimeError: it does not understand them.
        """
        path = [str(ROOT), *([] if packages is None else [str(packages)])]
        ended = subprocess.run(
            [str(self.installation.python), "-W", "ignore", "-m", "tests.engines.sglang.spoken", *words],
            cwd=ROOT,
            env={**self.installation.environment, "PYTHONPATH": ":".join(path), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=UNDERSTOOD_S,
        )
        self._numbers += 1
        log = self.root / f"understood-{self._numbers}.log"
        log.write_text(ended.stderr, encoding="utf-8")
        if ended.returncode:
            said = (ended.stderr.splitlines() or ["no word"])[-1]
            raise RuntimeError(f"exit status {ended.returncode}: {said[:ERROR_CHARACTERS_MAX]}; see {log}")
        return json.loads(ended.stdout.splitlines()[-1])  # type: ignore[no-any-return]  # what ``spoken`` prints
