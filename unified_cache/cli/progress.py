"""How far a replay is: a bar where somebody watches, a line now and then where nobody does."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["PlainProgress", "progress_on"]

REFRESH_S = 0.1
"""Between two looks of the bar; watching must not cost more than what is watched."""

LINES_COUNT = 10
"""Lines for a whole run."""


@contextmanager
def progress_on(stream: TextIO, requests: int) -> Iterator[Callable[[int, float], None]]:
    """Yield what to tell after each request: how many are served, and their hit ratio."""
    if not stream.isatty():
        yield PlainProgress(stream, requests, time.monotonic).tell
        return
    columns = (
        TextColumn("replay"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} requests/s"),
        TextColumn("hit ratio {task.fields[ratio]:.3f}"),
        TimeRemainingColumn(),
    )
    started_s = time.monotonic()
    shown_s = 0.0
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("replay", total=requests, rate=0.0, ratio=0.0)

        def tell(served: int, ratio: float) -> None:
            nonlocal shown_s
            now_s = time.monotonic()
            if now_s - shown_s >= REFRESH_S or served == requests:
                shown_s = now_s
                bar.update(task, completed=served, rate=served / max(now_s - started_s, REFRESH_S), ratio=ratio)

        yield tell


class PlainProgress:
    """Write a line at every tenth of the requests."""

    def __init__(self, stream: TextIO, requests: int, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._requests = requests
        self._clock = clock
        self._started_s = clock()
        self._lines = 0

    def tell(self, served: int, ratio: float) -> None:
        """Count one request."""
        tenth = served * LINES_COUNT // self._requests
        if tenth > self._lines:
            self._lines = tenth
            seconds = self._clock() - self._started_s
            rate = served / seconds if seconds > 0 else 0.0
            self._stream.write(
                f"{served * 100 // self._requests:3} %  {served:,} of {self._requests:,} requests  "
                f"{rate:,.0f} requests/s  hit ratio {ratio:.4f}\n"
            )
            self._stream.flush()
