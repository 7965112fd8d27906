"""Many seeds keep every promise; the same seed does the same; and the simulation sees what it is there to see."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from tests.sim.report import run_ranks, run_seeds
from tests.sim.simulation import Simulation
from tests.sources import ROOT
from tests.support.budget import LONG, fresh_seeds
from unified_cache.core.pool import Tier
from unified_cache.tree.node import Node
from unified_cache.tree.transfer import Transfer

Undo = Callable[[], object]

SHARES = 3
"""Tests that share the seeds, so that processes can share the tests."""
SEEDS_EACH = 50 if LONG else 3
"""In short, every component set twice: once without faults and once with them."""
OPERATIONS_EACH = 5_000
RANKS_OPERATIONS = 1_200
FIRST_SEED = 24
"""The first of nine of which every three keep tiers full; two of three others may have cleared their store."""

TRANSFERS_SHARE_MIN = 0.3
NODES_MEDIAN_MIN = 85
FILL_MEDIAN_MIN = 0.5
"""Of three seeds, of which one may have cleared its store; of many, the median tree has 105 nodes and the emptiest
tier is nine tenths full."""

FAULTY_SEEDS = (10, 8, 9, 11, 7, 6)
"""One of every component set."""
CAUGHT_WITHIN = 5_000
"""Operations of a seed within which a planted mistake must show, in one of those seeds."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_seed_keeps_every_promise_after_every_operation(share: int) -> None:
    first = FIRST_SEED + share * SEEDS_EACH
    report = run_seeds(range(first, first + SEEDS_EACH), OPERATIONS_EACH)
    assert not report.violations, "\n" + "\n".join(map(str, report.violations))
    assert report.operations_count >= SEEDS_EACH * OPERATIONS_EACH
    assert report.transfers_share > TRANSFERS_SHARE_MIN
    assert report.nodes_median >= NODES_MEDIAN_MIN, report.last_line()
    assert report.fill_median >= FILL_MEDIAN_MIN, report.last_line()


@pytest.mark.parametrize("seed", [169], ids=["a put that cannot be taken back after a clear"])
def test_seeds_that_failed_once_keep_every_promise(seed: int) -> None:
    assert not run_seeds([seed], OPERATIONS_EACH).violations


def test_the_same_seed_does_the_same_again_in_another_process_too() -> None:
    (once, again, other) = (run_seeds([seed], 500).hashes[seed] for seed in (10, 10, 11))
    assert once == again
    assert once != other
    command = [sys.executable, "-m", "tests.sim", "--seed", "10", "--ops", "500", "--seeds", "1"]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=120)
    assert once in done.stdout


@pytest.mark.timeout(1800)
def test_seeds_that_no_run_has_tried_keep_every_promise_too() -> None:
    report = run_seeds(fresh_seeds(SEEDS_EACH), OPERATIONS_EACH)
    assert not report.violations, "\n" + "\n".join(map(str, report.violations))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "size"), [(12, 2), (9, 2), (16, 3), (13, 3), (15, 4)])
def test_ranks_with_stores_lag_and_luck_of_their_own_keep_the_same_trees(seed: int, size: int) -> None:
    assert run_ranks(seed, 20_000 if LONG else RANKS_OPERATIONS, size)


