"""Charts as values: what is shown, in which unit; how it is drawn is the page's affair."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each position or category of a chart; ``page.css`` has a colour for its name."""

    name: str
    values: Sequence[float]


def series_of(names: Iterable[str], values: Sequence[Mapping[str, float]]) -> list[Series]:
    """Return a series of each name; ``values`` has one under each name for each position or category."""
    return [Series(name, [each[name] for each in values]) for name in names]


@dataclass(frozen=True, slots=True)
class BandChart:
    """Bands of shares between 0 and 1 stacked over positions along a line, and a line that they cannot pass."""

    title: str
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

    def as_json(self) -> dict[str, object]:
        """Return what ``page.js`` draws."""
        return {"kind": "bands", "unit": "ratio", **asdict(self)}


@dataclass(frozen=True, slots=True)
class BarChart:
    """A horizontal bar for each category, made up of the values of all series."""

    title: str
    unit: str
    """A name of ``UNITS`` in ``page.js``."""
    categories: Sequence[str]
    parts: Sequence[Series]

    def as_json(self) -> dict[str, object]:
        """Return what ``page.js`` draws."""
        return {"kind": "bars", **asdict(self)}


Chart = BandChart | BarChart
