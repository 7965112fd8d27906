"""Signals awaited by a process that is stopped and continued, as by a debugger, a shell or a frozen container."""

import signal
import subprocess
import sys
import time

from unified_cache.cluster.child import ROOT

TIMEOUT_S = 0.2

AWAITS = f"""
import signal
from unified_cache.cluster.signals import await_signal
awaited = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
while True:
    came = await_signal(awaited, {TIMEOUT_S})
    print("nothing" if came is None else came.name, flush=True)
"""


def stop_for_longer_than_it_waits(process: "subprocess.Popen[str]", meanwhile: signal.Signals | None = None) -> None:
    process.send_signal(signal.SIGSTOP)
    if meanwhile is not None:
        process.send_signal(meanwhile)
    time.sleep(2 * TIMEOUT_S)  # by the kernel's clock, the only one that a stopped process has
    process.send_signal(signal.SIGCONT)


def test_a_process_that_was_stopped_and_continued_is_told_of_no_signal_but_those_that_came() -> None:
    with subprocess.Popen([sys.executable, "-c", AWAITS], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "nothing\n"
        for _ in range(3):
            stop_for_longer_than_it_waits(process)
            assert process.stdout.readline() == "nothing\n"
        stop_for_longer_than_it_waits(process, signal.SIGHUP)
        process.send_signal(signal.SIGCHLD)
        found: list[str] = []
        while "SIGCHLD" not in found or "SIGHUP" not in found:
            found.append(process.stdout.readline().strip())
        assert set(found) <= {"nothing", "SIGHUP", "SIGCHLD"}
        process.kill()
