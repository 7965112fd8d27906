"""Sections of SGLang over our linker: its own tree without HiCache, on the CPU, and nothing stands in for a device.

linker          what is offloaded comes back, from the host tier and from a store, byte by byte; look-ups; two ranks
linker_faults   stores that hang, fail, vanish or damage bytes: nothing wrong, nobody fails, no look-up waits
linker_figures  medians of MB/s and look-ups a second, beside SGLang's own linker
linker_stages   stages of a pipeline read nobody else's pages; draft models
linker_why      the line in the log that says that nothing is restored
linker_shared   pages that HiCache has stored, loaded by the linker, and the other way round
"""

import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.engines.sglang.bench import CORES, STACKS, STACKS_BY_TURNS, Bench, Outcome, whole
from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.surviving import DEADLINE_S, READ_FAULTS, WRITE_FAULTS, doomed, faulty
from tests.engines.stores import FaultSwitch
from tests.support.faulty_storage import StorageFault
from unified_cache.integrations.engine_store.hit_watch import REQUESTS_MIN
from unified_cache.storage_backends.wrappers.layer import Method

__all__ = ["linker", "linker_faults", "linker_figures", "linker_shared", "linker_stages", "linker_why"]

MOONCAKE = {
    "linker_backend": "mooncake",
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "tcp",
    "global_segment_size": 64 << 20,
}
"""Settings of SGLang's own linker, and the key by which a run chooses it."""

LATE_LOOKUPS_MAX = 5
"""Of 500: none waits long for a store, but the machine is shared."""

PATIENT = {"deadline_s": DEADLINE_S, "lookup_wait_s": 0.1}
"""Settings of stores that misbehave: a request loads what they have, and no look-up is late."""

VANISHES_IN = (Method.EXISTS, Method.GET, Method.PUT)
"""Calls in the middle of which a store vanishes."""

FIGURES_BYTES = 1 << 30
"""Host tier of the figures: room for every prompt of a round in the smallest component of every stack."""

LAYER_FIRST = {"layout": "layer_first", "io_backend": "direct"}
"""Host pools of HiCache whose pages the linker shares."""


def linker(bench: Bench) -> None:
    """Every stack on both tree cores: prompts, conversations, look-ups with holes, two ranks."""
    for stack in STACKS:
        for core in CORES:
            bench.run(f"linker {stack} {core}", whole, EngineJob(stack, core, bench.all_fresh(), linked="whole"))
            plain = bench.fresh("file")
            job = EngineJob(stack, core, [plain], layers=2, heads=1, linked="histories")
            bench.run(f"linker histories {stack} {core}", answered, job)
            _remove(plain)
    for stack, core in STACKS_BY_TURNS:
        job = EngineJob(stack, core, bench.all_fresh(), grows=True, prompts=3, pages=4, linked="whole")
        bench.run(f"linker conversation {stack} {core}", whole, job)
        stores, meeting = bench.all_fresh("packed"), str(bench.root / f"linker-meeting-{stack}")
        running = [
            bench.start(EngineJob(stack, core, stores, size=2, rank=rank, meeting=meeting, linked="whole"))
            for rank in range(2)
        ]
        for rank, run in enumerate(running):
            bench.end(f"linker two ranks {stack} {core} rank {rank}", whole, run)


def linker_faults(bench: Bench) -> None:
    """500 requests over a store of which every call of a method has a fault."""
    for (stack, core), (method, fault) in zip(STACKS_BY_TURNS * 3, (*READ_FAULTS, *WRITE_FAULTS), strict=False):
        plain = bench.fresh("file")
        store = bench.store(faulty(bench, method, fault, plain), **PATIENT)
        job = EngineJob(stack, core, [store], layers=2, heads=1, linked="requests")
        bench.run(f"linker {stack} {core} {method.value}, {fault.value}", unhurt, job)
        _remove(plain)
    for (stack, core), method in zip(STACKS_BY_TURNS, VANISHES_IN, strict=False):
        url = bench.serve(_directory(bench.fresh("file")))
        for kind, plain, server in (
            ("directory removed", bench.fresh("file"), None),
            ("server killed", bench.store(url), bench.pid_of(url)),
        ):
            store = bench.store(doomed(bench, method, plain, server), **PATIENT)
            job, name = EngineJob(stack, core, [store], layers=2, heads=1, linked="requests"), f"linker {stack} {core}"
            bench.run(f"{name} {method.value}, {kind}", unhurt, job)
            if not FaultSwitch(_directory(store)).is_struck:
                bench.line(False, f"{name} {method.value}, {kind}", "the store has not vanished")
        bench.stop_services()


