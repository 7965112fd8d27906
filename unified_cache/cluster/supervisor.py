"""The process that owns a cluster: ``python -m unified_cache.cluster.supervisor DIRECTORY NODES SEGMENT_BYTES``.

Its processes die with it, however it dies. A process that dies earlier is restarted; one that keeps dying stays dead,
and the state says so. A master that is started again knows no page.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from unified_cache.cluster.child import STOP_SIGNALS, Child, StartReport, report_stream, wait_until
from unified_cache.cluster.directory import ClusterDirectory, ClusterState, MemberState
from unified_cache.cluster.event_log import EventLog
from unified_cache.cluster.local import ClusterPlan, LocalCluster
from unified_cache.cluster.restarts import ProcessPhase, Restarts
from unified_cache.cluster.signals import await_signal
from unified_cache.errors import CacheError, InputError, StorageError

__all__ = ["Supervisor", "end_supervisor", "main", "start_supervisor", "supervise"]

SUPERVISOR = "unified_cache.cluster.supervisor"

START_TIMEOUT_S = 30.0
"""Limit of a start, which takes half a second; every step of it has a shorter limit of its own."""
END_TIMEOUT_S = 10.0
CHECK_INTERVAL_S = 0.5
"""Interval of checks for restarts that are due; the death of a process wakes the supervisor at once."""


class _Member:
    """One supervised process; ``revive`` starts its successor."""

    def __init__(self, child: Child, revive: Callable[[Child], Child], restarts: Restarts) -> None:
        self.child = child
        self.revive = revive
        self.restarts = restarts

    @property
    def state(self) -> MemberState:
        child, restarts = self.child, self.restarts
        return MemberState(child.name, child.address, child.pid, restarts.phase.value, restarts.count)


class Supervisor:
    """Restarts the processes of one cluster and publishes their state."""

    def __init__(
        self, cluster: LocalCluster, plan: ClusterPlan, directory: ClusterDirectory, log: EventLog, now_s: float
    ) -> None:
        self._cluster = cluster
        self._plan = plan
        self._directory = directory
        self._log = log
        self._started_s = time.time()
        self._master = _Member(cluster.master, lambda _: cluster.restart_master(), Restarts(now_s))
        self._nodes = [_Member(node, cluster.replace_node, Restarts(now_s)) for node in cluster.nodes]

    def publish(self) -> None:
        """Write the state of all processes to the directory."""
        members = tuple(member.state for member in (self._master, *self._nodes))
        cluster = self._cluster
        state = ClusterState(cluster.url, str(cluster.admin), self._plan.segment_bytes, self._started_s, members)
        self._directory.write(state)

    def check_members(self, now_s: float) -> None:
        """Note which processes died and restart those that are due; nodes wait for their master."""
        if self._restart_if_due(self._master, now_s):
            for node in self._nodes:
                self._restart_if_due(node, now_s)

    def _restart_if_due(self, member: _Member, now_s: float) -> bool:
        """Restart a process if it is due; return whether it runs now."""
        child, restarts = member.child, member.restarts
        if child.is_alive:
            return True
        if restarts.phase is ProcessPhase.RUNNING:
            self._note_end(member, "died", child.ending(), now_s)
        if restarts.is_due(now_s):
            try:
                member.child = member.revive(child)
            except CacheError as error:
                self._note_end(member, "restart_failed", str(error), now_s)
            else:
                restarts.note_started(now_s)
                self._log.write("restarted", {"who": child.name, "pid": member.child.pid})
                self.publish()
        return restarts.phase is ProcessPhase.RUNNING

    def _note_end(self, member: _Member, event: str, reason: str, now_s: float) -> None:
        member.restarts.note_ended(now_s)
        fields = {"who": member.child.name, "reason": reason, "next": member.restarts.phase.value}
        self._log.write(event, fields)
        self.publish()


def supervise(plan: ClusterPlan, directory: ClusterDirectory, log: EventLog, announce: Callable[[str], None]) -> None:
    """Start a cluster, ``announce`` its URL when it is ready, and keep it until SIGTERM, SIGINT or SIGHUP.

    Blocks these signals for this thread, to wait for them.

    Raises:
        ConfigError: a cluster runs in that directory, or Mooncake is not installed.
        StorageError: the cluster does not start.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    with ExitStack() as stack:
        stack.enter_context(directory.held())
        directory.empty_logs()
        cluster = stack.enter_context(closing(LocalCluster.start(plan, directory.path, random.SystemRandom())))
        supervisor = Supervisor(cluster, plan, directory, log, time.monotonic())
        supervisor.publish()
        log.write("ready", {"url": cluster.url, "nodes": plan.nodes_count, "segment_bytes": plan.segment_bytes})
        announce(cluster.url)
        came: signal.Signals | None = None
        while came is None or came is signal.SIGCHLD:
            supervisor.check_members(time.monotonic())
            came = await_signal((*STOP_SIGNALS, signal.SIGCHLD), CHECK_INTERVAL_S)
        log.write("stopped", {"signal": came.name})


def start_supervisor(plan: ClusterPlan, directory: ClusterDirectory) -> ClusterState:
    """Start a supervisor that outlives this process; return when its cluster is ready.

    Raises:
        ConfigError: a cluster runs in that directory, or Mooncake is not installed.
        StorageError: the cluster does not start; nothing is left running.
    """
    program = (SUPERVISOR, str(directory.path), str(plan.nodes_count), str(plan.segment_bytes))
    child = Child.start_detached("supervisor", program, log=directory.path / "supervisor.log")
    child.await_report(START_TIMEOUT_S)
    state = directory.read()
    if state is None:
        raise StorageError(child.ending(), retryable=True)
    child.release()
    return state


def end_supervisor(directory: ClusterDirectory) -> bool:
    """End the cluster of a directory and wait until it is gone; tell whether there was one.

    Raises:
        StorageError: it does not end, although it was killed.
    """
    if not directory.is_supervised:
        directory.clean()
        return False
    try:
        supervisor = os.pidfd_open(directory.supervisor_pid)
    except ProcessLookupError:
        return True
    try:
        # The descriptor is of the supervisor only if it lives now, and not of a later process with its number.
        for number in (signal.SIGTERM, signal.SIGKILL):
            if directory.is_supervised:
                signal.pidfd_send_signal(supervisor, number)
            if wait_until(lambda: not directory.is_supervised, END_TIMEOUT_S):
                return True
    finally:
        os.close(supervisor)
    raise StorageError(f"the cluster in {directory.path} does not end", retryable=True)


def main(path: str, nodes_count: int, segment_bytes: int) -> int:
    """Supervise and report the start on standard output; end if the process that waits for the report is gone."""
    stream = report_stream()
    try:
        plan = ClusterPlan(nodes_count, segment_bytes)
        log = EventLog(sys.stderr, time.time)
        supervise(plan, ClusterDirectory(Path(path)), log, lambda _: StartReport().send(stream))
    except BrokenPipeError:
        return 1
    except CacheError as error:
        StartReport(str(error), refused=isinstance(error, InputError)).send(stream)
        return 1
    except OSError as error:
        StartReport(f"{error.filename}: {error.strerror}" if error.filename else str(error)).send(stream)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
