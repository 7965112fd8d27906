"""Progress of a long run: a bar on a terminal, nothing elsewhere; interrupted, one line that says how far it came.

A command is within ``watched`` while it does what may take long; a test walks over all commands and holds them to it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from unified_cache.core.byte_sizes import size_text
from unified_cache.sizing.replay.trace import OnProgress, TraceRequest, read_trace

__all__ = ["objects_watched", "read_watched", "watched"]

REFRESH_S = 0.1
"""Interval between two updates of the bar; showing progress must cost little beside the run itself."""


@dataclass(slots=True)
class _Progressed:
    """A run, and how far it is."""

    verb: str
    total: int | None
    """How many there are; None if not known beforehand."""
    unit: str
    done: int = 0
    note: str = ""

    def on_progress(self, done: int, note: str) -> None:
        """Record how many are done; more than were expected count as all."""
        self.done = done if self.total is None else min(done, self.total)
        self.note = note

    @property
    def count_text(self) -> str:
        """Return how many are done, of how many."""
        return f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"

    @property
    def text(self) -> str:
        """Return what it has done, in words."""
        return f"{self.verb} had {self.count_text} {self.unit}" + (f", {self.note}" if self.note else "")


@contextmanager
def watched(stream: TextIO, verb: str, total: int | None, unit: str) -> Iterator[OnProgress]:
    """Yield a function that takes a run's progress: ``verb`` names the run, ``total`` is the number of ``unit``.

    Raises:
        KeyboardInterrupt: it was interrupted; its text says what the run had.
    """
    run = _Progressed(verb, total, unit)
    try:
        if stream.isatty():
            with _bar_on(stream, run) as on_progress:
                yield on_progress
        else:
            yield run.on_progress
    except KeyboardInterrupt as ended:
        raise KeyboardInterrupt(ended.args[0] if ended.args else run.text) from ended


@contextmanager
def _bar_on(stream: TextIO, run: _Progressed) -> Iterator[OnProgress]:
    """Show a bar until the end of the with block; yield a function that moves it and records the progress."""
    columns = (
        TextColumn(run.verb),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[counted]}"),
        TextColumn("{task.fields[rate]:,.0f} " + run.unit + "/s"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    started_s = time.monotonic()
    shown_s = 0.0
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(run.verb, total=run.total, rate=0.0, note="", counted=run.count_text)

        def on_progress(done: int, note: str) -> None:
            nonlocal shown_s
            run.on_progress(done, note)
            now_s = time.monotonic()
            if now_s - shown_s >= REFRESH_S or done == run.total:
                shown_s = now_s
                rate = done / max(now_s - started_s, REFRESH_S)
                bar.update(task, completed=done, rate=rate, note=note, counted=run.count_text)

        yield on_progress


@contextmanager
def objects_watched(stream: TextIO, verb: str, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call after each batch, with the objects and bytes that it had."""
    with watched(stream, verb, total, "objects") as on_progress:
        objects_done = bytes_done = 0

        def add(objects_count: int, object_bytes: int) -> None:
            nonlocal objects_done, bytes_done
            objects_done += objects_count
            bytes_done += object_bytes
            on_progress(objects_done, size_text(bytes_done))

        yield add


def read_watched(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace, or its first ``limit`` requests, and show the progress."""
    with watched(sys.stderr, "read", limit, "requests") as on_progress:
        return read_trace(path, limit, on_progress)
