"""Charts as values: what is shown, in which unit; how it is drawn is the page's affair."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import ClassVar

__all__ = ["BandChart", "BarChart", "Chart", "HeatMap", "Hue", "Series", "Unit", "tier_series"]


class Unit(Enum):
    """Unit of a chart's values."""

    RATIO = "ratio"
    """A share between 0 and 1, shown in percent."""
    BYTES = "bytes"
    COUNT = "count"
    MILLISECONDS = "milliseconds"


class Hue(Enum):
    """Meaning of a series, and so its colour, the same in every chart; the colours are in ``page.css``."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    PLAIN = "plain"
    """No tier."""


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each position or category of a chart."""

    name: str
    hue: Hue
    values: Sequence[float]


def tier_series(tiers: Iterable[str], values: Sequence[Mapping[str, float]]) -> list[Series]:
    """Return a series of each tier in its colour; ``values`` has one of each tier for each position or category."""
    return [Series(tier, Hue(tier), [each[tier] for each in values]) for tier in tiers]


@dataclass(frozen=True, slots=True)
class BandChart:
    """Bands stacked over positions along a line, and a line above them that they cannot pass."""

    title: str
    unit: Unit
    position_name: str
    """What positions count, as "request"."""
    positions: Sequence[float]
    """Rising."""
    position_notes: Sequence[str]
    """Said beside a position where one looks closely: as many as positions, or none."""
    bands: Sequence[Series]
    bound: Series
    position_labels: Sequence[str] = ()
    """Written under the positions in the place of their numbers, and at equal distances; one for each, or none."""
    marked: Sequence[int] = ()
    """Numbers of the positions that have a point on the uppermost band, whose note is written in the page."""

    KIND: ClassVar = "bands"

    def as_json(self) -> dict[str, object]:
        """Return what ``page.js`` draws."""
        return _plain(self, self.KIND)


@dataclass(frozen=True, slots=True)
class BarChart:
    """A horizontal bar for each category, made up of the values of all series."""

    title: str
    unit: Unit
    categories: Sequence[str]
    parts: Sequence[Series]

    KIND: ClassVar = "bars"

    def as_json(self) -> dict[str, object]:
        """Return what ``page.js`` draws."""
        return _plain(self, self.KIND)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A value for each row and column, the darker the larger, with lines where a second quantity passes a step.

    It is a table, so that it can be read without colours and without a script.
    """

    title: str
    unit: Unit
    row_name: str
    rows: Sequence[str]
    column_name: str
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    """By row and column; None where there is nothing to show."""
    levels: Sequence[Sequence[int]]
    """Level of the second quantity, by row and column: a line is drawn between cells of different levels."""
    levels_name: str
    """What the lines are, as "lines: 1 more an hour"."""
    best: tuple[int, int]
    """Row and column of the cell to be pointed out."""

    KIND: ClassVar = "heat"

    def as_json(self) -> dict[str, object]:
        """Return what ``page.html`` shows; its cells have the value's share of the largest, and the lines around."""
        largest = max((value for row in self.values for value in row if value is not None), default=0.0) or 1.0
        cells = [
            [
                {
                    "text": "" if value is None else f"{value:.1%}" if self.unit is Unit.RATIO else f"{value:,.2f}",
                    "share": 0.0 if value is None else round(value / largest, 3),
                    "line_above": row > 0 and self.levels[row][column] != self.levels[row - 1][column],
                    "line_left": column > 0 and self.levels[row][column] != self.levels[row][column - 1],
                    "is_best": (row, column) == self.best,
                }
                for column, value in enumerate(values)
            ]
            for row, values in enumerate(self.values)
        ]
        return {**_plain(self, self.KIND), "cells": cells}


Chart = BandChart | BarChart | HeatMap


def _plain(chart: Chart, kind: str) -> dict[str, object]:
    values: dict[str, object] = asdict(chart, dict_factory=_plain_fields)
    return {"kind": kind, **values}


def _plain_fields(fields: list[tuple[str, object]]) -> dict[str, object]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in fields}
