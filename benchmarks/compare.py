"""Two kept runs side by side: how much slower each figure has become, once the machine's own speed is taken out.

The calibration of a run times three primitives that no change of ours touches. How much slower they were in the newer
run, as the geometric mean of the three, is how much slower the machine was; every figure is divided by that.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

SLOWER_MAX = 1.10
"""Largest accepted cost of a figure, as a multiple of what it cost in the older run; above it the figure is flagged."""

TIMES = frozenset({"us", "ms"})
"""Units of which less is better. Of all others, which are rates, more is."""

CALIBRATION = "calibration"
"""The section that measures the machine."""

MISSING_SHOWN_MAX = 5
"""Figures that the newer run lacks, below the table; the JSON has all."""

FigureName = tuple[str, str]
"""Section and line."""


@dataclass(frozen=True, slots=True)
class KeptFigure:
    """The median of one line of a kept run."""

    unit: str
    median: float

    def cost(self) -> float:
        """Return a number that grows as the figure gets worse."""
        return self.median if self.unit in TIMES else 1 / self.median


@dataclass(frozen=True, slots=True)
class KeptRun:
    """The figures of a run, as its JSON file has them."""

    commit: str
    figures: Mapping[FigureName, KeptFigure]

    @classmethod
    def read(cls, path: Path) -> "KeptRun":
        """Read a file that ``python -m benchmarks`` wrote.

        Raises:
            ValueError: it is another file; the message says so.
            OSError: it cannot be read.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            figures = {
                (each["section"], each["name"]): KeptFigure(each["unit"], float(each["median"]))
                for each in found["figures"]
            }
            return cls(found["machine"]["commit"], figures)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} must be a run kept by python -m benchmarks --json, found {error!r}") from error

    def machine_costs(self) -> dict[str, float]:
        """Return what each primitive of the calibration cost."""
        return {name: each.cost() for (section, name), each in self.figures.items() if section == CALIBRATION}


@dataclass(frozen=True, slots=True)
class Change:
    """One figure that both runs have. Above 1, ``slower`` says that it costs more than it did, calibration aside."""

    section: str
    name: str
    unit: str
    old: float
    new: float
    slower: float

    @property
    def is_flagged(self) -> bool:
        """Whether it has become too slow."""
        return self.slower > SLOWER_MAX


@dataclass(frozen=True, slots=True)
class RunsCompared:
    """The figures of two runs that were compared."""

    old_commit: str
    new_commit: str
    machine_slower: float
    """Cost of the calibration in the newer run, as a multiple of its cost in the older one."""
    changes: tuple[Change, ...]
    """Shared figures, in the order of the newer run."""
    missing: tuple[FigureName, ...]
    """Figures of the older run that the newer one lacks."""

    @property
    def flagged(self) -> list[Change]:
        """Figures that have become too slow, the worst first."""
        return sorted((each for each in self.changes if each.is_flagged), key=_slower, reverse=True)


def compare_runs(old: KeptRun, new: KeptRun) -> RunsCompared:
    """Compare the figures that two runs share.

    Raises:
        ValueError: they share no calibration, or nothing else.
    """
    old_costs, new_costs = old.machine_costs(), new.machine_costs()
    ratios = [new_costs[name] / cost for name, cost in old_costs.items() if name in new_costs]
    if not ratios:
        raise ValueError(f"runs must share a section {CALIBRATION!r}, found none in {old.commit} and {new.commit}")
    machine_slower = prod(ratios) ** (1 / len(ratios))
    changes = [
        Change(section, name, each.unit, before.median, each.median, each.cost() / before.cost() / machine_slower)
        for (section, name), each in new.figures.items()
        if section != CALIBRATION and (before := old.figures.get((section, name))) is not None
    ]
    if not changes:
        raise ValueError(f"runs must share figures, {old.commit} and {new.commit} have none in common")
    missing = tuple(name for name in old.figures if name not in new.figures)
    return RunsCompared(old.commit, new.commit, machine_slower, tuple(changes), missing)


def record_compared(compared: RunsCompared) -> dict[str, object]:
    """Return a comparison as what JSON can hold."""
    return asdict(compared) | {"slower_max": SLOWER_MAX, "flagged": [asdict(each) for each in compared.flagged]}


def print_compared(compared: RunsCompared, console: Console) -> None:
    """Print every figure, then those that have become too slow."""
    console.print(_table(f"{compared.old_commit} and {compared.new_commit}", compared.changes))
    console.print(f"the machine took {compared.machine_slower:.2f} times as long for the calibration; taken out above")
    if compared.missing:
        shown = "; ".join(": ".join(name) for name in compared.missing[:MISSING_SHOWN_MAX])
        more = ", ..." if len(compared.missing) > MISSING_SHOWN_MAX else ""
        console.print(f"not measured again, {len(compared.missing)}: {shown}{more}")
    count = len(compared.changes)
    if compared.flagged:
        console.print(
            _table(f"slower by more than {SLOWER_MAX - 1:.0%}: {len(compared.flagged)} of {count}", compared.flagged)
        )
    else:
        console.print(f"none of {count} figures is slower by more than {SLOWER_MAX - 1:.0%}")


def _table(title: str, changes: tuple[Change, ...] | list[Change]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("section", "line", "old", "new", "unit", "times as slow"):
        table.add_column(heading, justify="right" if heading in ("old", "new", "times as slow") else "left")
    for each in changes:
        style = "red" if each.is_flagged else None
        slower = f"{each.slower:.2f}"
        table.add_row(each.section, each.name, f"{each.old:.4g}", f"{each.new:.4g}", each.unit, slower, style=style)
    return table


def _slower(change: Change) -> float:
    return change.slower
