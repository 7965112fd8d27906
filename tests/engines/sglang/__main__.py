"""SGLang over the library, end to end: ``make e2e-sglang``, or some of it by name.

    python -m tests.engines.sglang [SECTION...] [--stores file,packed]

Every run is a process of the engine's environment. A line says what held; the last one, whether all did.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.engines.sglang.install import Installation, install
from tests.support.mooncake import small_cluster
from unified_cache.cluster.child import wait_until
from unified_cache.cluster.host_port import free_ports
from unified_cache.cluster.master import MasterSettings

ROOT = Path(__file__).resolve().parents[3]
STACKS = ("full", "mla", "swa", "dsv4", "mamba")
CORES = ("python", "rust")
STORES = ("file", "packed", "grpc", "mooncake")
DAMAGES = ("flip", "swap", "truncate", "remove")
RECORDINGS = ROOT / "tests" / "unit" / "integrations" / "sglang_recordings"
RUN_S = 240.0
"""Longest time of one run, the engine's start included."""

SERVICE_S = 60.0
SERVICE_TRIES = 3
"""Ports that are tried: somebody else may take one between two looks."""

SEGMENT_BYTES = 512 << 20
REVISION = "e2e"

Outcome = dict[str, Any]


class Bench:
    """Runs of the engine over stores in one temporary directory, and what they said."""

    def __init__(self, installation: Installation, root: Path, stores: Sequence[str]) -> None:
        self.installation, self.root, self.stores = installation, root, stores
        self.failures: list[str] = []
        self._urls: dict[str, str] = {}
        self._numbers = 0
        self._services: dict[str, subprocess.Popen[bytes]] = {}

    def fresh(self, kind: str) -> dict[str, Any]:
        """Return the extra configuration of an empty store."""
        self._numbers += 1
        directory = self.root / f"{kind}-{self._numbers}"
        if kind == "mooncake":
            # All runs share the cluster; the revision keeps them apart.
            return self.store(self._urls[kind], revision=f"{REVISION} {self._numbers}")
        if kind == "grpc":
            return self.store(self.serve(directory))
        return self.store(f"{kind}:{directory}")

    def store(self, url: str, **settings: object) -> dict[str, Any]:
        """Return an extra configuration."""
        return {"url": url, "revision": REVISION, **settings}

    def serve(self, directory: Path) -> str:
        """Start a service over a directory; return its URL."""
        command = [sys.executable, "-c", "from unified_cache.cli.main import main; main()"]
        # Several services run at a time, and metrics would be served at one port by all of them.
        environment = {**os.environ, "UNIFIED_CACHE_SERVE_METRICS__LISTEN": "127.0.0.1:0"}
        for _ in range(SERVICE_TRIES):
            (port,) = free_ports(1, random.Random())
            options = ["serve", "--listen", f"127.0.0.1:{port}", "--storage", f"file:{directory}", "--host-bytes", "0"]
            with (self.root / f"service-{port}.log").open("wb") as log:
                running = subprocess.Popen([*command, *options], stdout=log, stderr=log, cwd=ROOT, env=environment)
            if wait_until(partial(_ended_or_answers, running, port), SERVICE_S) and running.poll() is None:
                url = f"grpc://127.0.0.1:{port}"
                self._services[url] = running
                return url
            running.kill()
            running.wait()
        raise RuntimeError(f"the service did not start, see {self.root}")

    def pid_of(self, url: str) -> int:
        """Return the process of a service."""
        return self._services[url].pid

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Run what the stores need, and end it."""
        with ExitStack() as stack:
            if "mooncake" in self.stores:
                settings = MasterSettings()
                self._urls["mooncake"] = stack.enter_context(small_cluster(2, SEGMENT_BYTES, settings)).url
            try:
                yield
            finally:
                self.stop_services()

    def stop_services(self) -> None:
        """End every service."""
        for running in self._services.values():
            if running.poll() is None:
                running.send_signal(signal.SIGKILL)
            running.wait()
        self._services.clear()

    def start(self, **job: object) -> "subprocess.Popen[str]":
        """Start a run."""
        environment = {**self.installation.environment, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [str(self.installation.python), "-W", "ignore", "-m", "tests.engines.sglang.job", json.dumps(job)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=(self.root / "errors.log").open("ab"),
            text=True,
        )

    def end(self, running: "subprocess.Popen[str]") -> list[Outcome]:
        """Wait for a run; return what it said, nothing if it did not end well."""
        try:
            said, _ = running.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            return []
        lines = [line for line in said.splitlines() if line.startswith("[")]
        return json.loads(lines[-1]) if running.returncode == 0 and lines else []

    def run(self, **job: object) -> list[Outcome]:
        """Run it."""
        return self.end(self.start(**job))

    def compare_trees(self, module: str, *options: str) -> None:
        """Run a program that holds our tree against the engine's, and print what it found equal."""
        command = [str(self.installation.python), "-W", "ignore", "-m", f"tests.engines.sglang.{module}", *options]
        environment = {**self.installation.environment, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=5 * RUN_S
        )
        said = ended.stdout.splitlines() if ended.returncode == 0 else (ended.stderr.splitlines() or [""])[-3:]
        for line in said:
            self._line(ended.returncode == 0, module, line)

    def say(self, name: str, outcomes: Sequence[Outcome], holds: Callable[[Outcome], bool]) -> None:
        """Print what held, store by store."""
        if not outcomes:
            self._line(False, name, "the run did not end, see errors.log")
        for outcome in outcomes:
            ok = holds(outcome) and outcome["detached"] and outcome["collected"]
            kind = outcome["store"].partition("/")[0].partition(":")[0]
            told = (
                f"{sum(outcome['restored_pages'])} of {sum(outcome['expected_pages'])} pages restored, "
                f"{outcome['rows_wrong']} of {outcome['rows_checked']} rows wrong"
            )
            faults = [outcome["error"]] if outcome["error"] else []
            faults += [] if outcome["detached"] else ["not detached"]
            faults += [] if outcome["collected"] else ["the adapter is held after it was detached"]
            self._line(ok, f"{name} {kind}", "; ".join([told, *faults]))

    def _line(self, ok: bool, name: str, told: str) -> None:
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {told}", flush=True)
        if not ok:
            self.failures.append(name)


