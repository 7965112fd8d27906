"""Become a program that is killed when its parent dies: ``python -I -S tether.py PARENT_PID PROGRAM ...``.

It imports nothing of the package, because it runs between the start of a process and its real work. The kernel keeps
the promise over the change of program, and for the thread that started the process: start from one that stays.
"""

import ctypes
import os
import signal
import sys

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
"""Of ``prctl``; as linux/prctl.h."""


def main() -> None:
    """Tie this process to its parent, then run the program; returns only if the parent is gone already."""
    parent, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        sys.exit(os.strerror(ctypes.get_errno()))
    if os.getppid() == int(parent):
        # Supervisors block signals to wait for them; what they start must not inherit that.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execv(command[0], command)  # noqa: S606  # a tether has no shell


if __name__ == "__main__":
    main()
