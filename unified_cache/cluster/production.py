"""One storage node in production: retried until its master answers, tested by a round trip, ended gracefully."""

import os
import signal
import socket
import time
from itertools import count
from pathlib import Path

from unified_cache.cluster.child import STOP_SIGNALS, Child
from unified_cache.cluster.event_log import EventLog
from unified_cache.cluster.node import NodeSettings, check_round_trip, start_node
from unified_cache.cluster.signals import await_signal
from unified_cache.errors import StorageError
from unified_cache.files import write_whole

__all__ = ["run_node"]

DELAYS_S = (0.1, 0.2, 0.4, 0.8)
"""Pauses between attempts to join; the last one again and again."""
ATTEMPT_TIMEOUT_S = 1.0
"""An attempt that begins in time may end so much later."""
ROUND_TRIP_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 15.0
"""Mooncake's close takes 1 to 2 s, and 13 s without a master."""
CHECK_INTERVAL_S = 5.0


def run_node(settings: NodeSettings, patience_s: float, ready_file: Path | None, log: EventLog) -> None:
    """Run a node until SIGTERM, SIGINT or SIGHUP; wait at most ``patience_s`` for a master.

    ``ready_file`` exists while others reach the node. Blocks these signals for this thread, to wait for them; the node
    is a process of its own, and this one never waits for it without a deadline.

    Raises:
        ConfigError: the address is taken.
        StorageError: no master, or others do not reach the node, or it died.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    fields: dict[str, str | int | float | None] = {
        "node": str(settings.address),
        "master": str(settings.master),
        "segment_bytes": settings.segment_bytes,
    }
    log.write("starting", fields)
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)  # of a node that was killed
    node = _join(settings, patience_s, log)
    if node is None:
        return
    try:
        check_round_trip(settings.master, [node.address], settings.transport, ROUND_TRIP_TIMEOUT_S, None)
        log.write("ready", {**fields, "pid": node.pid})
        _notify("READY=1")
        if ready_file is not None:
            write_whole(ready_file, f"{node.address}\n".encode())
        came = _next_stop(node)
        log.write("stopping", {"signal": came})
        _notify("STOPPING=1")
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
        status = node.terminate(CLOSE_TIMEOUT_S)
        log.write("stopped", {"status": status})


def _join(settings: NodeSettings, patience_s: float, log: EventLog) -> Child | None:
    """Return the node when the master has taken it in, or None if a signal ends the wait."""
    deadline_s = time.monotonic() + patience_s
    reason = ""
    for attempt in count(1):
        reason = settings.master.refusal(ATTEMPT_TIMEOUT_S)
        if not reason:
            node = start_node("node", settings, None)
            try:
                node.await_report(max(deadline_s - time.monotonic(), ATTEMPT_TIMEOUT_S))
            except StorageError as error:
                reason = str(error)
            else:
                return node
        delay_s = DELAYS_S[min(attempt, len(DELAYS_S)) - 1]
        if time.monotonic() + delay_s >= deadline_s:
            break
        log.write("waiting", {"attempt": attempt, "reason": reason})
        if await_signal(STOP_SIGNALS, delay_s) is not None:
            log.write("stopped", {"status": 0})
            return None
    raise StorageError(f"no master at {settings.master} within {patience_s:g} s: {reason}", retryable=True)


def _next_stop(node: Child) -> str:
    """Wait for a signal; return its name.

    Raises:
        StorageError: the node died first.
    """
    while node.is_alive:
        came = await_signal((*STOP_SIGNALS, signal.SIGCHLD), CHECK_INTERVAL_S)
        if came is not None and came is not signal.SIGCHLD:
            return came.name
    raise StorageError(node.ending(), retryable=True)


def _notify(state: str) -> None:
    """Tell systemd, where it asks to be told."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.sendto(state.encode(), path.replace("@", "\0", 1))
