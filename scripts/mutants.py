"""Plant known mistakes of systems of this kind, one at a time, and see that the tests catch every one.

    python scripts/mutants.py                    all of them
    python scripts/mutants.py NAME ...           some
    python scripts/mutants.py --by-simulation    by the simulator alone

Works on a copy; the tree is not touched. Exit status 1 if a mutant survives.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600
"""Longest run of all tests over one mutant."""
TEST_TIMEOUT_S = 60
"""Longest test; one that a mutant keeps from ending fails after it."""

TESTS = [
    "tests/unit/core/test_tree.py",
    "tests/unit/core/test_cache.py",
    "tests/unit/core/test_bad_calls.py",
    "tests/unit/core/test_checkpoints.py",
    "tests/unit/core/test_transfer_order.py",
    "tests/unit/core/test_at_rest.py",
    "tests/unit/core/test_operations.py",
    "tests/unit/core/test_prefetch_single_flight.py",
    "tests/unit/core/test_prefetch_early_ends.py",
    "tests/unit/core/test_layerwise_load.py",
    "tests/unit/core/test_clear_storage.py",
    "tests/unit/core/test_ledger.py",
    "tests/unit/core/test_eviction.py",
    "tests/unit/core/test_available.py",
    "tests/unit/core/test_paired_slots.py",
    "tests/unit/forward/test_forward.py",
    "tests/property/test_tree_against_model.py",
    "tests/property/test_cache_bytes.py",
    "tests/property/test_window_grid.py",
]
"""What must catch a mutant, quickest first."""

EXTERNAL_TESTS = (
    "tests/unit/external/test_external_faults.py",
    "tests/unit/external/test_external_callers.py",
)
"""What must catch a mistake in how engines' own memory is treated."""


SGLANG_TREE_TESTS = (
    "tests/unit/integrations/test_sglang_tree_slots.py",
    "tests/unit/integrations/test_sglang_tree_tiers.py",
)
"""What must catch a mutant of the tree behind SGLang's interface."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: in ``path``, ``sound`` (which stands there once) becomes ``broken``."""

    name: str
    path: str
    sound: str
    broken: str
    tests: tuple[str, ...] = ()
    """What must catch it, if not TESTS."""


