"""Stores whose far end is frozen, not dead: it holds its connections and answers nobody. Every call ends in time.

A process is frozen by SIGSTOP, a file system by calls of the system that do not return.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.support import store_calls
from tests.support.bucket import LocalBucket
from tests.support.cache import ToyEngine, WholePromptCache, toy_layout
from tests.support.cluster import ServeProcess, ask
from tests.support.engine_rows import EngineRows, opened_store
from tests.support.mooncake import LocalCluster, open_mooncake
from tests.support.mooncake_needed import needs_mooncake
from tests.support.operations import PAGE, SPANS, serve
from tests.support.vllm_tier import FACTS, ROW, HostMemory, offload_key
from tests.support.waiting import wait_until
from unified_cache.cli import storage as storage_commands
from unified_cache.cli import tool_calls
from unified_cache.controller import NotStarted, Operation, OperationState
from unified_cache.core.config import GuardConfig
from unified_cache.core.pool import Tier
from unified_cache.integrations.vllm import lookups
from unified_cache.integrations.vllm.chunks import ChunkTier
from unified_cache.integrations.vllm.settings import TierSettings
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Store
from unified_cache.storage_backends.url import open_storage

GUARD = GuardConfig(deadline_s=0.9)
LATE_S = 0.85
"""For copies, and a machine that wakes a thread late: less than a second deadline."""
CLIENT = "timeout_s=0.2"
"""A client of the service that is done with all its tries a little before the guard is."""
OVER_S = 60.0
"""For a transfer to end at all; reached only by a bug."""


@dataclass(frozen=True)
class FarEnd:
    """The far end of a store's calls: a process, or a file system."""

    make: Callable[[], Store]
    freeze: Callable[[], None]
    thaw: Callable[[], None]
    answers_lookups: bool = True
    """Whether look-ups go to it; of pages on a node the master answers, until it is known that the node does not."""


@contextmanager
def service(_: pytest.FixtureRequest) -> Iterator[FarEnd]:
    with ServeProcess(variables={"STORAGE": "memory:", "STORAGE_BYTES": "64MiB"}) as server:
        url = f"grpc://{server.address}?{CLIENT}"
        yield FarEnd(lambda: open_storage(url), server.freeze, server.thaw)


@contextmanager
def bucket(request: pytest.FixtureRequest) -> Iterator[FarEnd]:
    running: LocalBucket = request.getfixturevalue("bucket")
    url = running.new_url()
    yield FarEnd(lambda: open_storage(url), running.process.stop, running.process.cont)


@contextmanager
def mooncake_node(_: pytest.FixtureRequest) -> Iterator[FarEnd]:
    with LocalCluster.running() as cluster:
        (node,) = cluster.nodes
        yield FarEnd(lambda: open_mooncake(cluster), node.stop, node.cont, answers_lookups=False)


@contextmanager
def mooncake_master(_: pytest.FixtureRequest) -> Iterator[FarEnd]:
    with LocalCluster.running() as cluster:
        yield FarEnd(lambda: open_mooncake(cluster), cluster.master.stop, cluster.master.cont)


class FreezingDisk(Disk):
    """A disk over a network: none of its calls begins while it is frozen, and nothing is known to be in memory."""

    thawed = Event()

    def __getattribute__(self, name: str) -> object:
        FreezingDisk.thawed.wait()
        return super().__getattribute__(name)

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@contextmanager
def file_system(request: pytest.FixtureRequest) -> Iterator[FarEnd]:
    path: Path = request.getfixturevalue("tmp_path")
    thawed = FreezingDisk.thawed
    thawed.set()
    yield FarEnd(lambda: FileStorage.open(path, disk=FreezingDisk()), thawed.clear, thawed.set)


FAR_ENDS = [
    service,
    bucket,
    file_system,
    pytest.param(mooncake_node, marks=needs_mooncake),
    pytest.param(mooncake_master, marks=needs_mooncake),
]


