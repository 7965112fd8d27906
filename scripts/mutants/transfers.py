"""Mistakes in what moves pages between tiers: operations, jobs, loads and prefetches."""

from scripts.mutants.mutant import Mutant

__all__ = ["TRANSFERS_MUTANTS"]

LOST = ("tests/unit/core/test_nothing_lost.py",)
READS = ("tests/unit/core/test_deadlines.py",)
METRICS = ("tests/unit/core/test_metrics.py",)
WINDOWS = ("tests/unit/core/test_superseded_windows.py",)

TRANSFERS_MUTANTS = [
    Mutant(
        "pages that a backup left out are not counted",
        "controller/backup.py",
        "run.tally.leave_out(reason, pages)",
        "run.tally.asked -= pages",
        LOST,
    ),
    Mutant(
        "a cache that closes forgets the prompts that are due",
        "controller/backup_scheduler.py",
        "self._lose(self._due.popleft(), reason)",
        "self._due.popleft()",
        LOST,
    ),
    Mutant(
        "a backup that the host had no room for is not tried again",
        "controller/backup_scheduler.py",
        "self._make_due(self._for_room.take(released_count - self._released_count))",
        "self._make_due(self._for_room.take(0))",
        LOST,
    ),
    Mutant(
        "a store that answers again is given nothing that it failed",
        "controller/backup_scheduler.py",
        "self._make_due(self._for_store.take(1))\n\n    def _try_again",
        "self._make_due(self._for_store.take(0))\n\n    def _try_again",
        LOST,
    ),
    Mutant(
        "pages that another backup is still storing count as stored",
        "core/slots.py",
        "return self._touched_at[component][slots] > 0",
        "return self._touched_at[component][slots] != 0",
        LOST,
    ),
    Mutant(
        "a prompt that the host is too small for is not put in pieces",
        "controller/backup.py",
        "yield from self._put_in_pieces(run, run.storage)",
        "pass",
        LOST,
    ),
    Mutant(
        "the device evicts a piece while it is copied",
        "controller/backup.py",
        "with ledger.pinned(ledger.tree.peek(prompt), held_end, Tier.DEVICE):",
        "with ledger.pinned(ledger.tree.peek(prompt), 0, Tier.DEVICE):",
        ("tests/sim/test_simulation.py",),
    ),
    Mutant(
        "a prefetch that the host has no room for stops there",
        "controller/prefetch.py",
        "tier=Tier.DEVICE) if end > plan.end else plan",
        "tier=Tier.DEVICE) if end < plan.end else plan",
        LOST,
    ),
    Mutant(
        "a page is complete when its first pool is",
        "controller/storage_tier.py",
        "answer is not Answer.STORED and answer is not Answer.HIT:",
        "False:",
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
        "controller/jobs.py",
        "return place < len(self._copied)",
        "return place <= len(self._copied)",
    ),
    Mutant(
        "what is put while a store is cleared stays",
        "controller/jobs.py",
        "if self._storage.epoch.is_superseded(self):",
        "if not self._storage:",
    ),
    Mutant(
        "what was put before a store failed outlives its clear",
        "controller/jobs.py",
        "                self._take_back_if_superseded()\n                raise\n",
        "                raise\n",
    ),
    Mutant(
        "of a call that failed nothing is taken back",
        "controller/jobs.py",
        "self._begun_count = start + len(batch)",
        "self._begun_count = start",
    ),
    Mutant(
        "sidecars are put before their KV",
        "controller/storage_tier.py",
        "return cls(backend, guard, layout, identity.owners(layout), memory, reads, writes, hints=hints)",
        "return cls(backend, guard, layout, identity.owners(layout), memory, reads, writes[::-1], hints=hints)",
    ),
    Mutant(
        "sidecars are got before their KV",
        "controller/storage_tier.py",
        "return cls(backend, guard, layout, identity.owners(layout), memory, reads, writes, hints=hints)",
        "return cls(backend, guard, layout, identity.owners(layout), memory, reads[::-1], writes, hints=hints)",
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
        "        if len(order) > 1:\n            listed.sort(key=lambda each: numbers[each[0]][each[1]])\n",
        "",
    ),
    Mutant(
        "a store never hears of what memory hands out",
        "controller/jobs.py",
        "                    self._send_hints()\n",
        "",
        tests=("tests/unit/core/test_recency_hints.py",),
    ),
    Mutant(
        "a look-up asks for the first pool alone",
        "controller/jobs.py",
        "pools = [storage.pools(component) for component in range(len(asked))]",
        "pools = [storage.pools(component)[:1] for component in range(len(asked))]",
    ),
    Mutant(
        "loads that are over are remembered for ever",
        "controller/prefetch.py",
        "del self._under_way[job]",
        "pass",
    ),
    Mutant(
        "fetches that are over are remembered for ever",
        "controller/prefetch.py",
        "del self._under_way[operation]",
        "pass",
    ),
    Mutant(
        "pages are marked as fetched for ever",
        "controller/prefetch.py",
        "del fetched[key]",
        "pass",
    ),
    Mutant(
        "a deadline begins with one page",
        "controller/cost_model.py",
        "one_call = min(pages_count, call_pages)",
        "one_call = 1",
        tests=READS,
    ),
    Mutant(
        "the budget of prefetches leaks",
        "controller/prefetch.py",
        "self.host_pages_left += counts[0]",
        "self.host_pages_left += 0",
    ),
    Mutant(
        "two prefetches read one page",
        "controller/prefetch.py",
        "if other is not None:",
        "if other is not None and not other:",
    ),
    Mutant(
        "a stopped operation does not stop its next job",
        "controller/operation.py",
        "            if self.is_stopping:\n                step.stop()\n",
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
        "controller/storage_tier.py",
        "allowed = not self._clears_count and not self._superseded",
        "allowed = True",
    ),
    Mutant(
        "a clear leaves the puts under way alone",
        "controller/storage_tier.py",
        "self._superseded |= self._puts",
        "self._superseded |= set()",
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
        "        if operation.state is not OperationState.RUNNING:\n            self._completed.append(operation)\n",
        "",
    ),
    Mutant(
        "a request waits for its store beyond its deadline",
        "controller/controller.py",
        "if not readiness.ended:\n                    operation.report_done",
        "if readiness.ended:\n                    operation.report_done",
        tests=("tests/unit/core/test_deadlines.py",),
    ),
    Mutant(
        "a prefetch that finds no room is given up while others hold it",
        "controller/prefetch.py",
        "yield WaitFor(holder)",
        "break",
        tests=("tests/unit/core/test_prefetch.py",),
    ),
    Mutant(
        "pages that a prefetch did not ask for count as lost",
        "controller/prefetch.py",
        "pages[tried & ~arrived]",
        "pages[~arrived]",
        tests=("tests/unit/core/test_prefetch.py",),
    ),
    Mutant(
        "a request counts whenever it is matched",
        "cache/cache.py",
        "        return self._ledger.tree.match(prompt, priority).within(prompt.reusable_pages)\n",
        "        self._lookups.count += 1\n"
        "        return self._ledger.tree.match(prompt, priority).within(prompt.reusable_pages)\n",
        tests=METRICS,
    ),
    Mutant(
        "what a load has brought from storage counts as the host's",
        "controller/ledger.py",
        "np.maximum(on_host[part.source], FROM_HOST)",
        "FROM_HOST",
        tests=METRICS,
    ),
    Mutant(
        "storage gets recency hints for superseded windows",
        "controller/backup.py",
        "enumerate(ledger.windows(found.next_end))",
        "enumerate([0 for _ in ledger.layout.components])",
        tests=WINDOWS,
    ),
    Mutant(
        "superseded windows are evicted as all others are",
        "cache/cache.py",
        "tree.supersede(lock, prompt.pages_count)",
        "pass",
        tests=WINDOWS,
    ),
]
