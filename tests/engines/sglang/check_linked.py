"""SGLang over our linker: its own tree without HiCache, on the CPU, and nothing stands in for a device."""

from dataclasses import replace
from itertools import cycle

import pytest

from tests.engines.sglang.check_surviving import DEADLINE_S, READ_FAULTS, WRITE_FAULTS, directory_of, doomed, faulty
from tests.engines.sglang.install import version
from tests.engines.sglang.outcome import EngineJob
from tests.engines.sglang.runner import STACKS_BY_TURNS, EngineRunner, Outcome, whole
from tests.engines.stores import FaultSwitch
from tests.support.store_calls import StorageFault
from unified_cache.integrations.engine_store.interface import REQUESTS_MIN
from unified_cache.integrations.sglang.versions import CHECKED
from unified_cache.storage_backends.wrappers.layer import Method

LATE_LOOKUPS_MAX = 5
"""Of 500: none waits long for a store, but the machine is shared."""

PATIENT = {"deadline_s": DEADLINE_S, "lookup_wait_s": 0.1}
"""Settings of stores that misbehave: a request loads what they have, and no look-up is late."""

FAULTS = tuple(zip(cycle(STACKS_BY_TURNS), (*READ_FAULTS, *WRITE_FAULTS), strict=False))
"""Faults by stack and core."""

VANISHES_IN = tuple(zip(STACKS_BY_TURNS, (Method.EXISTS, Method.GET, Method.PUT), strict=False))
"""Calls in the middle of which a store vanishes, by stack and core."""

SMALL = EngineJob(layers=2, heads=1)

LAYER_FIRST = EngineJob(layout="layer_first", io_backend="direct")
"""Host pools of HiCache whose pages the linker shares."""


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


def said(outcome: Outcome) -> list[str]:
    """Return a complaint unless the log says once that nothing was looked up, and so nothing restored."""
    lines = [line for line in outcome["warnings"] if "nothing was restored" in line]
    is_said = len(lines) == 1 and "0 of 0 pages looked up were found" in lines[0]
    return [] if is_said else [f"expected one line about pages looked up, found {lines}"]


def unhurt(outcome: Outcome) -> list[str]:
    """Return what a run over a store that misbehaves has to keep."""
    return answered(outcome) + ([] if outcome["store_calls"] else ["no call reached the store"])


def check_a_version_that_loads_no_linker_but_its_own_says_what_it_lacks(runner: EngineRunner) -> None:
    checked = CHECKED["UnifiedCacheExternalLinker"]
    line, _, lacking = runner.linker_refusal.partition(", which lacks what it needs: ")
    assert (line, bool(lacking)) == (("", False) if version() in checked else (checked.line(version()), True))


@pytest.mark.both_cores
def check_look_ups_over_pages_with_holes_are_those_of_sglangs_file_backend(
    runner: EngineRunner, stack: str, core: str
) -> None:
    runner.run(replace(SMALL, stack=stack, core=core, stores=[runner.fresh("file")], linked="histories"), answered)


def check_a_load_into_other_pages_than_its_own_fails(runner: EngineRunner) -> None:
    runner.run(replace(SMALL, stores=[runner.fresh("file")], linked="misplaced"))


def check_a_conversation(runner: EngineRunner, stack: str, core: str) -> None:
    runner.run(EngineJob(stack, core, runner.all_fresh(), grows=True, prompts=3, pages=4, linked="whole"))


@pytest.mark.parametrize(("on", "call"), FAULTS)
def check_500_requests_over_a_store_of_which_every_call_of_a_method_has_a_fault(
    runner: EngineRunner, on: tuple[str, str], call: tuple[Method, StorageFault]
) -> None:
    store = runner.store(faulty(runner, *call, runner.fresh("file")), **PATIENT)
    runner.run(replace(SMALL, stack=on[0], core=on[1], stores=[store], linked="requests"), unhurt)


@pytest.mark.parametrize("by", ["directory removed", "server killed"])
@pytest.mark.parametrize(("on", "method"), VANISHES_IN)
def check_500_requests_over_a_store_that_vanishes_in_a_call(
    runner: EngineRunner, on: tuple[str, str], method: Method, by: str
) -> None:
    url = runner.serve(directory_of(runner.fresh("file"))) if by == "server killed" else ""
    doom = (
        doomed(runner, method, runner.store(url), runner.pid_of(url))
        if url
        else doomed(runner, method, runner.fresh("file"))
    )
    store = runner.store(doom, **PATIENT)
    runner.run(replace(SMALL, stack=on[0], core=on[1], stores=[store], linked="requests"), unhurt)
    assert FaultSwitch(directory_of(store)).is_struck, "the store has vanished"


def check_stages_of_a_pipeline_read_nobody_elses_pages(runner: EngineRunner, stack: str, core: str) -> None:
    store = runner.fresh("file") | {"lookup_wait_s": 5.0}
    first, second = (
        replace(SMALL, stack=stack, core=core, stores=[store], stage=stage, stages=2, linked="once")
        for stage in range(2)
    )
    runner.prepare(replace(first, linked="write"))
    runner.run(second, strange)
    for job in (first, second):
        runner.run(job)


@pytest.mark.parametrize(("stack_alike", "core_alike"), [each for each in STACKS_BY_TURNS if each[0] != "dsv4"])
def check_a_draft_model(runner: EngineRunner, stack_alike: str, core_alike: str) -> None:
    """SGLang groups no draft's heads with the pools of DeepSeek-V4."""
    job = replace(SMALL, stack=stack_alike, core=core_alike, draft_layers=2, linked="whole")
    runner.run(replace(job, stores=runner.all_fresh()), drafted)


def check_the_log_says_that_nothing_is_restored(runner: EngineRunner) -> None:
    job = replace(SMALL, prompts=2 * REQUESTS_MIN, pages=1, linked="short")
    runner.run(replace(job, stores=[runner.fresh("file")]), said)


@pytest.mark.parametrize(("writer", "reader"), [("", "read"), ("write", "")])
@pytest.mark.parametrize(("stack_alike", "core_alike"), [each for each in STACKS_BY_TURNS if each[0] != "mamba"])
def check_pages_that_hicache_stored_are_loaded_and_the_other_way_round(
    runner: EngineRunner, stack_alike: str, core_alike: str, writer: str, reader: str
) -> None:
    """HiCache has no such layout of states."""
    job = replace(LAYER_FIRST, stack=stack_alike, core=core_alike, stores=runner.all_fresh())
    runner.prepare(replace(job, phases="write", linked=writer))
    runner.run(replace(job, phases="read", linked=reader))
