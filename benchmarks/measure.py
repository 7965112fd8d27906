"""Timing that survives a busy machine: subjects take turns, and a figure is a median with its spread."""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns

Subject = Callable[[], int]
"""Does a thing once; returns the nanoseconds of the part that counts."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and deciles of repeated measurements."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise one or more values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), deciles[0], deciles[-1], len(values))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A reference that a figure is compared with. Each section defines its ``ratio``; the limit has the same unit."""

    against: str
    median: float
    """Median of the reference, in the figure's unit."""
    ratio: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None where there is none."""
        if self.at_most is not None:
            return self.ratio <= self.at_most
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return None

    @property
    def wanted(self) -> str:
        """The target in words; empty where there is none."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return f">= {self.at_least:g}" if self.at_least is not None else ""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    section: str
    name: str
    unit: str
    spread: Spread
    comparisons: tuple[Comparison, ...] = ()
    note: str = ""


def timed(call: Callable[[], object]) -> Subject:
    """Make a subject of a call that counts whole. What it returns is let go of outside the timed part."""

    def subject() -> int:
        start = perf_counter_ns()
        result = call()
        elapsed = perf_counter_ns() - start
        del result
        return elapsed

    return subject


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector out of what is timed, and what was built before out of its sight.

    Where something was frozen before, as by the tests, it stays so, and so does what was built since: a collection of
    all that tests import takes longer than most subjects.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not was_frozen:
            gc.unfreeze()


def interleaved(subjects: Sequence[Subject], rounds: int, *, calls: int = 1, warm: int = 0) -> list[list[int]]:
    """Let subjects take turns, each ``calls`` times a round after ``warm`` untimed ones; nanoseconds by subject.

    Every other round goes backwards, so that no subject always follows the same one. One round before the first
    does not count.
    """
    taken: list[list[int]] = [[] for _ in subjects]
    numbered = list(enumerate(subjects))
    with quiet():
        for round_number in range(rounds + 1):
            for number, subject in numbered:
                for _ in range(warm):
                    subject()
                values = [subject() for _ in range(calls)]
                if round_number:
                    taken[number] += values
            numbered.reverse()
    return taken
