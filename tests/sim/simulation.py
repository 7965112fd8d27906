"""One seed's world: the real tree, cache and controller, an engine, lagging copies, a store that lies, one thread."""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from tests.sim.audit import Audit, Claim, Picture
from tests.sim.cells import CELLS, Cell
from tests.sim.claims import JobClaims
from tests.sim.engine import SETTLE_S, SimEngine
from tests.sim.faults import DecliningStorage, Faults
from tests.sim.liveness import Liveness
from tests.sim.memory import ContentMemory, Contents, KeyNumbers
from tests.sim.schedule import EVICTING, FILLING, FULL, KINDS, WRITING, weights_of
from tests.sim.settings import config_of
from tests.sim.workers import LaggingWorkers, ScheduledJob
from tests.support.cache_model import Flow, flow_of, prompt_of
from tests.support.clock import ManualClock
from tests.support.operations import head_of
from tests.support.ranks import Declining
from tests.support.store_calls import ScriptedStorage, raising
from tests.support.tables import check_tables
from tests.support.waiting import wait_until
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import LayerwiseLoad, NotStarted, Operation, OperationState
from unified_cache.controller.backup_scheduler import RETRY_PAUSE_S_MAX
from unified_cache.controller.jobs import BackupJob, FetchJob, LoadJob
from unified_cache.controller.ranks.group import LocalRanks, RankGroup
from unified_cache.core.config import WritePolicy
from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, Pages, Tier
from unified_cache.core.seal import Label, verify_buffers
from unified_cache.storage_backends.common.breaker import MENDED_PAUSE_S
from unified_cache.storage_backends.wrappers.layer import Method

OPERATION_S_MAX = 0.002
"""Time that an operation of the owner takes, at most."""
DELAY_S = 0.05  # of a store
DECLINE_RATE = 0.05
"""Per allocation of a transfer of one rank of several: others may have had that room."""
REQUESTS_MAX = 5
TASKS_MAX = 14
ARRIVALS_MAX = 2
CHECK_EVERY = 8
"""Operations between two calls of ``UnifiedCache.check``, beside the audit after each one."""
VERIFY_EVERY = 500
"""Operations after which every seal on the host is verified."""
SETTLE_STEPS_MAX = 5_000
SETTLE_PAUSES_MAX = 200
SERVED_AFTER = 5
"""Prompts that must be served as ever once all faults have stopped."""
IDENTITY = Identity("simulated")
EXPECTED = ("on purpose", "were put", "was cancelled", "took longer than", "failed on ranks")
"""What an operation may fail with, in the words of whoever made it fail; anything else is a bug."""

_NO_NUMBERS: Contents = np.empty(0, np.int64)


@dataclass
class SimTally:
    """Counts of what a simulation has done."""

    operations: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    nodes: list[int] = field(default_factory=list)
    """In the tree, after each operation."""
    fill: list[float] = field(default_factory=list)
    """After each operation: how full the tier is that has most room, of device, host and storage."""


AWAY_RATE = 0.15
"""Of caches whose store is away when they open."""


