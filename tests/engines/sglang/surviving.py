"""Sections in which stores go wrong: nothing wrong comes back, what is missing is computed again, nothing is held."""

import shutil
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any

from tests.engines.sglang.bench import CORES, STACKS, STACKS_BY_TURNS, Bench, Outcome
from tests.engines.sglang.outcome import EngineJob
from tests.engines.stores import FaultSwitch, faulty_url
from tests.support.faulty_storage import StorageFault
from tests.support.ports import free_ports
from unified_cache.storage_backends.wrappers.layer import Method

__all__ = ["DEADLINE_S", "READ_FAULTS", "WRITE_FAULTS", "away", "damage", "doomed", "faults", "faulty", "loss"]

DEADLINE_S = 0.5
"""Of one call to a store that goes wrong."""

START_S_MAX = CLOSE_S_MAX = 30.0
"""Far less than a call hangs. SGLang waits 10 s for its threads, the adapter 5 s; the rest is for busy machines."""

STORE_CALLS_MAX = 100
"""Calls that reach a store which goes wrong, for two prompts: the next prompt's may be tried, none again and again."""


class Damage(Enum):
    """Way in which objects are damaged behind the store's back."""

    FLIP = "flip"
    SWAP = "swap"
    TRUNCATE = "truncate"
    REMOVE = "remove"


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


def damage(bench: Bench) -> None:
    """Objects that were damaged behind the store's back: misses, never wrong bytes; over ``file:``."""
    for stack in STACKS:
        for core in CORES:
            written, name = bench.fresh("file"), f"damage {stack} {core}"
            bench.prepare(name, EngineJob(stack, core, [written], "write"))
            stores = [_copy_of(bench, written) for _ in Damage]
            for store, how in zip(stores, Damage, strict=True):
                _damage(_directory(store), how)
            labels = [how.value for how in Damage]
            bench.run(name, missed, EngineJob(stack, core, stores, "read"), labels)


def _directory(store: dict[str, Any]) -> Path:
    return Path(store["url"].partition(":")[2])


def _copy_of(bench: Bench, store: dict[str, Any]) -> dict[str, Any]:
    """Return a store with the same pages in a directory of its own."""
    copy = bench.fresh("file")
    shutil.copytree(_directory(store), _directory(copy))
    return copy


def faulty(bench: Bench, method: Method, fault: StorageFault, store: dict[str, Any]) -> str:
    """Name a store of which every call of a method has a fault."""
    place = _directory(bench.fresh("faults"))
    url = faulty_url(place, store["url"])
    FaultSwitch(place).set(**{method.value: fault})
    return url


def doomed(bench: Bench, method: Method, store: dict[str, Any], server: int | None = None) -> str:
    """Name a store that vanishes in its first call of a method: its server is killed, or its directory removed."""
    place = _directory(bench.fresh("faults"))
    url = faulty_url(place, store["url"])
    if server is None:
        FaultSwitch(place).remove_directory_in(method, _directory(store))
    else:
        FaultSwitch(place).kill_process_in(method, server)
    return url


def _damage(directory: Path, how: Damage) -> None:
    """Damage every fourth object, or swap all of them two by two."""
    objects = sorted(path for path in directory.glob("*/?/*.*") if path.is_file())
    if how is Damage.SWAP:
        by_size: dict[int, list[Path]] = {}
        for path in objects:
            by_size.setdefault(path.stat().st_size, []).append(path)
        for group in by_size.values():
            for one, other in zip(group[::2], group[1::2], strict=False):
                first, second = one.read_bytes(), other.read_bytes()
                one.write_bytes(second)
                other.write_bytes(first)
        return
    for path in objects[1::4]:
        content = path.read_bytes()
        if how is Damage.FLIP:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif how is Damage.TRUNCATE:
            path.write_bytes(content[: len(content) // 2])
        else:
            path.unlink()


def faults(bench: Bench) -> None:
    """A store that hangs, fails, is full or corrupts: as it is told of pools, in look-up, get and put."""
    for stack, core in STACKS_BY_TURNS:
        written, name = bench.fresh("file"), f"fault {stack} {core}"
        bench.prepare(name, EngineJob(stack, core, [written], "write"))
        urls = [faulty(bench, method, fault, _copy_of(bench, written)) for method, fault in READ_FAULTS]
        labels = [f"{method.value}, {fault.value}" for method, fault in READ_FAULTS]
        stores = [bench.store(url, deadline_s=DEADLINE_S) for url in urls]
        bench.run(name, missed, EngineJob(stack, core, stores, "read"), labels)
        urls = [faulty(bench, method, fault, bench.fresh("file")) for method, fault in WRITE_FAULTS]
        urls += [f"{bench.fresh('file')['url']}?free=900TiB"]
        labels = [*(f"{method.value}, {fault.value}" for method, fault in WRITE_FAULTS), "put, full"]
        stores = [bench.store(url, deadline_s=DEADLINE_S) for url in urls]
        bench.run(name, missed, EngineJob(stack, core, stores), labels)


def loss(bench: Bench) -> None:
    """A directory that is removed, and a server that is killed, in look-up, get and put."""
    for stack, core in STACKS_BY_TURNS:
        written, name = bench.fresh("file"), f"loss {stack} {core}"
        bench.prepare(name, EngineJob(stack, core, [written], "write"))
        urls, labels = [], []
        for method in (Method.EXISTS, Method.GET):
            url = bench.serve(_directory(_copy_of(bench, written)))
            urls += [
                doomed(bench, method, _copy_of(bench, written)),
                doomed(bench, method, bench.store(url), bench.pid_of(url)),
            ]
            labels += [f"{method.value}, directory removed", f"{method.value}, server killed"]
        stores = [bench.store(url, deadline_s=DEADLINE_S) for url in urls]
        bench.run(name, missed, EngineJob(stack, core, stores, "read"), labels)
        url = bench.serve(_directory(bench.fresh("file")))
        urls = [
            doomed(bench, Method.PUT, bench.fresh("file")),
            doomed(bench, Method.PUT, bench.store(url), bench.pid_of(url)),
            faulty(bench, Method.PUT, StorageFault.PARTIAL_WRITE, bench.fresh("file")),
        ]
        labels = ["put, directory removed", "put, server killed", "put, only the first pages each time"]
        stores = [bench.store(url, deadline_s=DEADLINE_S) for url in urls]
        bench.run(name, survived, EngineJob(stack, core, stores), labels)
        bench.stop_services()


def away(bench: Bench) -> None:
    """A server that is not there: everything is a miss."""
    (port,) = free_ports(1)
    store = bench.store(f"grpc://127.0.0.1:{port}", deadline_s=DEADLINE_S)
    for stack in STACKS:
        bench.run(f"server away {stack}", missed, EngineJob(stack, stores=[store]))