def _ended_or_answers(running: "subprocess.Popen[bytes]", port: int) -> bool:
    with socket.socket() as probe:
        return running.poll() is not None or probe.connect_ex(("127.0.0.1", port)) == 0


def whole(outcome: Outcome) -> bool:
    """Tell whether every prompt came back, byte by byte."""
    return bool(outcome["is_whole"]) and outcome["rows_checked"] > 0


def right(outcome: Outcome) -> bool:
    """Tell whether nothing that came back was wrong, however little it was."""
    return not outcome["error"] and not outcome["rows_wrong"]


def less(outcome: Outcome) -> bool:
    """Tell whether something was lost, and nothing wrong."""
    return right(outcome) and sum(outcome["restored_pages"]) < sum(outcome["expected_pages"])


def matrix(bench: Bench) -> None:
    """Every stack on both tree cores over every store."""
    for stack in STACKS:
        for core in CORES:
            stores = [bench.fresh(kind) for kind in bench.stores]
            bench.say(f"matrix {stack} {core}", bench.run(stack=stack, core=core, stores=stores), whole)


def processes(bench: Bench) -> None:
    """What one process wrote another one reads."""
    for stack in STACKS:
        stores = [bench.fresh(kind) for kind in bench.stores]
        bench.run(stack=stack, stores=stores, phases="write")
        bench.say(f"two processes {stack}", bench.run(stack=stack, stores=stores, phases="read"), whole)


def ranks(bench: Bench) -> None:
    """Two ranks over gloo: each has its shard, or one writes for both."""
    for stack in ("full", "mla", "dsv4", "mamba"):
        stores = [bench.fresh(kind) for kind in bench.stores if kind != "packed"]
        for number, store in enumerate(stores):
            meeting = str(bench.root / f"meeting-{stack}-{number}")
            running = [
                bench.start(stack=stack, stores=[store], size=2, rank=rank, meeting=meeting) for rank in range(2)
            ]
            for rank, each in enumerate(running):
                bench.say(f"two ranks {stack} rank {rank}", bench.end(each), whole)


