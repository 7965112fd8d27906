"""Charts as values: what is shown, in which unit; how it is drawn is the page's affair."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Unit(StrEnum):
    """Unit of a chart's values."""

    RATIO = "ratio"
    """A share between 0 and 1, shown in percent."""
    BYTES = "bytes"
    COUNT = "count"
    MILLISECONDS = "milliseconds"


class Hue(StrEnum):
    """Meaning of a series, and so its colour, the same in every chart; the colours are in ``page.css``."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    PLAIN = "plain"
    """No tier."""
    COMPUTED = "computed"
    SAVED = "saved"
    """Time or work that tiers have saved."""


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

    def as_json(self) -> dict[str, object]:
        """Return what ``page.js`` draws."""
        return {"kind": "bands", **asdict(self)}


@dataclass(frozen=True, slots=True)
class BarChart:
    """A horizontal bar for each category, made up of the values of all series."""

    title: str
    unit: Unit
    categories: Sequence[str]
    parts: Sequence[Series]

    def as_json(self) -> dict[str, object]:
        """Return what ``page.js`` draws."""
        return {"kind": "bars", **asdict(self)}


Chart = BandChart | BarChart
