"""Blocked signals, awaited with a deadline by processes that may be stopped and continued meanwhile. Linux only.

``signal.sigtimedwait`` of CPython, 3.11 for one, cannot be believed there. When SIGCONT interrupted it and its time
is over, it returns a record that nobody has filled, whose number may be that of a signal: 2, SIGINT, where this was
found. Here the kernel says the number, and no record is asked for.
"""

import ctypes
import errno
import signal
import time
from collections.abc import Iterable

__all__ = ["await_signal"]

_SIGSET_BYTES = 128
"""Size of ``sigset_t``; as bits/types/__sigset_t.h."""


class _TimeSpec(ctypes.Structure):
    """``struct timespec``."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def await_signal(awaited: Iterable[signal.Signals], timeout_s: float) -> signal.Signals | None:
    """Wait for one of some signals, which this thread blocks; return it, or None after ``timeout_s``.

    Time during which the process was stopped counts; a signal that came during it is returned all the same.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    awaited_set = ctypes.create_string_buffer(_SIGSET_BYTES)
    libc.sigemptyset(awaited_set)
    for number in awaited:
        libc.sigaddset(awaited_set, int(number))
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.0)
        left = _TimeSpec(int(left_s), int(left_s % 1 * 1_000_000_000))
        came = int(libc.sigtimedwait(awaited_set, None, ctypes.byref(left)))
        if came > 0:
            return signal.Signals(came)
        if ctypes.get_errno() != errno.EINTR:
            return None
