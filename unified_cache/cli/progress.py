"""Progress of a long run: a bar on a terminal, a line at every tenth elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from unified_cache.cli.text import size_text

__all__ = ["PlainProgress", "Tell", "objects_watched", "progress_on", "watched"]

REFRESH_S = 0.1
"""Interval between two updates of the bar; showing progress must cost little beside the run itself."""

LINES_COUNT = 10
"""Lines for a whole run."""

Tell = Callable[[int, str], None]
"""Told how many are done, and a note to stand beside the number."""


@contextmanager
def watched(stream: TextIO, verb: str, total: int, unit: str) -> Iterator[Tell]:
    """Yield what to tell how far a run is: ``verb`` names the run, ``unit`` what it counts, ``total`` how many."""
    if not stream.isatty():
        yield PlainProgress(stream, total, unit, time.monotonic).tell
        return
    columns = (
        TextColumn(verb),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} " + unit + "/s"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    started_s = time.monotonic()
    shown_s = 0.0
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(verb, total=total, rate=0.0, note="")

        def tell(done: int, note: str) -> None:
            nonlocal shown_s
            now_s = time.monotonic()
            if now_s - shown_s >= REFRESH_S or done == total:
                shown_s = now_s
                bar.update(task, completed=done, rate=done / max(now_s - started_s, REFRESH_S), note=note)

        yield tell


@contextmanager
def progress_on(stream: TextIO, requests: int) -> Iterator[Callable[[int, float], None]]:
    """Yield what to tell after each request of a replay: how many are served, and their hit ratio."""
    with watched(stream, "replay", requests, "requests") as tell:
        yield lambda served, ratio: tell(served, f"hit ratio {ratio:.2%}")


@contextmanager
def objects_watched(stream: TextIO, verb: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Yield what to tell after each batch: how many objects and bytes it had."""
    with watched(stream, verb, total, "objects") as tell:
        objects_done = bytes_done = 0

        def add(objects_count: int, object_bytes: int) -> None:
            nonlocal objects_done, bytes_done
            objects_done += objects_count
            bytes_done += object_bytes
            tell(objects_done, size_text(bytes_done))

        yield add


class PlainProgress:
    """Write a line at every tenth of the run."""

    def __init__(self, stream: TextIO, total: int, unit: str, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._total = total
        self._unit = unit
        self._clock = clock
        self._started_s = clock()
        self._lines = 0

    def tell(self, done: int, note: str) -> None:
        """Say how many are done; more than were expected count as all."""
        done = min(done, self._total)
        tenth = done * LINES_COUNT // max(self._total, 1)
        if tenth > self._lines:
            self._lines = tenth
            seconds = self._clock() - self._started_s
            rate = done / seconds if seconds > 0 else 0.0
            self._stream.write(
                f"{done * 100 // self._total:3} %  {done:,} of {self._total:,} {self._unit}  "
                f"{rate:,.0f} {self._unit}/s  {note}\n"
            )
            self._stream.flush()