def talks(bench: Bench) -> None:
    """Conversations that grow: every turn is anchored on the one before."""
    for stack in ("full", "swa", "dsv4", "mamba"):
        for prefix_keys in (False, True):
            stores = [bench.fresh(kind) | {"hicache_storage_pass_prefix_keys": prefix_keys} for kind in bench.stores]
            said = bench.run(stack=stack, stores=stores, grows=True, prompts=3, pages=4)
            bench.say(f"conversation {stack}{' with prefix keys' if prefix_keys else ''}", said, whole)


def attach(bench: Bench) -> None:
    """A store that is attached while the engine runs; prompts of more pages than one batch."""
    stores = [bench.fresh(kind) for kind in bench.stores]
    said = bench.run(stack="full", stores=stores, attach=True, prompts=1, pages=300, layers=1, heads=1)
    bench.say("attached later full", said, whole)


def layouts(bench: Bench) -> None:
    """Host pools of another layout, with a buffer for each layer."""
    for stack in ("full", "mla", "swa", "dsv4"):
        stores = [bench.fresh(kind) for kind in bench.stores]
        said = bench.run(stack=stack, stores=stores, layout="layer_first", io_backend="direct")
        bench.say(f"layer first {stack}", said, whole)


def damage(bench: Bench) -> None:
    """Objects that were damaged behind the store's back: misses, never wrong bytes."""
    for stack in STACKS:
        for how in DAMAGES:
            store = bench.fresh("file")
            bench.run(stack=stack, stores=[store], phases="write")
            _damage(Path(store["url"].removeprefix("file:")), how)
            bench.say(f"damage {how} {stack}", bench.run(stack=stack, stores=[store], phases="read"), less)


