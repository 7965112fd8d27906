"""Charts as values: what is shown, in which unit; how it is drawn is the page's affair."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import ClassVar

__all__ = ["BandChart", "BarChart", "Chart", "Hue", "Series", "Unit"]


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


Chart = BandChart | BarChart


def _plain(chart: Chart, kind: str) -> dict[str, object]:
    values: dict[str, object] = asdict(chart, dict_factory=_plain_fields)
    return {"kind": kind, **values}


def _plain_fields(fields: list[tuple[str, object]]) -> dict[str, object]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in fields}