MUTANTS = [
    Mutant(
        "an unlock walks to the root",
        "tree/lock.py",
        "_unpin(lock.tree, lock.node, lane + component, start)",
        "_unpin(lock.tree, lock.node, lane + component, 0)",
    ),
    Mutant(
        "a lock leaves out the node it ends in",
        "tree/lock.py",
        "changed = tree.counts.changed\n    at = node",
        "changed = tree.counts.changed\n    at = node.parent or node",
    ),
    Mutant(
        "a transfer's target is pinned at its end alone",
        "tree/lock.py",
        "full_start = node.start if node.held_count[lane] == node.end - node.start else 0",
        "full_start = node.start",
    ),
    Mutant(
        "a split forgets the locks", "tree/state.py", "upper.locks = node.locks.copy()", "upper.locks = upper.locks"
    ),
    Mutant("a split forgets what is arriving", "tree/state.py", "        _split_arriving(upper, node, offset)\n", ""),
    Mutant("a lock that begins at a cut is lost", "tree/state.py", "if page <= cut:", "if page < cut:"),
    Mutant(
        "a split is an access",
        "tree/state.py",
        "upper.stamps = node.stamps.copy()",
        "upper.stamps = [self.queues.clock + 1] * len(node.stamps)",
    ),
    Mutant(
        "a window is not counted anew after a hole",
        "window.py",
        "np.maximum.accumulate(last_hole, out=last_hole)",
        "np.minimum.accumulate(last_hole, out=last_hole)",
    ),
    Mutant(
        "a hole above the run is forgotten",
        "tree/match.py",
        "node.last_hole_before(view, component, upto) or before[component]",
        "node.last_hole_before(view, component, upto)",
    ),
    Mutant(
        "a window starts a page late",
        "window.py",
        "return end - span if end > span else 0",
        "return end - span + 1 if end > span else 0",
    ),
    Mutant(
        "only the device side of a load is pinned",
        "tree/transfer.py",
        "source_lock = lock(tree, node, end, source)",
        "source_lock = lock(tree, node, end, target)",
    ),
    Mutant(
        "two transfers bring one page",
        "tree/transfer.py",
        "lacking &= ~at.in_flight[target_lane]",
        "lacking &= ~at.in_flight[target_lane] | True",
    ),
    Mutant(
        "pages are published before their prefix",
        "tree/transfer.py",
        "return found[::-1]",
        "return found",
    ),
    Mutant(
        "pages are lost that came before their prefix",
        "tree/transfer.py",
        "return found[::-1]",
        "return found",
        ("tests/sim/test_simulation.py",),
    ),
    Mutant(
        "a state is published without Full",
        "tree/transfer.py",
        "holes &= full[offsets] >= 0 if full is not None else False",
        "holes &= True",
    ),
    Mutant(
        "eviction leaves dependants behind",
        "tree/evict.py",
        "        tree.drop(node, dependant, start, node.pages, freed)\n",
        "        pass\n",
    ),
    Mutant(
        "eviction takes one page too many each time",
        "tree/evict.py",
        "start = max(0, end - pages)",
        "start = max(0, end - pages - 1)",
    ),
    Mutant(
        "a lock leaves the pages above it evictable",
        "tree/page_counts.py",
        "protection.children[tier] += 1 if is_protected else -1",
        "pass",
    ),
    Mutant(
        "pages that arrive under a lock count as evictable",
        "tree/page_counts.py",
        "if not held_count or node.locks[lane]:",
        "if not held_count:",
    ),
    Mutant(
        "recency is lost with the child",
        "tree/state.py",
        "parent.stamps[lane] = node.stamps[lane]",
        "parent.stamps[lane] = parent.stamps[lane]",
    ),
    Mutant(
        "a freed page stays in the map",
        "tree/state.py",
        "full[start:end].copy() if whole else full[start:end][segment >= 0]",
        "full[:0]",
    ),
    Mutant(
        "the map is not rebuilt by a load",
        "ledger.py",
        "        self._apply(published.map_changes)\n",
        "",
    ),
    Mutant(
        "a duplicate keeps its peer",
        "tree/insert.py",
        "MapChange(duplicates[0], None)",
        "MapChange(duplicates[0][:0], None)",
    ),
    Mutant(
        "a page is complete when its first pool is",
        "controller/storage_tier.py",
        "        if not present:\n            whole[number][index] = False",
        "        if present:\n            whole[number][index] = True",
    ),
    Mutant(
        "a page from storage is believed",
        "storage_backends/verified.py",
        "verify_buffers(page.buffers, page.label, page.checksum if is_summed else None)",
        "None",
    ),
    Mutant(
        "a checksum goes on after a gap",
        "seal.py",
        "            self._end = -1\n            return\n",
        "            pass\n",
        tests=("tests/unit/core/test_seal.py",),
    ),
    Mutant(
        "a page that is read again is added to what was read before",
        "seal.py",
        "            self._hash.reset()\n            self._end = 0\n",
        "            self._end = 0\n",
        tests=("tests/unit/core/test_seal.py",),
    ),
    Mutant(
        "slots of the tree may be inserted again",
        "slots.py",
        "self._check(slots, _OUT)",
        "self._check(slots[:0], _OUT)",
    ),
    Mutant(
        "pages that a hanging store may fill are given back",
        "controller/controller.py",
        "free=not in_use(operation, error),",
        "free=True,",
    ),
    Mutant(
        "a cancelled transfer frees what a worker still fills",
        "controller/controller.py",
        "operation.stop()\n        self._completed.append(operation)",
        "operation.stop()\n        operation.release()\n        self._completed.append(operation)",
    ),
    Mutant(
        "a load gives slots back that an engine reads",
        "controller/controller.py",
        "return bool(operation.followers) or in_flight(error)",
        "return in_flight(error)",
    ),
    Mutant(
        "a layer has arrived before its copy",
        "controller/layerwise.py",
        "return place < len(self._copied)",
        "return place <= len(self._copied)",
    ),
    Mutant(
        "what is put while a store is cleared stays",
        "controller/jobs.py",
        "if self._storage.clearing.is_void(self):",
        "if not self._storage:",
    ),
    Mutant(
        "what was put before a store failed outlives its clear",
        "controller/jobs.py",
        "                self._take_back_if_void()\n                raise\n",
        "                raise\n",
    ),
    Mutant(
        "of a call that failed nothing is taken back",
        "controller/jobs.py",
        "self._begun_count = start + len(batch)",
        "self._begun_count = start",
    ),
    Mutant(
        "slots are handed out before there is room for all",
        "ledger.py",
        "if not all(self._make_room(tier, component, count) for component, count in counts):\n"
        "            return None\n"
        "        allocated: list[Slots] = []\n"
        "        for component, count in counts:\n"
        "            slots = self._allocators[tier][component].allocate(count)\n",
        "allocated: list[Slots] = []\n"
        "        for component, count in counts:\n"
        "            slots = self.allocate(tier, component, count)\n",
    ),
    Mutant(
        "a fork is the tree's own state",
        "ledger.py",
        "memory.duplicate(pool, sources[number], slots)",
        "memory.duplicate(pool, sources[number], sources[number])",
    ),
    Mutant(
        "a branch is not kept",
        "window.py",
        "needed[max(window(resumed, span) - start, 0) : max(resumed - start, 0)] = True",
        "needed[:] = False\n        needed[max(window(resumed, span) - start, 0) : max(resumed - start, 0)] = True",
    ),
    Mutant(
        "a demoted page keeps its old place",
        "tree/eviction_queues.py",
        "history.demoted = self.clock",
        "history.demoted = history.demoted",
    ),
    Mutant(
        "sidecars are put before their KV",
        "controller/storage_tier.py",
        "return cls(backend, guard, layout, identity.owners(layout), memory, reads, writes)",
        "return cls(backend, guard, layout, identity.owners(layout), memory, reads, writes[::-1])",
    ),
    Mutant(
        "sidecars are got before their KV",
        "controller/storage_tier.py",
        "return cls(backend, guard, layout, identity.owners(layout), memory, reads, writes)",
        "return cls(backend, guard, layout, identity.owners(layout), memory, reads[::-1], writes)",
    ),
    Mutant(
        "sidecars are copied to the host before their KV",
        "controller/jobs.py",
        "for component, pool in self._layout.transfer_order:",
        "for component, pool in self._layout.transfer_order[::-1]:",
    ),
    Mutant(
        "pages go to storage pool by pool",
        "controller/storage_tier.py",
        "        listed.sort(key=itemgetter(0))\n",
        "",
    ),
    Mutant(
        "a look-up asks for the first pool alone",
        "controller/jobs.py",
        "pools = [storage.pools(component) for component in range(len(asked))]",
        "pools = [storage.pools(component)[:1] for component in range(len(asked))]",
    ),
    Mutant(
        "a window takes pages along that other locks pin",
        "tree/evict.py",
        "tree.drop(node, dependant, 0, min(end, node.first_pinned(dependant)), freed)",
        "tree.drop(node, dependant, 0, end, freed)",
    ),
    Mutant(
        "loads that are over are remembered for ever",
        "transfers.py",
        "del self._loads[job]",
        "pass",
    ),
    Mutant(
        "fetches that are over are remembered for ever",
        "prefetches.py",
        "del self._under_way[operation]",
        "pass",
    ),
    Mutant(
        "pages are marked as fetched for ever",
        "prefetches.py",
        "del fetched[key]",
        "pass",
    ),
    Mutant(
        "the budget of prefetches leaks",
        "prefetches.py",
        "self._host_pages_left += pages",
        "self._host_pages_left += 0",
    ),
    Mutant(
        "two prefetches read one page",
        "prefetches.py",
        "if other is not None:",
        "if other is not None and not other:",
    ),
    Mutant(
        "a stopped operation does not stop its next job",
        "controller/operation.py",
        "            if self._stopping:\n                step.stop()\n",
        "",
    ),
    Mutant(
        "a stopped transfer calls the store again",
        "controller/jobs.py",
        "while len(self._done) < len(listed) and not self._stopped:",
        "while len(self._done) < len(listed) and not (self._stopped and not self._done):",
    ),
    Mutant(
        "pages are put while a store is cleared",
        "controller/clearing.py",
        "allowed = not self._clears_count and not self._void",
        "allowed = True",
    ),
    Mutant(
        "a clear leaves the puts under way alone",
        "controller/clearing.py",
        "self._void |= self._puts",
        "self._void |= set()",
    ),
    Mutant(
        "a cancelled transfer publishes what came",
        "controller/controller.py",
        "        elif isinstance(operation.error, NEVER_KEPT):\n            self._release(operation)\n        else:\n"
        "            self._resume(operation, failure)\n",
        "        else:\n            self._resume(operation, failure)\n",
    ),
    Mutant(
        "an operation that ends at once is never told",
        "controller/controller.py",
        "        if operation.is_released:\n            self._completed.append(operation)\n        else:",
        "        if not operation.is_released:",
    ),
    Mutant(
        "letting go of windows lets go of Full",
        "tree/lock.py",
        "_unpin_all(lock, lock.held[1:])\n    lock.held = lock.held[:1]",
        "_unpin_all(lock, lock.held)\n    lock.held = []",
    ),
    Mutant(
        "the part that a match cuts off keeps its age",
        "integrations/sglang/tree_slots.py",
        "        if whole is not None:\n            self._tree.match(whole)\n",
        "",
        SGLANG_TREE_TESTS,
    ),
    Mutant(
        "a match of SGLang's cuts nothing",
        "integrations/sglang/tree_slots.py",
        "        self._cut_at_end_of(prompt)\n        end =",
        "        end =",
        SGLANG_TREE_TESTS,
    ),
    Mutant(
        "SGLang's tree evicts page by page",
        "integrations/sglang/tree_slots.py",
        "self._tree.evict_from(victim, ALL_PAGES)",
        "self._tree.evict_from(victim, 1)",
        SGLANG_TREE_TESTS,
    ),
    Mutant(
        "SGLang's duplicates stay with the tree",
        "integrations/sglang/tree_tiers.py",
        "        self._hand_out(len(duplicates))\n",
        "",
        SGLANG_TREE_TESTS,
    ),
    Mutant(
        "a load of SGLang's keeps the slots that it did not need",
        "integrations/sglang/tree_tiers.py",
        "self._hand_out(self._free_pages())",
        "self._hand_out(0)",
        SGLANG_TREE_TESTS,
    ),
    Mutant(
        "a late read fills the engine's rows",
        "external/transfer.py",
        "        with self._guard:\n            self._pages = ()\n",
        "        with self._guard:\n            pass\n",
        EXTERNAL_TESTS,
    ),
    Mutant(
        "landing memory of a late call is lent again",
        "external/store.py",
        "if run.call is None or run.call.returned:",
        "if True:",
        EXTERNAL_TESTS,
    ),
    Mutant(
        "a registration that failed is not made up",
        "external/registrations.py",
        "                raise\n            with self._guard:\n                found.is_taken = True\n",
        "                found.is_taken = True\n                raise\n            with self._guard:\n"
        "                found.is_taken = True\n",
        EXTERNAL_TESTS,
    ),
    Mutant(
        "a store that somebody must mend is tried every few seconds",
        "external/retries.py",
        "self._pauses.pause_s(self._failures_count) if passes else MENDED_PAUSE_S",
        "self._pauses.pause_s(self._failures_count)",
        EXTERNAL_TESTS,
    ),
    Mutant(
        "a fact is taken for a component",
        "pool.py",
        'domain += b"-facts-%d" % len(self.facts)',
        "pass",
        ("tests/unit/core/test_identity_facts.py",),
    ),
    Mutant(
        "a span that is not told needs nothing",
        "offline/prefix.py",
        "needed[bits, :end] = (self.in_source | self.in_target)[bits, :end]",
        "needed[bits, :end] = False",
        ("tests/unit/offline/test_untold.py",),
    ),
]