def _damage(directory: Path, how: str) -> None:
    """Damage every fourth object, or swap all of them two by two."""
    objects = sorted(path for path in directory.glob("*/?/*.*") if path.is_file())
    chosen = objects[1::4]
    if how == "swap":
        by_size: dict[int, list[Path]] = {}
        for path in objects:
            by_size.setdefault(path.stat().st_size, []).append(path)
        for group in by_size.values():
            for one, other in zip(group[::2], group[1::2], strict=False):
                first, second = one.read_bytes(), other.read_bytes()
                one.write_bytes(second)
                other.write_bytes(first)
        return
    for path in chosen:
        content = path.read_bytes()
        if how == "flip":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif how == "truncate":
            path.write_bytes(content[: len(content) // 2])
        else:
            path.unlink()


def faults(bench: Bench) -> None:
    """A store that hangs, fails, is full, corrupts or vanishes, in each method: bounded, right, nothing held."""
    for fault, method in (
        ("hang", "exists"),
        ("hang", "get"),
        ("hang", "put"),
        ("fail", "exists"),
        ("fail", "get"),
        ("fail", "put"),
        ("vanish", "exists"),
        ("vanish", "get"),
        ("vanish", "put"),
        ("full", "put"),
        ("corrupt", "get"),
    ):
        for stack in ("full", "dsv4"):
            store = bench.fresh("file")
            if method != "put":
                bench.run(stack=stack, stores=[store], phases="write")
            faulty = f"tests.engines.sglang.faults:open_faulty:{fault}/{method}/{store['url']}"
            phases = "write read" if method == "put" else "read"
            started_s = time.monotonic()
            said = bench.run(stack=stack, stores=[bench.store(faulty, deadline_s=0.5)], phases=phases, timeout_s=30.0)
            bench.say(f"fault {fault} {method} {stack} ({time.monotonic() - started_s:.0f} s)", said, less)


def loss(bench: Bench) -> None:
    """A directory that is removed, and a server that is killed, under the running engine; a store that comes later."""
    for stack in ("full", "dsv4"):
        store = bench.fresh("file")
        directory = store["url"].removeprefix("file:")
        said = bench.run(stack=stack, stores=[store], remove_before_read=directory)
        bench.say(f"directory removed {stack}", said, less)
        store = bench.fresh("grpc")
        said = bench.run(stack=stack, stores=[store | {"deadline_s": 1.0}], kill_before_read=bench.pid_of(store["url"]))
        bench.say(f"server killed {stack}", said, less)
    (port,) = free_ports(1, random.Random())
    away = bench.store(f"grpc://127.0.0.1:{port}", deadline_s=0.5)
    bench.say("server away full", bench.run(stack="full", stores=[away]), less)


def trees(bench: Bench) -> None:
    """Our tree in place of the engine's own: the same scheduler, requests and slots, and random calls."""
    bench.compare_trees("tree_against_engine", "--seeds", "0", "4", "--steps", "100")
    bench.compare_trees("tree_random_calls", "--seeds", "0", "500")


def figures(bench: Bench) -> None:
    """Write and read against SGLang's file backend, in one process, by turns; medians of their ratios."""
    print("figures: time of the file backend by ours, write / read, medians of 7 rounds; in brackets processor time")
    for stack in STACKS:
        told = []
        for kind in bench.stores:
            with tempfile.TemporaryDirectory(dir=bench.root) as plain:
                stores = [{"file_storage_path": plain}, bench.fresh(kind)]
                said = bench.run(stack=stack, stores=stores, rounds=8, prompts=2, pages=16, layers=8)
            if len(said) != 2 or not all(whole(outcome) for outcome in said):
                bench.say(f"figures {stack}", said, whole)
                continue
            theirs, ours = said
            write, read, write_cpu, read_cpu = (
                # The first round makes directories, threads and page tables.
                statistics.median(t / o for t, o in zip(theirs[key][1:], ours[key][1:], strict=True))
                for key in ("write_s", "read_s", "write_cpu_s", "read_cpu_s")
            )
            told.append(f"{kind} {write:.2f} / {read:.2f} [{write_cpu:.2f} / {read_cpu:.2f}]")
        print(f"     {stack} ({said[0]['prompt_bytes'] / 1e6:.0f} MB a prompt): {'; '.join(told)}", flush=True)
        bench.stop_services()


def record(bench: Bench) -> None:
    """Keep the engine's calls for tests without it: growing conversations with prefix keys, and two prompts."""
    for stack in STACKS:
        for name, grows in (("prompts", False), ("conversation", True)):
            store = bench.fresh("file") | {"hicache_storage_pass_prefix_keys": grows}
            path = RECORDINGS / f"{stack}_{name}.json"
            said = bench.run(
                stack=stack, stores=[store], grows=grows, prompts=2, pages=5, window_pages=2, layers=2, record=str(path)
            )
            bench.say(f"recorded {stack} {name}", said, whole)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section
    for section in (matrix, processes, ranks, talks, attach, layouts, damage, faults, loss, trees, figures)
}


def main() -> None:
    """Install the engine if need be, and run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; or record")
    parser.add_argument("--stores", default=",".join(STORES), help="comma list of %(default)s")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    chosen = parser.parse_args()
    sections = {**SECTIONS, record.__name__: record}
    unknown = sorted(set(chosen.sections) - set(sections))
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}")
    installation = install()
    root = Path(tempfile.mkdtemp(prefix="e2e-sglang-", dir=chosen.directory))
    bench = Bench(installation, root, chosen.stores.split(","))
    keep = True
    try:
        with bench.serving():
            for name in chosen.sections or SECTIONS:
                sections[name](bench)
                bench.stop_services()
                for left in root.glob("*-*"):
                    if left.is_dir():
                        shutil.rmtree(left, ignore_errors=True)
        keep = bool(bench.failures)
    finally:
        if not keep:
            shutil.rmtree(root, ignore_errors=True)
    print(f"{len(bench.failures)} of the runs failed{': see ' + str(root) if bench.failures else ''}")
    sys.exit(bool(bench.failures))


if __name__ == "__main__":
    main()