@pytest.fixture(params=FAR_ENDS)
def far_end(request: pytest.FixtureRequest) -> Iterator[FarEnd]:
    with request.param(request) as end:
        try:
            yield end
        finally:
            end.thaw()


@dataclass
class CacheCalls:
    """Transfers of a cache that an engine embeds, and its one call that asks the store itself."""

    end: FarEnd
    undo: ExitStack = field(default_factory=ExitStack)
    is_sound: bool = False

    def __post_init__(self) -> None:
        self.toy = ToyEngine(toy_layout(SPANS, PAGE), (24, 16), (24, 16), None, None)
        config = replace(self.toy.cache.config, guard=GUARD)
        self.toy.cache.close()
        pools = list(self.toy.pools.values())
        self.toy.cache = WholePromptCache.open(
            self.toy.layout, config, pools, identity=self.toy.identity, storage=self.end.make()
        )
        self.undo.callback(self.toy.cache.close)
        self.prompt = serve(self.toy, 8)
        assert self.toy.cache.wait_all(OVER_S) == []
        self.over(self.toy.cache.backup(self.prompt))
        assert self.is_sound

    def until_sound(self, call: Callable[[int], None]) -> None:
        """Make a call again until it was in time: of a machine under load a sound far end may be late, too."""
        numbers = count(10)

        def is_in_time() -> bool:
            call(next(numbers))
            return self.is_sound

        assert wait_until(is_in_time, OVER_S)

    def over(self, operation: Operation | NotStarted) -> None:
        """Poll until a transfer is over for its caller; its pages may be in quarantine then."""
        assert operation
        assert wait_until(lambda: operation in self.toy.cache.poll(), OVER_S)
        self.is_sound = operation.state is OperationState.DONE and operation.pages_count > 0

    def get(self, number: int) -> None:
        self.toy.forget(Tier.DEVICE, Tier.HOST)
        self.over(self.toy.cache.prefetch(self.prompt))

    def put(self, number: int) -> None:
        self.toy.forget(Tier.DEVICE, Tier.HOST)
        self.over(self.toy.cache.backup(serve(self.toy, 8, number * 8 * PAGE)))

    def exists(self, number: int) -> None:
        self.toy.forget(Tier.DEVICE, Tier.HOST)
        self.is_sound = self.toy.cache.explain(self.prompt).end == 8

    def clear(self, number: int) -> None:
        self.over(self.toy.cache.clear_storage())


def test_every_call_ends_within_its_deadline_over_a_far_end_that_freezes_in_the_middle_of_one(far_end: FarEnd) -> None:
    calls = CacheCalls(far_end)
    took_s: dict[str, float] = {}

    def timed(name: str, call: Callable[[int], None], number: int) -> None:
        started_s = time.monotonic()
        call(number)
        took_s[name] = time.monotonic() - started_s

    with calls.undo, ExitStack() as thawed_first:
        thawed_first.callback(far_end.thaw)
        for call in (calls.put, calls.exists, calls.get):
            calls.until_sound(call)
        begun = Event()

        def freeze() -> None:
            begun.wait()
            far_end.freeze()

        freezing = Thread(target=freeze)
        freezing.start()
        begun.set()
        timed("get that began before", calls.get, 2)
        freezing.join()
        timed("get", calls.get, 3)
        assert not calls.is_sound
        timed("put", calls.put, 4)
        assert not calls.is_sound
        timed("exists", calls.exists, 5)
        assert not (calls.is_sound and far_end.answers_lookups)
        timed("clear", calls.clear, 6)
    assert all(seconds < GUARD.deadline_s + LATE_S for seconds in took_s.values()), took_s