SIMULATION = ["-m", "tests.sim", "--first-violation"]
"""What ``--by-simulation`` has to catch a mutant, instead of the tests."""


def main() -> int:
    """Run the chosen mutants; print each and the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to plant, all unless given")
    parser.add_argument("--by-simulation", action="store_true", help="see which the simulator alone catches")
    given = parser.parse_args()
    unknown = set(given.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"expected names of mutants, such as {MUTANTS[0].name!r}, found {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not given.names or mutant.name in given.names]
    survivors: list[str] = []
    for mutant in chosen:
        started_s = time.monotonic()
        caught_by = caught(mutant, by_simulation=given.by_simulation)
        taken_s = time.monotonic() - started_s
        sys.stdout.write(f"{'caught  ' if caught_by else 'SURVIVED'}  {mutant.name:48} {taken_s:5.0f} s  {caught_by}\n")
        sys.stdout.flush()
        if not caught_by:
            survivors.append(mutant.name)
    sys.stdout.write(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught\n")
    return 1 if survivors else 0


def planted(mutant: Mutant, text: str) -> str:
    """Return ``text``, that of the mutant's file, with the mistake in it.

    Raises:
        ValueError: the sound text does not stand there exactly once.
    """
    count = text.count(mutant.sound)
    if count != 1:
        raise ValueError(f"{mutant.name}: expected its text once in {mutant.path}, found it {count} times")
    return text.replace(mutant.sound, mutant.broken)


def caught(mutant: Mutant, *, by_simulation: bool) -> str:
    """Return the test file that fails on the mutant, or what the simulator says; empty if nothing notices it."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for part in ("unified_cache", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "unified_cache" / mutant.path
        path.write_text(planted(mutant, path.read_text()))
        pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S)]
        command = SIMULATION if by_simulation else [*pytest, *(mutant.tests or TESTS)]
        try:
            done = subprocess.run(  # noqa: S603 -- our own command
                [sys.executable, *command],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": directory, "UNIFIED_CACHE_TEST_FIRST_FAILURE": "1"},
                timeout=TIMEOUT_S,
                capture_output=True,
                check=False,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return f"not over after {TIMEOUT_S} s"
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.name}: its tests did not run:\n{done.stdout}{done.stderr}")
    if by_simulation:
        return "" if not done.returncode else (done.stdout or done.stderr.splitlines()[-1]).splitlines()[0]
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:::| )", done.stdout, re.MULTILINE)
    return failed.group(1) if failed else ""


if __name__ == "__main__":
    sys.exit(main())
