"""``python -m tests.soak.cluster [--seconds N] [--plain]``: engines over a cluster whose machines are killed in turn.

Eight nodes of 64 MB, two masters behind etcd, two services over the cluster, and four engines that replay the bundled
trace through it, one of them through the services. Every 20 s one of these is killed -9 (a node, the leader, a service,
a node) and comes back 10 s later. ``--plain`` has one replica and one master, for comparison. Prints its figures as
JSON; exit status 1 where a byte was wrong, a page leaked, a call outlasted its deadline, or too many pages were lost.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle

from tests.sources import ROOT
from tests.support.cache import ToyEngine, with_toy_tensors
from tests.support.cluster import ServeProcess
from tests.support.mooncake import LASTING, LocalCluster
from tests.support.waiting import wait_until
from unified_cache.components import Full
from unified_cache.controller import NotStarted, Operation, OperationState, TransferKind
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, read_trace
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import Method, Result, StorageLayer, VerifiedStorage
from unified_cache.testing.storage_contract import blank_page, label, open_for_contract, sealed_page

TRACE = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"
ENGINES, NODES, SEGMENT_BYTES = 4, 8, 64 << 20
PAGE_BYTES = 4 << 10
"""So many that the trace with two replicas, and the pages looked for, fill a half: none has to go for others."""
LAYOUT = with_toy_tensors(ModelLayout(BLOCK_TOKENS, (Full((PoolSpec("kv", PAGE_BYTES),)),)))
DEVICE_PAGES = 300
"""Room for the longest prompt of the trace; most pages of others must come from storage."""
GUARD = GuardConfig(deadline_s=5.0, breaker_pause_s_max=4.0)
LATE_S = 0.5
"""A thread of a busy machine is woken so late."""
PERIOD_S, AWAY_S = 20.0, 10.0
SETTLED_S = 8.0
"""Masters on a busy machine write down what was put so much later; a leader that dies before takes it along."""
PROBES = 1000
FOUND_MIN = 0.999


class TimedStore(StorageLayer):
    """Measures the longest call."""

    def __init__(self, backend: Store) -> None:
        super().__init__(backend)
        self.longest_s = 0.0
        self.longest = ""
        """Name of the method that took so long."""

    def _call(self, method: Method, work: Callable[[], Result], asked_count: int | None = None) -> Result:
        before_s = time.monotonic()
        try:
            return super()._call(method, work, asked_count)
        finally:
            taken_s = time.monotonic() - before_s
            if method is not Method.CLOSE and taken_s > self.longest_s:
                self.longest_s, self.longest = taken_s, method.value


@dataclass
class EngineFigures:
    """Counts and longest times of an engine."""

    requests: int = 0
    pages: int = 0
    fetched_pages: int = 0
    failed_operations: int = 0
    longest_call_s: float = 0.0
    longest_call: str = ""
    longest_wait_s: float = 0.0
    leaked: int = 0


def serve(url: str, number: int, seconds: float) -> EngineFigures:
    """Serve every fourth request of the trace, again and again; any wrong byte ends it with an assertion."""
    inner = open_storage(url)
    store = TimedStore(StorageGuard(VerifiedStorage(inner), inner.capability(), GUARD))
    toy = ToyEngine(LAYOUT, (DEVICE_PAGES,), (DEVICE_PAGES,), store, None)
    figures = EngineFigures()
    ends_s = time.monotonic() + seconds

    def run(start: Callable[[Prompt], Operation | NotStarted], prompt: Prompt) -> None:
        before_s = time.monotonic()
        operation = start(prompt)
        while operation and operation.state is OperationState.RUNNING:
            figures.failed_operations += sum(each.error is not None for each in toy.cache.poll())
            time.sleep(0.001)
        figures.longest_wait_s = max(figures.longest_wait_s, time.monotonic() - before_s)

    for request in cycle(read_trace(TRACE)[number::ENGINES]):
        if time.monotonic() > ends_s:
            break
        prompt = toy.cache.prompt(request.tokens())
        run(toy.cache.prefetch, prompt)
        run(toy.cache.load, prompt)
        lock = toy.serve(prompt)
        assert lock is not None, "the cache must go on serving"
        figures.pages += toy.verify(prompt, lock)
        run(toy.cache.backup, prompt)
        toy.cache.release(lock)
        figures.requests += 1
    toy.cache.wait_all(60)
    stats = toy.cache.stats()
    figures.fetched_pages = stats.traffic[TransferKind.PREFETCH].pages
    figures.leaked = stats.operations_live + stats.calls_quarantined + sum(each.out for each in stats.occupancy)
    figures.longest_call_s, figures.longest_call = store.longest_s, store.longest
    toy.cache.check()
    toy.cache.close()
    return figures


@dataclass
class Kill:
    """A death, and what was found of the pages put before it: at once, and while it was away."""

    what: str
    found_at_once: float = 0.0
    found_then: float = 0.0
    resumed_s: float = 0.0


@dataclass
class ClusterScene:
    """Figures of one run."""

    kills: list[Kill] = field(default_factory=list)
    engines: list[dict[str, int | float | str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)


def found_share(store: VerifiedStorage, numbers: Sequence[int]) -> float:
    """Read pages; return the share that came, with the right bytes."""
    hits = 0
    for start in range(0, len(numbers), 100):
        with suppress(StorageError):
            pages = [blank_page(label(number), PAGE_BYTES) for number in numbers[start : start + 100]]
            hits += store.get(pages).count(Answer.HIT)
    return hits / len(numbers)


def play(seconds: float, *, is_plain: bool) -> ClusterScene:
    """Run the scene."""
    scene = ClusterScene()
    masters, options = (1, "") if is_plain else (2, "&replicas=2")
    with LocalCluster.running(NODES, SEGMENT_BYTES, LASTING, masters) as cluster, ExitStack() as ends:
        url = cluster.url + options
        services = [ends.enter_context(ServeProcess(variables={"STORAGE": url})) for _ in range(2)]
        store = VerifiedStorage(open_storage(url))
        open_for_contract(store)
        urls = [url] * (ENGINES - 1) + [f"grpc://{','.join(each.address for each in services)}?timeout_s=2"]
        rest = [f"--seconds={seconds}"]
        engines = [
            ends.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.soak.cluster", f"--engine={each}", f"--number={at}", *rest],
                    stdout=subprocess.PIPE,
                )
            )
            for at, each in enumerate(urls)
        ]
        ends_s = time.monotonic() + seconds
        for at, what in enumerate(cycle(("node", "leader", "service", "node"))):
            if time.monotonic() + PERIOD_S > ends_s:
                break
            numbers = range(at * PROBES, (at + 1) * PROBES)
            for start in range(numbers.start, numbers.stop, 100):
                pages = [sealed_page(label(number), PAGE_BYTES) for number in range(start, start + 100)]
                assert wait_until(lambda: all(_put(store, pages)), PERIOD_S)  # noqa: B023 -- called at once
            time.sleep(SETTLED_S)
            scene.kills.append(_kill(cluster, services, what, at, store, numbers))
        for engine in engines:
            out, _ = engine.communicate(timeout=seconds + 120)
            if engine.returncode:
                scene.missed.append("an engine ended: a wrong byte, or no room")
            else:
                scene.engines.append(json.loads(out))
    _judge(scene, is_plain=is_plain)
    return scene


def _put(store: VerifiedStorage, pages: list[PageIO]) -> list[Answer]:
    with suppress(StorageError):
        return store.put(pages, Level.CACHED)
    return [Answer.UNAVAILABLE]


def _kill(
    cluster: LocalCluster,
    services: list[ServeProcess],
    what: str,
    at: int,
    store: VerifiedStorage,
    numbers: range,
) -> Kill:
    """Kill one machine, look for the pages, and have it come back."""
    kill, before_s = Kill(what), time.monotonic()
    leader = cluster.leading()
    node = cluster.nodes[at % NODES]
    service = services[at % len(services)]
    {"node": node.kill, "leader": cluster.masters[leader].kill, "service": service.kill}[what]()
    kill.found_at_once = found_share(store, numbers)
    if what == "leader" and len(cluster.masters) == 1:
        time.sleep(AWAY_S)  # until a person starts it
        cluster.restart_master()
    if wait_until(lambda: all(_put(store, [sealed_page(label(10**6 + at), PAGE_BYTES)])), PERIOD_S):
        kill.resumed_s = time.monotonic() - before_s
    time.sleep(max(0.0, before_s + AWAY_S - time.monotonic()))
    kill.found_then = found_share(store, numbers)
    if what == "node":
        cluster.replace_node(node)
    elif what == "service":
        service.start()
    elif len(cluster.masters) > 1:
        cluster.restart_master(leader)
    time.sleep(max(0.0, before_s + PERIOD_S - time.monotonic()))
    return kill


def _judge(scene: ClusterScene, *, is_plain: bool) -> None:
    if any(each["leaked"] for each in scene.engines):
        scene.missed.append("something leaked")
    if any(float(each["longest_call_s"]) > GUARD.deadline_s + LATE_S for each in scene.engines):
        scene.missed.append("a call outlasted its deadline")
    if not is_plain:
        scene.missed += [f"{each.what}: {each.found_then} found" for each in scene.kills if each.found_then < FOUND_MIN]


def main() -> int:
    """Play the scene, or one engine of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.engine:
        sys.stdout.write(json.dumps(asdict(serve(chosen.engine, chosen.number, chosen.seconds))))
        return 0
    scene = play(chosen.seconds, is_plain=chosen.plain)
    sys.stdout.write(json.dumps(asdict(scene), indent=1) + "\n")
    return 1 if scene.missed else 0


if __name__ == "__main__":
    sys.exit(main())
