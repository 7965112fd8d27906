"""Calls to stores that may hang: against a model through every order of events, and whose turn it is."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import CodeType, FrameType

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.clock import ManualClock
from tests.support.wrappers import PATIENCE_S
from unified_cache.core.errors import ClosedError, StorageError, StorageTimeoutError
from unified_cache.storage_backends.common.bounded_call import (
    AGAIN,
    URGENT_TURNS_MAX,
    Again,
    BoundedCall,
    CallsInFlight,
    CallState,
    CallThreads,
    StoreStep,
    call_within,
    current_call,
    run_here,
)

DEADLINE_S = 5.0

SETTLED = (CallState.RETURNED, CallState.GIVEN_UP, CallState.LET_GO, CallState.WITHDRAWN)
RETURNED = (CallState.RETURNED, CallState.LET_GO, CallState.WITHDRAWN)
WAITING = CallState.WAITING
RUNNING = CallState.RUNNING


class Instruction(Enum):
    """Next thing that work does on its thread."""

    ENTER = "begin a call to the store"
    LEAVE = "return from it"
    END = "end"
    FAIL = "raise"
    GO_ON = "ask for another turn"


class ScriptedCall:
    """A call that is told step by step what to do, and what the model knows of it."""

    def __init__(self, number: int, begun: "SimpleQueue[ScriptedCall]", clock: ManualClock) -> None:
        self.number = number
        self.call: BoundedCall[int]
        self.state = WAITING
        self.is_in_store = False
        self.started_s = 0.0
        self.reports: list[CallState] = []
        """States in which ``on_settled`` was called."""
        self.uses_buffers = False
        self.late_count = 0
        self.commands: SimpleQueue[Instruction] = SimpleQueue()
        self.done: SimpleQueue[bool] = SimpleQueue()
        """Whether each command was obeyed; False where the work was given up."""
        self._begun = begun
        self._clock = clock

    def work(self) -> int | Again:
        """Obey commands."""
        self.uses_buffers = True
        self._begun.put(self)
        while True:
            command = self.commands.get(timeout=PATIENCE_S)
            if command is not Instruction.ENTER:
                self.uses_buffers = False
                if command is Instruction.FAIL:
                    raise ValueError(self.number)
                return AGAIN if command is Instruction.GO_ON else self.number
            call = current_call()
            assert call is not None
            try:
                with StoreStep(call, "get", self._clock, DEADLINE_S, self._record_late):
                    self.done.put(True)
                    assert self.commands.get(timeout=PATIENCE_S) is Instruction.LEAVE
            except StorageTimeoutError:
                self.done.put(False)
            else:
                self.done.put(True)

    def settled(self, call: BoundedCall[int]) -> None:
        """Note that it is settled."""
        self.reports.append(call.state)

    def obeys(self, command: Instruction) -> bool:
        """Give a command that is answered; return the answer."""
        self.commands.put(command)
        return self.done.get(timeout=PATIENCE_S)

    def _record_late(self) -> None:
        self.late_count += 1


class BoundedCalls(RuleBasedStateMachine):
    """Any order of return, deadline, withdrawal and close; threads are real, and move when the test tells them to."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.begun: SimpleQueue[ScriptedCall] = SimpleQueue()
        self.tasks: list[ScriptedCall] = []
        self.queue: list[ScriptedCall] = []
        """Those that wait, in the order in which they came."""
        self.started: list[Thread] = []
        self.may_start = True
        self.closed = False
        self.threads_count = 0
        self.urgent_turns = 0

    @initialize(threads_max=st.integers(1, 3), more=st.none() | st.integers(0, 2), kept=st.integers(0, 2))
    def open(self, threads_max: int, more: int | None, kept: int) -> None:
        self.threads_max = threads_max
        self.total_max = 99 if more is None else threads_max + more
        self.deferrable_max = max(1, threads_max - kept)
        self.threads = CallThreads(
            "model",
            threads_max,
            total_max=None if more is None else self.total_max,
            deferrable_max=self.deferrable_max,
            clock=self.clock,
            start=self.start,
        )

    def start(self, target: Callable[[], None], name: str) -> None:
        """Start a thread, or refuse to as a system does that has none left."""
        if not self.may_start:
            raise RuntimeError("can't start new thread")
        thread = Thread(target=target, name=name, daemon=True)
        self.started.append(thread)
        thread.start()

    def those(self, *states: CallState) -> list[ScriptedCall]:
        return [task for task in self.tasks if task.state in states]

    def picked(self, seed: int, *states: CallState) -> ScriptedCall | None:
        tasks = self.those(*states)
        return tasks[seed % len(tasks)] if tasks else None

    # ---- the model ---------------------------------------------------------------------------------------------

    def staff(self) -> None:
        """Start the threads that waiting calls need; withdraw all where there are none."""
        lost_count = len(self.those(CallState.GIVEN_UP))
        while self.may_start and self.threads_count < len(self.those(WAITING, RUNNING)) + lost_count:
            if self.threads_count >= self.total_max or self.threads_count - lost_count >= self.threads_max:
                break
            self.threads_count += 1
        if self.threads_count == lost_count:
            for task in self.those(WAITING):
                task.state = CallState.WITHDRAWN

    def begin(self) -> None:
        """Give waiting calls to free threads, in the order of the line, and wait until they have begun."""
        expected: set[ScriptedCall] = set()
        while self.threads_count > len(self.those(RUNNING, CallState.GIVEN_UP)):
            task = self.next_task()
            if task is None:
                break
            task.state = RUNNING
            self.queue.remove(task)
            expected.add(task)
        assert {self.begun.get(timeout=PATIENCE_S) for _ in expected} == expected
        if self.closed and not self.those(WAITING):
            self.threads_count = len(self.those(RUNNING, CallState.GIVEN_UP))

    def next_task(self) -> ScriptedCall | None:
        self.queue = [task for task in self.queue if task.state is WAITING]
        urgent = next((task for task in self.queue if task.call.is_urgent), None)
        deferrable = next((task for task in self.queue if not task.call.is_urgent), None)
        if sum(not task.call.is_urgent for task in self.those(RUNNING)) >= self.deferrable_max:
            deferrable = None
        if urgent is not None and (deferrable is None or self.urgent_turns < URGENT_TURNS_MAX):
            self.urgent_turns = 0 if deferrable is None else self.urgent_turns + 1
            return urgent
        if deferrable is not None:
            self.urgent_turns = 0
        return deferrable

    def leave(self) -> None:
        """End the turn of a task on its thread, which ends as well where it is one too many."""
        lost_count = len(self.those(CallState.GIVEN_UP))
        if self.threads_count - lost_count > self.threads_max:
            self.threads_count -= 1

    # ---- the events --------------------------------------------------------------------------------------------

    @rule(is_urgent=st.booleans())
    def submit(self, is_urgent: bool) -> None:
        task = ScriptedCall(len(self.tasks), self.begun, self.clock)
        self.tasks.append(task)
        self.queue.append(task)
        task.call = self.threads.submit(task.work, task.settled, is_urgent=is_urgent)
        if self.closed:
            task.state = CallState.WITHDRAWN
            return
        self.staff()
        self.begin()

    @rule(seed=st.integers(0, 99))
    def enter_the_store(self, seed: int) -> None:
        task = self.picked(seed, RUNNING, CallState.GIVEN_UP)
        if task is None or task.is_in_store:
            return
        task.is_in_store = task.obeys(Instruction.ENTER)
        assert task.is_in_store == (task.state is RUNNING), "no further call of work that was given up is begun"
        task.started_s = self.clock.now_s

    @rule(seed=st.integers(0, 99))
    def return_from_the_store(self, seed: int) -> None:
        task = self.picked(seed, RUNNING, CallState.GIVEN_UP)
        if task is not None and task.is_in_store:
            task.is_in_store = False
            assert task.obeys(Instruction.LEAVE) == (task.state is RUNNING)

    @rule(seed=st.integers(0, 99), how=st.sampled_from((Instruction.END, Instruction.FAIL, Instruction.GO_ON)))
    def end(self, seed: int, how: Instruction) -> None:
        task = self.picked(seed, RUNNING, CallState.GIVEN_UP)
        if task is None or task.is_in_store:
            return
        task.commands.put(how)
        if task.state is RUNNING and how is Instruction.GO_ON:
            task.state = WAITING
            self.queue.append(task)
            self.leave()
            self.begin()
            return
        task.state = CallState.RETURNED if task.state is RUNNING else CallState.LET_GO
        assert task.call.wait(PATIENCE_S)
        if task.state is CallState.RETURNED:
            assert task.call.settle(PATIENCE_S)
            error = task.call.take_error()
            assert isinstance(error, ValueError) if how is Instruction.FAIL else task.call.result() == task.number
        self.leave()
        self.begin()

    @rule(seconds=st.sampled_from((1.0, DEADLINE_S)))
    def look_for_late_calls(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.threads.give_up_late()
        for task in self.those(RUNNING):
            if task.is_in_store and self.clock.now_s >= task.started_s + DEADLINE_S:
                self.gave_up(task)

    def gave_up(self, task: ScriptedCall) -> None:
        task.state = CallState.GIVEN_UP
        self.staff()
        self.begin()

    @rule(seed=st.integers(0, 99))
    def give_up(self, seed: int) -> None:
        task = self.picked(seed, *CallState)
        if task is not None:
            assert self.threads.give_up(task.call) == (task.state is RUNNING)
            if task.state is RUNNING:
                self.gave_up(task)

    @rule(seed=st.integers(0, 99))
    def withdraw(self, seed: int) -> None:
        task = self.picked(seed, *CallState)
        if task is not None:
            assert self.threads.withdraw(task.call) == (task.state is WAITING)
            if task.state is WAITING:
                task.state = CallState.WITHDRAWN
                self.begin()

    @rule()
    def withdraw_what_waits(self) -> None:
        self.threads.withdraw_waiting()
        for task in self.those(WAITING):
            task.state = CallState.WITHDRAWN
        self.begin()

    @rule()
    def leave_all(self) -> None:
        for task in self.those(WAITING):
            task.state = CallState.WITHDRAWN
        for task in self.those(RUNNING):
            task.state = CallState.GIVEN_UP
        self.threads.leave_all()

    @rule(may_start=st.booleans())
    def have_no_thread_left(self, may_start: bool) -> None:
        self.may_start = may_start

    @precondition(lambda self: len(self.tasks) > 5)
    @rule()
    def close(self) -> None:
        self.closed = True
        assert len(self.threads.close(0)) == len(self.those(RUNNING))
        self.begin()

    # ---- what always holds -------------------------------------------------------------------------------------

    @invariant()
    def every_call_is_as_the_model_says(self) -> None:
        for task in self.tasks:
            call = task.call
            assert call.state is task.state
            assert call.returned == call.wait(0) == (task.state in RETURNED)
            assert call.settle(0) == (task.state in SETTLED)
            assert len(task.reports) == (task.state in SETTLED)
            assert task.uses_buffers == (task.state in (RUNNING, CallState.GIVEN_UP))
            if task.state in (CallState.GIVEN_UP, CallState.LET_GO):
                error = call.take_error()
                assert isinstance(error, StorageTimeoutError)
                assert error.call is call
                assert task.late_count == (call.name == "get")
            elif task.state is CallState.WITHDRAWN:
                assert type(call.take_error()) is StorageError
        if self.tasks:
            assert self.threads.lost_count == len(self.those(CallState.GIVEN_UP))
        with pytest.raises(Empty):
            self.begun.get_nowait()

    def teardown(self) -> None:
        if not self.tasks:
            return
        self.leave_all()
        for task in self.those(CallState.GIVEN_UP):
            if task.is_in_store:
                task.obeys(Instruction.LEAVE)
            task.commands.put(Instruction.END)
        assert self.threads.wait_for_lost(PATIENCE_S)
        assert self.threads.close(PATIENCE_S) == []
        for thread in self.started:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


TestBoundedCalls = BoundedCalls.TestCase


# ---- whose turn it is ---------------------------------------------------------------------------------------------


class Gates:
    """Work that says when it begins, and ends when the test lets it."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[str] = SimpleQueue()
        self.gates: dict[str, Event] = {}

    def work(self, name: str) -> Callable[[], None]:
        gate = self.gates[name] = Event()

        def work() -> None:
            self.begun.put(name)
            assert gate.wait(PATIENCE_S)

        return work


def test_urgent_calls_go_first_and_starve_no_other() -> None:
    threads, gates, order = CallThreads("ordered", 1), Gates(), list[bool]()
    threads.submit(gates.work("first"))
    assert gates.begun.get(timeout=PATIENCE_S) == "first"
    for is_urgent in [False, False, *[True] * (2 * URGENT_TURNS_MAX)]:
        threads.submit(partial(order.append, is_urgent), is_urgent=is_urgent)
    gates.gates["first"].set()
    assert threads.close(PATIENCE_S) == []
    assert order == ([True] * URGENT_TURNS_MAX + [False]) * 2


def test_closing_names_the_threads_that_have_not_ended_and_lets_what_waits_run() -> None:
    threads, gates = CallThreads("closed", 1), Gates()
    threads.submit(gates.work("a"))
    assert gates.begun.get(timeout=PATIENCE_S) == "a"
    waiting = threads.submit(gates.work("b"))
    assert threads.close(0) == ["closed-0"]
    assert threads.submit(gates.work("late")).state is CallState.WITHDRAWN
    for gate in gates.gates.values():
        gate.set()
    assert waiting.settle(PATIENCE_S)
    assert waiting.state is CallState.RETURNED


def test_a_call_of_its_own_is_made_even_where_nobody_waits_for_it() -> None:
    made = Event()
    with pytest.raises(StorageTimeoutError, match="did not return from close within 0 s") as raised:
        call_within(0, "close", lambda: made.wait(PATIENCE_S))
    assert (raised.value.call.name, raised.value.call.returned) == ("close", False)
    made.set()
    assert raised.value.call.wait(PATIENCE_S)
    assert call_within(PATIENCE_S, "close", lambda: 7) == 7


def test_a_call_without_a_deadline_that_is_given_up_names_no_time() -> None:
    threads, gates = CallThreads("named", 1), Gates()
    call = threads.submit(gates.work("a"), name="close")
    assert gates.begun.get(timeout=PATIENCE_S) == "a"
    assert threads.give_up(call)
    assert str(call.take_error()) == "the store did not return from close"
    gates.gates["a"].set()
    threads.close(PATIENCE_S)


def test_work_on_the_callers_own_thread_is_a_call_too() -> None:
    seen: list[BoundedCall[object] | None] = []
    call = run_here(lambda: seen.append(current_call()))
    assert seen == [call]
    assert call.state is CallState.RETURNED
    assert current_call() is None


# Calls in flight: closing waits for those that run, whatever has interrupted others


STEPS_MAX = 500
"""Bytecodes of a call that enters and leaves, at most."""


class Interrupts:
    """A trace function that raises KeyboardInterrupt at the n-th bytecode of these functions."""

    def __init__(self, at: int, codes: tuple[CodeType, ...]) -> None:
        self.left = at
        self.codes = codes

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Interrupts | None":
        if frame.f_code not in self.codes:
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "opcode"):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def call(calls: CallsInFlight) -> None:
    with calls:
        pass


def test_a_call_interrupted_at_any_point_leaves_nothing_that_a_close_waits_for() -> None:
    codes = (CallsInFlight.__enter__.__code__, CallsInFlight.__exit__.__code__)
    interrupted_count = 0
    others = sys.gettrace()
    with ThreadPoolExecutor(1) as closer:
        for step in range(STEPS_MAX):
            calls = CallsInFlight("the store")
            try:
                sys.settrace(Interrupts(step, codes))
                call(calls)
            except KeyboardInterrupt:
                interrupted_count += 1
            else:
                break
            finally:
                sys.settrace(others)
            assert closer.submit(calls.close).result(PATIENCE_S), "another thread closes it"
    assert interrupted_count > 10, "at every point of a call"


def test_closing_waits_for_a_call_that_runs_also_behind_one_within_it_and_refuses_the_next() -> None:
    calls = CallsInFlight("the store")
    with ThreadPoolExecutor(1) as closer:
        with calls:
            call(calls)
            closing = closer.submit(calls.close)
            while not calls._closed:
                Event().wait(0.001)
            with ThreadPoolExecutor(1) as other, pytest.raises(ClosedError, match="the store was closed"):
                other.submit(call, calls).result(PATIENCE_S)
            assert not closing.done()
        assert closing.result(PATIENCE_S)
    assert not calls.close(), "once is enough to let go"
