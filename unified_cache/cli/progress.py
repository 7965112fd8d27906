"""Progress of a long run: a bar on a terminal, nothing elsewhere; interrupted, one line that says how far it came.

A command is within ``watched`` while it does what may take long; a test walks over all commands and holds them to it.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TextIO, TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from unified_cache.core.sizes import size_text
from unified_cache.sizing.replay.trace import OnProgress, TraceRequest, read_trace

Callback = TypeVar("Callback")

RATED_S_MIN = 0.1
"""A run is as fast as if it had gone on for so long: the first moments say little."""


@dataclass(slots=True)
class _Progressed:
    """A run, and how far it is."""

    verb: str
    total: int | None
    """How many there are; None if not known beforehand."""
    unit: str
    done: int = 0
    note: str = ""
    batches: Counter[str] = field(default_factory=Counter)
    """Objects and bytes of all batches."""

    def add(self, objects_count: int, object_bytes: int) -> None:
        """Add the objects and bytes of a batch."""
        self.batches.update(objects=objects_count, bytes=object_bytes)
        self.on_progress(self.batches["objects"], size_text(self.batches["bytes"]))

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


class _RunBar(Progress):
    """The bar of a run, as far as it is whenever the bar is drawn, ten times a second."""

    def __init__(self, stream: TextIO, run: _Progressed) -> None:
        columns = (
            TextColumn(run.verb),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[counted]}"),
            TextColumn("{task.fields[rate]:,.0f} " + run.unit + "/s"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self._run = run
        self._started_s = time.monotonic()
        super().__init__(*columns, console=Console(file=stream), transient=True)  # draws it already

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar as rich draws it."""
        run = self._run
        rate = run.done / max(time.monotonic() - self._started_s, RATED_S_MIN)
        for task in self.task_ids:
            self.update(task, completed=run.done, rate=rate, note=run.note, counted=run.count_text)
        yield from super().get_renderables()


class _RunWatch(Generic[Callback]):
    """A run watched in a with statement: a bar on a terminal; interrupted, the exception says what the run had.

    Not a generator: a Ctrl-C between its first value and the with block would leave the bar where it is.
    """

    def __init__(self, stream: TextIO, run: _Progressed, callback: Callback) -> None:
        """``callback`` is for the run to call, and what the with statement gives."""
        self._run = run
        self._callback = callback
        self._bar = _RunBar(stream, run) if stream.isatty() else None

    def __enter__(self) -> Callback:
        try:
            if self._bar is not None:
                self._bar.start()
                self._bar.add_task(self._run.verb, total=self._run.total, rate=0.0, note="", counted="")
            return self._callback
        except KeyboardInterrupt as interrupted:
            self._end(interrupted)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if isinstance(error, KeyboardInterrupt):
            error.args = (self._run.text, *error.args)


def watched(stream: TextIO, verb: str, total: int | None, unit: str) -> AbstractContextManager[OnProgress]:
    """Return what to enter for a function that takes a run's progress.

    ``verb`` names the run, ``total`` is the number of ``unit``; a run interrupted raises a KeyboardInterrupt whose text
    says what it had.
    """
    run = _Progressed(verb, total, unit)
    return _RunWatch(stream, run, run.on_progress)


def objects_watched(stream: TextIO, verb: str, total: int | None) -> AbstractContextManager[Callable[[int, int], None]]:
    """Return what to enter for a function to call after each batch, with the objects and bytes that it had."""
    run = _Progressed(verb, total, "objects")
    return _RunWatch(stream, run, run.add)


def read_watched(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace, or its first ``limit`` requests, and show the progress."""
    with watched(sys.stderr, "read", limit, "requests") as on_progress:
        return read_trace(path, limit, on_progress)