def linker_stages(bench: Bench) -> None:
    """Two stages of a pipeline over one store, one of which has written; a draft model beside four stacks."""
    for stack, core in STACKS_BY_TURNS:
        store = bench.fresh("file") | {"lookup_wait_s": 5.0}
        first, second = (
            EngineJob(stack, core, [store], layers=2, heads=1, stage=stage, stages=2, linked="once")
            for stage in range(2)
        )
        bench.prepare(f"linker stage 0 {stack} {core}", replace(first, linked="write"))
        bench.run(f"linker stage 1, stage 0 has written, {stack} {core}", strange, second)
        for stage, job in enumerate((first, second)):
            bench.run(f"linker stage {stage} {stack} {core}", whole, job)
        if stack != "dsv4":  # SGLang groups no draft's heads with these pools
            job = EngineJob(stack, core, bench.all_fresh(), layers=2, heads=1, draft_layers=2, linked="whole")
            bench.run(f"linker draft {stack} {core}", drafted, job)


def linker_why(bench: Bench) -> None:
    """Prompts that are too short, and a store that takes nothing."""
    job = EngineJob(prompts=2 * REQUESTS_MIN, pages=1, layers=2, heads=1, linked="once")
    short = bench.fresh("file")
    refusing = bench.store(faulty(bench, Method.PUT, StorageFault.FAIL, bench.fresh("file")), deadline_s=DEADLINE_S)
    bench.run("linker why", said("0 of 0 pages looked up were found"), replace(job, stores=[short], linked="short"))
    bench.run("linker why", said("offered were stored; the store said"), replace(job, stores=[refusing]))


def _directory(plain: dict[str, Any]) -> Path:
    return Path(plain["url"].rpartition(":")[2])


def _remove(plain: dict[str, Any]) -> None:
    """Remove a ``file:`` store whose run is over: gigabytes, in memory as a rule."""
    shutil.rmtree(_directory(plain), ignore_errors=True)


def linker_shared(bench: Bench) -> None:
    """What HiCache has stored with the layout whose pages are alike, and what the linker has."""
    for stack, core in STACKS_BY_TURNS:
        if stack == "mamba":
            continue  # HiCache has no such layout of states
        for writer, reader in (("", "read"), ("write", "")):
            stores = bench.all_fresh()
            name = f"linker {'reads' if reader else 'writes for'} HiCache {stack} {core}"
            bench.prepare(name, EngineJob(stack, core, stores, "write", linked=writer, **LAYER_FIRST))  # type: ignore[arg-type]  # its fields
            bench.run(name, whole, EngineJob(stack, core, stores, "read", linked=reader, **LAYER_FIRST))  # type: ignore[arg-type]  # its fields


def linker_figures(bench: Bench) -> None:
    """Offloads, loads and look-ups, beside SGLang's linker for Mooncake over the same cluster."""
    for stack in STACKS:
        stores = bench.all_fresh()
        if stack == "dsv4" and "mooncake" in bench.stores:
            master = stores[bench.stores.index("mooncake")]["url"].partition("//")[2].partition("?")[0]
            stores.append({**MOONCAKE, "master_server_address": master})
        job = EngineJob(stack, stores=stores, rounds=5, pages=16, layers=8, host_bytes=FIGURES_BYTES, linked="figures")
        run = bench.start(job)
        for store, outcome in zip(stores, run.end(), strict=False):
            medians = {name: statistics.median(values[1:]) for name, values in outcome["figures"].items()}
            shown = ", ".join(f"{name} {median:.0f}" for name, median in medians.items())
            name = store.get("url", "SGLang's linker for Mooncake")
            told = outcome["error"] or f"{shown} (MB/s; look-ups a second)"
            bench.line(not outcome["error"], f"linker figures {stack} {name}", told)


def answered(outcome: Outcome) -> list[str]:
    """Return what a run of requests has to keep."""
    found = [] if outcome["rows_checked"] else ["nothing was compared"]
    found += [f"{outcome['failed']} requests failed"] if outcome["failed"] else []
    are_late = outcome["late_lookups"] > LATE_LOOKUPS_MAX
    return found + ([f"{outcome['late_lookups']} look-ups waited"] if are_late else [])


def strange(outcome: Outcome) -> list[str]:
    """Return a complaint if anything was restored of what another stage has stored."""
    return ["pages of another stage were restored"] if any(outcome["restored_pages"]) else []


def drafted(outcome: Outcome) -> list[str]:
    """Return what a run with a draft model has to keep."""
    return whole(outcome) + ([] if "draft" in outcome["pools"] else ["the draft model's pool is not linked"])


def said(words: str) -> Callable[[Outcome], list[str]]:
    """Return what finds it missing that the log says once that nothing was restored, in these words."""

    def missing(outcome: Outcome) -> list[str]:
        lines = [line for line in outcome["warnings"] if "nothing was restored" in line]
        return [] if len(lines) == 1 and words in lines[0] else [f"expected one line with {words!r}, found {lines}"]

    return missing


def unhurt(outcome: Outcome) -> list[str]:
    """Return what a run over a store that misbehaves has to keep."""
    return answered(outcome) + ([] if outcome["store_calls"] else ["no call reached the store"])