class Simulation:
    """One simulation: the operations of a seed, one by one. Raises AssertionError at the first broken promise."""

    def __init__(self, seed: int, *, faulty: bool, ranks: RankGroup = LocalRanks()) -> None:
        self.cell: Cell = CELLS[seed % len(CELLS)]
        self.rng = random.Random(seed)
        self.is_group = ranks.size > 1
        own = random.Random(f"rank {ranks.rank} of {seed}") if self.is_group else self.rng
        self.faults = Faults(own, on=False)
        self.clock = ManualClock()
        self.numbers = KeyNumbers()
        self.memory = ContentMemory(self.cell)
        layout = self.cell.layout
        identity = replace(IDENTITY, shard=head_of(ranks).shard) if self.is_group else IDENTITY
        self.owners = identity.owners(layout)
        self.workers = LaggingWorkers(own, self.clock, self.memory, self.faults)
        self.stored = DecliningStorage(self.cell.stored_bytes, self.faults, own)
        self.store = ScriptedStorage(self.stored, self.faults, own, delay_s=DELAY_S, sleep=self.clock.sleep)
        self.config = config = config_of(self.cell, seed)
        self.cache = UnifiedCache(layout, config, self.memory, self.workers, identity, ranks, self.clock)
        self.liveness = Liveness(self.cache, self.owners)
        self.away: ScriptedStorage | None = None
        """The store that the cache waits for."""
        self.tally = SimTally()
        if self.rng.random() < AWAY_RATE and not self.is_group:
            self.await_store()
        else:
            self.attach()
        self.faults.on = faulty
        self.declining = Declining(own, DECLINE_RATE if self.is_group and faulty else 0.0)
        if self.is_group:
            self.declining.install(self.cache)
        self.tree = self.cache._ledger.tree
        self.audit = Audit(self.cache, self.tree, self.memory, self.numbers)
        self.engine = SimEngine(self.cell, self.rng, self.cache, self.tree, self.audit)
        self.engine.rounds_max *= ranks.size
        self.components = len(layout.components)
        self.requests = self.engine.requests
        self.prompts = self.engine.prompts
        self.operations: dict[Operation, tuple[Prompt, Contents]] = {}
        self.claim_of: dict[ScheduledJob, Claim] = {}
        self.arrivals: dict[LayerwiseLoad, ScheduledJob] = {}
        """What the engine reads of loads under way, and which job brings it."""
        self.jobs = JobClaims(self.cache, self.audit, self.engine.happened)
        self.held: list[ScheduledJob] = []
        """Jobs that have ended and whose operation waits until the engine has left it."""
        self.brought: list[tuple[Flow, Contents]] = []
        """What the last poll had to publish: what jobs brought, of which pages."""
        self.is_ending = False
        self.tally.happened = self.engine.happened
        self.audit.look([])
        self.trace = hashlib.sha256()
        self.acts = self.acts_by_kind()
        self.conditions = self.conditions_of_acts()

    def acts_by_kind(self) -> dict[str, Callable[[], object]]:
        """Return each operation by its kind."""
        return {
            "begin": self.engine.begin,
            "insert": self.engine.insert,
            "end": self.engine.end_one,
            "give_up": self.engine.give_up,
            "trim": self.engine.trim,
            "squeeze": self.engine.squeeze,
            "reset": self.reset,
            "backup": self.backup,
            "load": self.load,
            "prefetch": self.prefetch,
            "work": self.work,
            "poll": self.poll,
            "cancel": self.cancel,
            "follow": self.begin_layerwise,
            "leave": self.end_layerwise,
            "clear": self.clear,
            "drain": self.drain,
            "finish": self.finish_early,
            "detach": self.detach,
            "attach": self.attach,
            "await": self.await_store,
            "arrive": self.arrive,
        }

    # ---- the run ---------------------------------------------------------------------------------------------

    def run(self, operations: int) -> None:
        """Do so many operations, each followed by a look at everything."""
        for number in range(operations):
            self.step(number)

    def step(self, number: int) -> None:
        self.do(self.choose())
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            self.cache.check()
        if number % VERIFY_EVERY == VERIFY_EVERY - 1:
            self.verify()

    def do(self, kind: str) -> None:
        """Do one operation, and look at all that it may have changed."""
        self.clock.sleep(self.rng.random() * OPERATION_S_MAX)
        before = self.audit.picture
        has_transfers = kind in ("backup", "load", "prefetch", "poll") and self.faults.on
        with self.declining.armed() if has_transfers else nullcontext():
            outcome = self.acts[kind]()
        has_begun_others = self.watch_policy()
        self.note(kind, outcome)
        if kind == "work" or outcome is None:
            self.audit.look_at_bytes()
        else:
            self.compare(kind, before, self.audit.look(self.claims()))
            self.check_published(may_be_gone=has_begun_others)
        if not self.workers.tasks and not self.operations:
            check_tables(self.cache, [request.lock for request in self.requests], self.faults.failed_removals)

    def drain(self) -> None:
        """Let all that is under way end."""
        while self.arrivals:
            self.do("leave")
        for _ in range(SETTLE_STEPS_MAX):
            if not self.operations:
                break
            self.do("work")
            self.do("poll")
        assert not self.workers.tasks, "transfers go on for ever"
        assert not self.operations, "an operation is never over"

    def note(self, kind: str, outcome: object) -> None:
        self.tally.operations[kind] += 1
        if not self.is_ending and self.config.host_pages == self.cell.host_pages:  # a buffer fills the store slowly
            self.tally.nodes.append(self.audit.picture.nodes_count)
            self.tally.fill.append(self.fill())
        self.trace.update(repr((kind, outcome)).encode())

    def fill(self) -> float:
        ledger = self.cache._ledger
        fills = [1 - ledger.free_count(tier, 0) / ledger.capacity(tier, 0) for tier in Tier]
        return min(*fills, 1.0 if self.is_group else self.stored.bytes_used / self.cell.stored_bytes)

    def choose(self) -> str:
        """Draw the next operation, of those that mean something now."""
        is_full = bool(self.tally.fill) and self.tally.fill[-1] > FULL
        weights = weights_of(is_filling=not is_full, is_writing=self.config.write is not WritePolicy.ON_CALL)
        while True:
            (kind,) = self.rng.choices(KINDS, weights)
            kind = self.instead_of(kind)
            if kind not in self.conditions or self.conditions[kind]():
                return kind

    def instead_of(self, kind: str) -> str:
        """Return what is done in the place of what there is too much of already."""
        if kind == "begin" and len(self.requests) >= REQUESTS_MAX:
            return "insert" if self.is_computing() else "end"
        if kind in ("backup", "load", "prefetch") and len(self.operations) >= TASKS_MAX:
            return "work"
        return kind

    def conditions_of_acts(self) -> dict[str, Callable[[], bool]]:
        """Return when operations mean something, on all ranks alike; those that are not named always do."""

        def has_tasks() -> bool:
            return bool(self.operations)

        return {
            "insert": self.is_computing,
            "give_up": self.is_computing,
            "trim": self.is_computing,
            "end": lambda: any(request.inserted for request in self.requests),
            "work": has_tasks,
            "cancel": has_tasks,
            "finish": has_tasks,
            "follow": lambda: not self.is_group and len(self.arrivals) < ARRIVALS_MAX and bool(self.loads()),
            "leave": lambda: bool(self.arrivals),
            "clear": lambda: self.has_store,
            "detach": lambda: (self.has_store or self.away is not None) and not self.arrivals,
            "attach": lambda: not self.has_store and self.away is None,
            "await": lambda: not self.is_group and not self.has_store and self.away is None,
            "arrive": lambda: self.away is not None and bool(self.away.before),
        }

    def is_computing(self) -> bool:
        return any(not request.inserted for request in self.requests)

    def reset(self) -> object:
        self.tally.happened["reset under way"] += bool(self.requests or self.workers.tasks)
        self.cache.reset()
        self.operations.clear()
        self.arrivals.clear()
        self.held.clear()
        return self.clock.now_s

    @property
    def has_store(self) -> bool:
        return self.workers.store is not None

    def attach(self) -> object:
        """Take the store over, with all that is in it."""
        self.workers.store = ScriptedStorage(self.store, leaves_open=True)
        self.liveness.stores.append(self.workers.store)
        was_faulty, self.faults.on = self.faults.on, False
        self.cache.attach(self.workers.store)
        self.faults.on = was_faulty
        return self.clock.now_s

    def await_store(self) -> object:
        """Give the cache a store that is away."""
        self.away = ScriptedStorage(self.store, leaves_open=True)
        self.away.before = dict.fromkeys({*Method} - {Method.CLOSE}, raising(StorageError("away", retryable=True)))
        self.cache.await_store(self.away, self.clock)
        return self.clock.now_s

    def arrive(self) -> object:
        """Have the store be there when it is next tried, which is before the next poll."""
        assert self.away is not None
        arrival = self.cache._arrival
        assert arrival is not None, "the store was attached while it was away"
        assert wait_until(lambda: not arrival._opening._is_trying, SETTLE_S)
        self.away.before.clear()
        self.clock.sleep(MENDED_PAUSE_S)
        was_faulty, self.faults.on = self.faults.on, False
        assert arrival._opening.reach(SETTLE_S) is not None, "a store that is there is not attached"
        self.faults.on = was_faulty
        return self.clock.now_s

    def look_for_store(self) -> None:
        """Note that a poll has attached the store that was away, which it does once that is there."""
        if self.away is not None and not self.away.before:
            assert self.cache._storage is not None, "a poll did not attach a store that is there"
            self.workers.store = self.away
            self.away.take()
            self.liveness.stores.append(self.workers.store)
            self.away = None
            self.tally.happened["attached late"] += 1

    def detach(self) -> object:
        """Let go of the store; what was under way ends, and keeps what has come."""
        numbers = [numbers for _, numbers in self.operations.values()]
        self.engine.subject = np.concatenate(numbers) if numbers else _NO_NUMBERS
        had_store = self.has_store
        self.tally.happened["detached under way"] += bool(self.operations)
        self.tally.happened["detached while away"] += self.away is not None
        assert self.cache.detach() == [], "a store hangs"
        self.workers.store = self.away = None
        if had_store:  # of one that never came nothing was under way: what moves within memory goes on
            self.operations.clear()
            self.held.clear()
        return self.clock.now_s

    # ---- transfers -------------------------------------------------------------------------------------------

    def backup(self) -> object:
        """Back up what a request has just computed; now and then any prompt."""
        inserted = [request for request in self.requests if request.inserted]
        if inserted and self.rng.random() < 0.8:
            request = self.rng.choice(inserted)
            prompt, self.engine.subject = request.prompt, request.numbers
        else:
            prompt, self.engine.subject = self.prompts.known()
        self.prompts.note_backup(prompt, self.engine.subject)
        return self.watch(self.cache.backup(prompt), prompt)

    def load(self) -> object:
        prompt, self.engine.subject = self.prompts.backed_up()
        return self.watch(self.cache.load(prompt), prompt)

    def prefetch(self) -> object:
        prompt, self.engine.subject = self.prompts.backed_up()
        missing = (prompt.reusable_pages - self.cache.match(prompt).host_end) * self.cell.layout.page_size
        operation = self.cache.prefetch(prompt)
        is_worth_it = self.has_store and missing >= self.config.prefetching.threshold_tokens
        assert bool(operation) == is_worth_it, "a prefetch that is not worth it, or none that is"
        return self.watch(operation, prompt) if operation else operation.value

    def watch_policy(self) -> bool:
        """Note the backups that the write policy has begun; tell whether it has."""
        known_count = len(self.operations)
        for task in self.workers.tasks:
            if task.operation not in self.operations:
                prompt = prompt_of(task.job)
                self.operations[task.operation] = prompt, self.numbers.of(prompt.keys)
                self.tally.happened["backed up by policy"] += 1
        return len(self.operations) > known_count

    def watch(self, operation: Operation | NotStarted, prompt: Prompt) -> object:
        assert operation, "declined, though little is under way"
        if any(task.operation is operation for task in self.workers.tasks):
            self.operations[operation] = (prompt, self.engine.subject)
        return operation.kind.value, operation.pages_count

    def work(self) -> object:
        done = self.workers.step()
        if done == "idle":
            due = min((task.due_s for task in self.workers.tasks), default=0.0)
            self.clock.now_s = max(self.clock.now_s, due)
            done = self.workers.step()
        return done

    def poll(self) -> object:
        """Let one operation go on, those that the engine has left and those that waited for them; None if none does.

        What they publish is of their own prompts.
        """
        self.watch_policy()
        queued = self.workers.tasks.copy()
        mark = self.audit.mark()
        awaited = {operation: operation.awaited for operation in self.operations if operation.awaited is not None}
        keeping = [operation for operation in self.operations if operation.keep is not None]
        over = self.cache.poll()
        self.look_for_store()
        is_any_woken = any(operation.awaited is not other for operation, other in awaited.items())
        moved = [task for task in queued if task not in self.workers.tasks]
        assert len(moved) <= 1, "one completion moved two operations"
        ended = [*self.held, *moved]
        self.held = [task for task in ended if task.operation.job is task.job and not task.operation.is_released]
        gone_on = [task for task in ended if task not in self.held]
        assert not any(task in gone_on for task in self.arrivals.values()), "a load went on while an engine read it"
        self.brought = [
            (flow_of(task.job, self.operations[task.operation][0]), self.operations[task.operation][1])
            for task in gone_on
            if task.error is None
            and task not in self.jobs.bounced
            and task.operation.error is None
            # Without a store nothing stays pinned, and the windows of earlier ends may take the room of the last one's.
            and not isinstance(task.operation.job, BackupJob)
            # What has come on this rank may not have come on others, and several may go on in one poll.
            and not self.is_group
        ]
        kept = [operation for operation in keeping if operation.keep is None]
        self.tally.happened["kept before its end"] += len(kept)
        subjects = [self.operations[operation][1] for operation in [*kept, *(task.operation for task in gone_on)]]
        self.engine.subject = np.concatenate(subjects) if subjects else _NO_NUMBERS
        self.jobs.bounced.intersection_update(self.workers.tasks)
        for operation in over:
            tally = operation.tally
            assert tally.asked == tally.arrived + tally.already + tally.left_out_count, f"counts do not add up: {tally}"
            assert operation.error is None or any(words in str(operation.error) for words in EXPECTED), operation.error
            self.tally.happened[f"{operation.kind.value} {operation.state.value}"] += 1
            self.tally.happened[f"{operation.kind.value} pages"] += operation.pages_count
        waiting = {operation for operation in self.operations if operation.awaited is not None}
        self.tally.happened["waited for another"] += len(waiting)
        under_way = {task.operation for task in [*self.workers.tasks, *self.held]} | waiting
        self.operations = {operation: of for operation, of in self.operations.items() if operation in under_way}
        if not moved and not gone_on and not over and not is_any_woken and self.audit.mark() == mark:
            return None
        return [(operation.kind.value, operation.state.value, operation.pages_count) for operation in over]

    def finish_early(self) -> object:
        """Have a transfer make do with what has come."""
        operation = self.rng.choice(list(self.operations))
        self.tally.happened["finished early"] += operation.state is OperationState.RUNNING
        self.cache.finish_early(operation)
        return operation.kind.value

    def cancel(self) -> object:
        """End a transfer before its time; what it holds it gives back once its job has ended."""
        operation = self.rng.choice(list(self.operations))
        return self.cache.cancel(operation)

    def loads(self) -> list[ScheduledJob]:
        """Return the jobs of loads that the engine may begin to follow."""
        followed = self.arrivals.values()
        return [task for task in self.workers.tasks if isinstance(task.job, LoadJob) and task not in followed]

    def begin_layerwise(self) -> object:
        """Have the engine read what a load brings, from the slots that it names."""
        task = self.rng.choice(self.loads())
        arrival = self.cache.begin_layerwise(task.operation)
        self.tally.happened["followed"] += arrival is not None
        if arrival is None:
            return "refused"
        self.arrivals[arrival] = task
        numbers = self.operations[task.operation][1]
        for component, slots in enumerate(arrival.slots):
            pages = numbers[arrival.end - len(slots) : arrival.end]
            held = self.audit.picture.slot_of[component, pages]
            assert ((held < 0) | (held == slots)).all(), "an arrival names other slots than the tree holds"
        return arrival.end, [len(part) for part in arrival.parts]

    def end_layerwise(self) -> object:
        """See that all was what it should be until now, and let the load go on."""
        arrival = self.rng.choice(list(self.arrivals))
        task = self.arrivals.pop(arrival)
        has_ended = task in self.held and task.error is None
        if has_ended:
            numbers = self.operations[task.operation][1]
            for component, slots in enumerate(arrival.slots):
                pages = numbers[arrival.end - len(slots) : arrival.end]
                for pool in self.cell.layout.components[component].pools:
                    if pool.page_bytes:
                        found = self.memory.device[self.memory.on_device(pool, slots)]
                        assert (found == self.memory.contents(pool, pages)).all(), "wrong bytes in an arrival"
        self.tally.happened["read to the end"] += has_ended
        self.cache.end_layerwise(arrival)
        return has_ended

    def clear(self) -> object:
        """Have the store lose all that is this cache's."""
        self.engine.subject = _NO_NUMBERS
        return self.watch(self.cache.clear_storage(), self.cache.prompt([]))

    # ---- proof -----------------------------------------------------------------------------------------------

    def claims(self) -> list[Claim]:
        """Say what requests and transfers hold, read and bring."""
        claims = [request.claim for request in self.requests if request.claim is not None]
        known, of, claim = self.claim_of, self.operations, self.jobs.claim
        tasks = [*self.workers.tasks, *self.held]
        for task in tasks:
            if isinstance(task.job, FetchJob):  # of what is kept before its end the tree has the slots
                known.pop(task, None)
        self.claim_of = {task: known.get(task) or claim(task, *of[task.operation]) for task in tasks}
        return [*claims, *self.claim_of.values()]

    def compare(self, kind: str, before: Picture, after: Picture) -> None:
        """A page comes, goes and stays only where the operation may make it; none moves, and no pinned one goes."""
        if kind == "reset":
            return
        known = before.slot_of.shape[1]
        then, now = before.slot_of, after.slot_of[:, :known]
        held_then, held_now = then >= 0, now >= 0
        if (
            kind != "detach"
        ):  # which runs many transfers to their ends: through a small host a page goes and comes again
            assert not (held_then & held_now & (then != now)).any(), "a page was moved to another slot"
        gone = held_then & ~held_now
        if gone.any():
            by_policy = kind in WRITING and self.config.write is not WritePolicy.ON_CALL
            assert kind in EVICTING or by_policy, f"pages went at {kind}"
            self.check_pinned(gone)
        came = held_now & ~held_then
        if came.any() or (after.slot_of[:, known:] >= 0).any():
            assert kind in FILLING, f"pages came at {kind}"
            strange = np.ones(after.slot_of.shape[1], np.bool_)
            strange[self.engine.subject] = False
            assert not came[:, strange[:known]].any(), "a page came that this was not about"
            assert not (after.slot_of[:, known:] >= 0)[:, strange[known:]].any(), "a page came that this was not about"

    def check_published(self, *, may_be_gone: bool) -> None:
        """What has arrived is in the tree, as far as what it stands on is; unless others have made room at once."""
        brought, self.brought = self.brought, []
        for flow, numbers in () if may_be_gone else brought:
            if flow.source is None or flow.target is None:
                continue
            first = int(flow.target) * self.components
            full = self.audit.picture.slot_of[first, numbers] >= 0
            full_end = len(full) if full.all() else int(np.argmin(full))
            for part in flow.parts:
                there = self.audit.picture.slot_of[first + part.component, numbers[part.pages]] >= 0
                stands = part.pages < full_end if part.component else part.pages == full_end
                assert not (stands & ~there).any(), "a page has arrived and was not published"

    def check_pinned(self, gone: Pages) -> None:
        """No page that a request's lock pins is among those that went; Full's are, from the root on."""
        for request in self.requests:
            lock = request.lock
            if not lock.end or lock.is_void:
                continue
            self.tally.happened["evicted under a lock"] += 1
            for component, span in enumerate(self.tree.spans):
                pinned = request.numbers[max(0, lock.end - span) : lock.end]
                assert not gone[component, pinned[pinned < gone.shape[1]]].any(), "a pinned page went"

    def verify(self) -> None:
        """Verify every seal on the host."""
        for number, component in enumerate(self.cell.layout.components):
            held = self.audit.picture.slot_of[self.components + number]
            for page in np.flatnonzero(held >= 0).tolist():
                for pool in component.pools:
                    if pool.page_bytes:
                        label = Label(self.owners[pool.name], self.numbers.keys[page], pool.name)
                        flaw = verify_buffers((self.memory.page(pool, int(held[page])),), label)
                        assert flaw is None, f"a host page does not verify: {flaw}"

    def settle_backups(self) -> None:
        """Let all be backed up that the policy means to."""
        self.cache._scheduler._policy = WritePolicy.ON_CALL
        self.cache._scheduler.give_up_waiting()
        self.cache._scheduler.start_due(self.cache._storage)
        self.watch_policy()
        self.audit.look(self.claims())
        for _ in range(SETTLE_PAUSES_MAX):
            self.do("poll")
            self.drain()
            if not self.cache.stats().backups.waiting_pages:
                break
            self.clock.sleep(RETRY_PAUSE_S_MAX)
        self.liveness.check()

    # ---- the end ---------------------------------------------------------------------------------------------

    def wait_all(self) -> None:
        """Stop all faults: everything ends, nothing stays out, the cache serves as ever, and all of it can go."""
        self.is_ending = True
        self.faults.on = False
        if self.away is not None:
            self.do("detach")
        if not self.has_store:
            self.do("attach")
        self.drain()
        if self.cache._storage is not None and self.cache._storage.epoch.is_waiting:
            self.do("clear")  # a removal had failed: until another clear nothing is stored or read
            self.drain()
        for request in self.requests.copy():
            self.engine.end(request)
        self.settle_backups()
        assert not self.tree.locks, "a lock is left"
        assert all(not occupancy.out for occupancy in self.cache.stats().occupancy), "slots are lost"
        assert not self.cache.stats().duplicates.diverged, "a page was held that is not what requests compute"
        self.audit.look(self.claims())
        self.cache.check()
        self.verify()
        unhurried = replace(self.config.prefetching, patience_s=math.inf)
        self.cache.config = replace(self.cache.config, prefetching=unhurried)
        for _ in range(SERVED_AFTER):
            self.engine.serve()
        self.cache.clear_storage()
        self.cache.wait_all(SETTLE_S)
        assert not self.stored.bytes_used, "a cleared store holds something"
        check_tables(self.cache, [])
        for tier in Tier:
            for component in range(self.components):
                self.engine.make_room(tier, component, 10**6)
        assert all(occupancy.free == occupancy.capacity for occupancy in self.cache.stats().occupancy)
        assert not self.tree.roots, "nodes are left in an empty tree"
        self.audit.look(self.claims())
        assert self.cache.close() == []