def test_a_planted_mistake_is_caught_and_its_seed_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages on their way are not marked, so that two transfers bring one."""
    monkeypatch.setattr(Transfer, "_mark", lambda *_, **__: None)
    report = run_seeds(FAULTY_SEEDS, CAUGHT_WITHIN, first_violation=True)
    (violation,) = report.violations
    assert f"python -m tests.sim --seed {violation.seed} --ops {violation.operations} --seeds 1" in str(violation)
    again = run_seeds([violation.seed], violation.operations)
    assert again.violations == [violation]


def put(items: Any, at: int, value: object) -> Undo:
    """Put a value into the place of another; return what puts that back."""
    before = items[at]
    items[at] = value
    return lambda: items.__setitem__(at, before)


def slots_held(simulation: Simulation, tier_component: int) -> list[int]:
    arrays = [node.slots[tier_component] for node in simulation.tree.nodes()]
    return [slot for slots in arrays if slots is not None for slot in slots.tolist() if slot > 0]


def node_of(simulation: Simulation) -> Node:
    nodes = simulation.tree.nodes()
    return next(node for node in nodes if node.held_count[0] > 1 and node.held_count[1])


def one_more(counts: Callable[[Node], Any], at: int) -> Callable[[Simulation], Undo]:
    def corrupt(simulation: Simulation) -> Undo:
        found = counts(node_of(simulation))
        return put(found, at, found[at] + 1)

    return corrupt


def lose_an_entry(simulation: Simulation) -> Undo:
    queue = simulation.tree.queues._queues[1]
    entry = queue.pop()
    return lambda: queue.append(entry)


def share_a_slot(simulation: Simulation) -> Undo:
    slots = node_of(simulation).slots[0]
    assert slots is not None
    return put(slots, 0, int(slots[1]))


def let_a_slot_out(simulation: Simulation) -> Undo:
    allocator = simulation.cache._ledger._allocators[Tier.HOST][0]
    return put(allocator._states, slots_held(simulation, simulation.components)[0], 1)


def lead_elsewhere(simulation: Simulation) -> Undo:
    paired = simulation.cache._ledger.paired
    assert paired is not None
    slot = slots_held(simulation, 0)[0]
    return put(paired.map.table, slot, 0 if paired.map.table[slot] else 1)


CORRUPTIONS: dict[str, tuple[Callable[[Simulation], Undo], bool]] = {
    "a page is counted that is not held": (one_more(lambda node: node.held_count, 0), False),
    "a lock is forgotten": (one_more(lambda node: node.locks, 1), False),
    "a tombstone is forgotten": (one_more(lambda node: node.last_tombstone, 1), False),
    "a child is forgotten": (one_more(lambda node: node.full_children, 0), False),
    "a queue lost an entry": (lose_an_entry, False),
    "two pages share a slot": (share_a_slot, True),
    "a slot is out that nobody has": (let_a_slot_out, True),
    "the map leads elsewhere": (lead_elsewhere, True),
}
"""One thing in a sound cache made wrong, and whether the audit sees it as well as the cache's own check."""


@pytest.fixture(scope="module")
def settled_simulation() -> Simulation:
    simulation = Simulation(1, faulty=False)
    simulation.run(1_500)
    while simulation.workers.tasks:
        simulation.work()
        simulation.poll()
        simulation.watch_policy()  # a poll starts what is tried again
    simulation.audit.look(simulation.claims())
    simulation.cache.check()
    return simulation


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_the_caches_own_check_sees_what_is_wrong_and_the_audit_what_is_in_two_hands(
    corruption: str, settled_simulation: Simulation
) -> None:
    corrupt, is_audited = CORRUPTIONS[corruption]
    undo = corrupt(settled_simulation)
    with pytest.raises(AssertionError):
        settled_simulation.cache.check()
    with pytest.raises(AssertionError) if is_audited else nullcontext():
        settled_simulation.audit.look(settled_simulation.claims())
    undo()
    settled_simulation.audit.look(settled_simulation.claims())
    settled_simulation.cache.check()


def test_wrong_bytes_are_seen_at_once(settled_simulation: Simulation) -> None:
    memory, pool = settled_simulation.memory, settled_simulation.cell.layout.pools[0]
    slot = slots_held(settled_simulation, 0)[0]
    row = memory.on_device(pool, np.array([slot], np.int32))
    memory.device[row] += 1
    with pytest.raises(AssertionError, match="wrong bytes"):
        settled_simulation.audit.look_at_bytes()
    memory.device[row] -= 1
    settled_simulation.audit.look_at_bytes()
