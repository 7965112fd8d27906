"""Stores that go wrong: nothing wrong comes back, what is missing is computed again, nothing is held."""

import shutil
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.runner import STACKS, EngineRunner, Outcome
from tests.engines.stores import FaultSwitch, faulty_url, without_room
from tests.support.ports import free_ports
from tests.support.store_calls import StorageFault
from unified_cache.storage_backends.wrappers.layer import Method

DEADLINE_S = 0.5
"""Of one call to a store that goes wrong."""

START_S_MAX = CLOSE_S_MAX = 30.0
"""Far less than a call hangs. SGLang waits 10 s for its threads, the adapter 5 s; the rest is for busy machines."""

STORE_CALLS_MAX = 100
"""Calls that reach a store which goes wrong, for two prompts: the next prompt's may be tried, none again and again."""


READ_FAULTS = (
    *product((Method.REGISTER, Method.EXISTS, Method.GET), (StorageFault.HANG, StorageFault.FAIL)),
    (Method.GET, StorageFault.FLIPPED_BIT),
    (Method.GET, StorageFault.SHORT_READ),
)
"""Of a store that has the pages."""

WRITE_FAULTS = (
    (Method.PUT, StorageFault.HANG),
    (Method.PUT, StorageFault.FAIL),
    (Method.PUT, StorageFault.LOST_WRITE),
    (Method.PUT, StorageFault.TORN_WRITE),
    (Method.GET, StorageFault.MISDIRECTED_READ),
)
"""Of a store that is empty at first."""


def survived(outcome: Outcome) -> list[str]:
    """Return what was not bounded, however little came back: starting, ending, and the calls between."""
    found = [] if outcome["start_s"] < START_S_MAX else [f"it started in {outcome['start_s']:.0f} s"]
    found += [] if outcome["close_s"] < CLOSE_S_MAX else [f"it was detached in {outcome['close_s']:.0f} s"]
    calls_count = outcome["store_calls"]
    return found + ([] if calls_count < STORE_CALLS_MAX else [f"the store was called {calls_count} times"])


def missed(outcome: Outcome) -> list[str]:
    """Return what was not bounded, and whether nothing was lost."""
    is_missed = sum(outcome["restored_pages"]) < sum(outcome["expected_pages"])
    return survived(outcome) + ([] if is_missed else ["nothing was lost"])


def directory_of(store: dict[str, Any]) -> Path:
    return Path(store["url"].rpartition(":")[2])


def _copy_of(runner: EngineRunner, store: dict[str, Any]) -> dict[str, Any]:
    """Return a store with the same pages in a directory of its own."""
    copy = runner.fresh("file")
    shutil.copytree(directory_of(store), directory_of(copy))
    return copy


def faulty(runner: EngineRunner, method: Method, fault: StorageFault, store: dict[str, Any]) -> str:
    """Name a store of which every call of a method has a fault."""
    place = directory_of(runner.fresh("faults"))
    url = faulty_url(place, store["url"])
    FaultSwitch(place).set(**{method.value: fault})
    return url


def doomed(runner: EngineRunner, method: Method, store: dict[str, Any], server: int | None = None) -> str:
    """Name a store that vanishes in its first call of a method: its server is killed, or its directory removed."""
    place = directory_of(runner.fresh("faults"))
    url = faulty_url(place, store["url"])
    if server is None:
        FaultSwitch(place).remove_directory_in(method, directory_of(store))
    else:
        FaultSwitch(place).kill_process_in(method, server)
    return url


def over(runner: EngineRunner, urls: Sequence[str]) -> list[dict[str, Any]]:
    return [runner.store(url, deadline_s=DEADLINE_S) for url in urls]


def check_a_store_that_hangs_fails_is_full_or_corrupts(runner: EngineRunner, stack: str, core: str) -> None:
    written = runner.fresh("file")
    runner.prepare(EngineJob(stack, core, [written], "write"))
    urls = [faulty(runner, method, fault, _copy_of(runner, written)) for method, fault in READ_FAULTS]
    labels = [f"{method.value}, {fault.value}" for method, fault in READ_FAULTS]
    runner.run(EngineJob(stack, core, over(runner, urls), "read"), missed, labels)
    urls = [faulty(runner, method, fault, runner.fresh("file")) for method, fault in WRITE_FAULTS]
    urls += [without_room(runner.fresh("file")["url"])]
    labels = [*(f"{method.value}, {fault.value}" for method, fault in WRITE_FAULTS), "put, full"]
    runner.run(EngineJob(stack, core, over(runner, urls)), missed, labels)


def check_a_directory_that_is_removed_and_a_server_that_is_killed(runner: EngineRunner, stack: str, core: str) -> None:
    written = runner.fresh("file")
    runner.prepare(EngineJob(stack, core, [written], "write"))
    urls, labels = [], []
    for method in (Method.EXISTS, Method.GET):
        url = runner.serve(directory_of(_copy_of(runner, written)))
        urls += [
            doomed(runner, method, _copy_of(runner, written)),
            doomed(runner, method, runner.store(url), runner.pid_of(url)),
        ]
        labels += [f"{method.value}, directory removed", f"{method.value}, server killed"]
    runner.run(EngineJob(stack, core, over(runner, urls), "read"), missed, labels)
    url = runner.serve(directory_of(runner.fresh("file")))
    urls = [
        doomed(runner, Method.PUT, runner.fresh("file")),
        doomed(runner, Method.PUT, runner.store(url), runner.pid_of(url)),
        faulty(runner, Method.PUT, StorageFault.PARTIAL_WRITE, runner.fresh("file")),
    ]
    labels = ["put, directory removed", "put, server killed", "put, only the first pages each time"]
    runner.run(EngineJob(stack, core, over(runner, urls)), survived, labels)


@pytest.mark.parametrize("stack_alike", STACKS)
def check_a_server_that_is_not_there_is_a_miss(runner: EngineRunner, stack_alike: str) -> None:
    (port,) = free_ports(1)
    runner.run(EngineJob(stack_alike, stores=over(runner, [f"grpc://127.0.0.1:{port}"])), missed)