@pytest.mark.parametrize(
    ("held", "command"),
    [
        ("scan,1", ("storage", "stat", "HELD")),
        ("get,1", ("storage", "verify", "HELD")),
        ("scan,1", ("storage", "gc", "HELD")),
        ("get,1", ("backup", "HELD", "TARGET")),
        ("scan,1", ("backup", "SOURCE", "HELD")),
        ("put,1", ("backup", "SOURCE", "HELD")),
        ("open,2", ("storage", "gc", "HELD", "--bytes-max", "5KiB")),
        ("remove,1", ("storage", "clear", "HELD", "--all", "--yes")),
        ("clear,1", ("storage", "clear", "HELD", "--all", "--yes")),
        ("exists,1", ("explain", "--storage", "HELD", "--tokens", "TOKENS")),
        ("manifests,1", ("conformance", "HELD")),
        ("open,1", ("conformance", "HELD", "--not-empty")),
    ],
)
def test_a_command_whose_store_hangs_ends_with_one_line(
    held: str, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FileStorage.open(tmp_path / "source")
    with opened_store(source) as store:
        store.put(EngineRows.holding(range(4)).pages(range(4)))
    monkeypatch.setattr(tool_calls, "CALL_S", 0.3)
    monkeypatch.setattr(storage_commands, "SHRINK_S", 0.3)
    (tmp_path / "tokens").write_text(str(list(range(256))), encoding="utf-8")
    monkeypatch.setattr(store_calls, "openings", count(1))
    directory = "target" if command[:2] == ("backup", "SOURCE") else "source"
    urls = {
        "HELD": f"tests.support.store_calls:held:{held}:{tmp_path / directory}",
        "SOURCE": f"file:{tmp_path / 'source'}",
        "TARGET": f"file:{tmp_path / 'target'}",
        "TOKENS": str(tmp_path / "tokens"),
    }
    ended = ask(*(urls.get(word, word) for word in command))
    assert ended.status == 1
    method = held.partition(",")[0].replace("open", "its opening")
    assert f"did not return from {method} within 0.3 s" in ended.error


def test_a_tier_of_vllm_answers_its_scheduler_at_once_and_ends_its_jobs_in_time_over_a_frozen_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "NAMES_MAX", 1)
    keys, ends = [offload_key(number) for number in range(4)], range(16, 80, 16)
    with ServeProcess(variables={"STORAGE": "memory:", "STORAGE_BYTES": "64MiB"}) as server, ExitStack() as undo:
        memory = HostMemory(16)
        undo.callback(memory.close)
        settings = TierSettings(
            url=f"grpc://{server.address}?{CLIENT}", deadline_s=GUARD.deadline_s, close_timeout_s=1.0
        )
        tier = ChunkTier.open(settings, FACTS, memory.view, ROW)
        undo.callback(tier.close)
        undo.callback(server.thaw)
        took_s: dict[str, float] = {}

        def timed(name: str, call: Callable[[], object]) -> None:
            started_s = time.monotonic()
            call()
            took_s[name] = time.monotonic() - started_s

        def looked_up(request: str) -> set[Answer]:
            for key in keys:
                tier.look_up(key, request)
            tier.step_ended()
            assert tier.wait(GUARD.deadline_s + LATE_S), "a look-up has no end"
            answers = {tier.look_up(key, request) for key in keys}
            tier.request_ended(request)
            return answers

        def ended() -> list[bool]:
            assert tier.wait(GUARD.deadline_s + LATE_S), "a job has no end"
            return [bool(end.failed) for end in tier.ended()]

        tier.store(0, keys, range(4), dict(zip(keys, ends, strict=True)).get)
        assert ended() == [False]
        assert looked_up("before") == {Answer.HIT}
        server.freeze()
        timed("load", lambda: tier.load(1, keys, range(4, 8)))
        assert ended() == [True]
        timed("store", lambda: tier.store(2, [offload_key(9)], [9], {offload_key(9): 16}.get))
        assert ended() == [True]
        timed("look-up", lambda: tier.look_up(keys[0], "frozen"))
        assert Answer.HIT not in looked_up("frozen")
        assert all(seconds < LATE_S / 2 for seconds in took_s.values()), took_s
        server.thaw()
        requests = (f"after {number}" for number in count())
        assert wait_until(lambda: looked_up(next(requests)) == {Answer.HIT}, OVER_S), "the engine goes on"
