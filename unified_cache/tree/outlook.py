"""Outlook of a lane under adaptive eviction, as values: what a prompt's pages are worth, and which node goes next."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from unified_cache.pool import Tier
from unified_cache.tree.cell_words import cell_text
from unified_cache.tree.forecast import LogLook

__all__ = [
    "CellOutlook",
    "ForecastFigures",
    "ForecastRun",
    "Guide",
    "LaneGuide",
    "LaneOutlook",
    "NextVictim",
    "VictimReason",
]


class Guide(Enum):
    """Order that a lane under adaptive eviction goes by at present."""

    FORECAST = "forecast"
    UNTOLD = "untold"
    """LRU: too few requests were seen, or they differ by no more than luck explains, or not as was foretold."""
    LRU_AHEAD = "lru_ahead"
    """LRU, whose shadow has hit more of late."""
    ROOM_LEFT = "room_left"
    """LRU: less than half as much has been evicted as the lane holds."""

    @property
    def text(self) -> str:
        """The same in words."""
        return _GUIDE_TEXTS[self]


_GUIDE_TEXTS: Mapping[Guide, str] = {
    Guide.FORECAST: "by the forecast",
    Guide.UNTOLD: "by lru: requests differ by no more than luck, or not as was foretold",
    Guide.LRU_AHEAD: "by lru, which would have hit more of late",
    Guide.ROOM_LEFT: "by lru, until half as much has been evicted as is held",
}


class VictimReason(Enum):
    """Reason that a node goes before all others."""

    EXPIRED = "expired"
    LAST_PAGE = "last_page"
    LEAST_WORTH = "least_worth"
    LEAST_RECENT = "least_recent"
    PREFERRED = "preferred"

    @property
    def text(self) -> str:
        """The same in words."""
        return _REASON_TEXTS[self]


_REASON_TEXTS: Mapping[VictimReason, str] = {
    VictimReason.EXPIRED: "its time to live is over",
    VictimReason.LAST_PAGE: "it ends with the last page of a prompt, and hardly any of those is asked for again",
    VictimReason.LEAST_WORTH: "it is worth least",
    VictimReason.LEAST_RECENT: "it was used longest ago",
    VictimReason.PREFERRED: "nothing else is left but what is preferred",
}


@dataclass(frozen=True, slots=True)
class ForecastRun:
    """Pages [start, end) of a prompt that one node holds, and what is expected of them."""

    start: int
    end: int
    cell: str
    """Kind of the request that used them last, in words."""
    age: int
    """Requests since then, and times that another session began below a shared prefix."""
    index: float | None
    """Worth: the best rate of hits, for each page and request, that keeping them promises; None while lru decides."""


@dataclass(frozen=True, slots=True)
class NextVictim:
    """The node that is evicted next from a lane, if room is needed now."""

    pages: ForecastRun
    """Its pages, as pages of a prompt that it is part of."""
    is_of_prompt: bool
    """Whether the prompt that was asked about is such a prompt."""
    reason: VictimReason


@dataclass(frozen=True, slots=True)
class LaneOutlook:
    """Forecast of a prompt's pages in one lane, and the node that goes next there."""

    tier: Tier
    component: int
    guide: Guide
    runs: tuple[ForecastRun, ...]
    """Of the pages that the lane holds, in their order."""
    next_victim: NextVictim | None
    """None if locks pin all, or nothing is held."""


@dataclass(frozen=True, slots=True)
class LaneGuide:
    """Order that one lane goes by."""

    tier: Tier
    component: int
    guide: Guide


@dataclass(frozen=True, slots=True)
class CellOutlook:
    """Requests of one cell, and what pages are worth that such a request used last."""

    text: str
    requests: int
    """Those in the log, which forgets every other one where it is full."""
    continued: int
    """Of these, those that a later request has continued."""
    least: float | None
    """Worth at the age at which it is least, None while there is no forecast."""
    most: float | None
    """The same at the age at which it is most."""


@dataclass(frozen=True, slots=True)
class ForecastFigures:
    """The forecast as a whole, as of its latest look at the log; ``str()`` is a table of its cells."""

    requests: int
    """Requests seen."""
    lanes: tuple[LaneGuide, ...]
    """Lanes under adaptive eviction that hold anything at all."""
    column_tokens: int = field(repr=False)
    look: LogLook = field(repr=False, compare=False)

    @property
    def cells(self) -> tuple[CellOutlook, ...]:
        """Cells of which there were requests, most first; made when they are asked for."""
        rows = zip(self.look.requests, self.look.continued, strict=True)
        found = [
            CellOutlook(cell_text(cell, self.column_tokens), requests, continued, *self._range(cell))
            for cell, (requests, continued) in enumerate(rows)
            if requests
        ]
        return tuple(sorted(found, key=lambda each: -each.requests))

    @property
    def index_range(self) -> tuple[float, float] | None:
        """Least and most that any page can be worth, of cells of which there were requests; None without a forecast."""
        cells = self.cells
        least = [each.least for each in cells if each.least is not None]
        most = [each.most for each in cells if each.most is not None]
        return (min(least), max(most)) if least and most else None

    def _range(self, cell: int) -> tuple[float | None, float | None]:
        row = self.look.table[cell] if self.look.table else None
        return (None, None) if row is None else (min(row), max(row))

    def __str__(self) -> str:
        lines = [f"{self.requests:,} requests seen"]
        lines += [f"{each.tier.name.lower()}, component {each.component}: {each.guide.text}" for each in self.lanes]
        lines.append(f"{'requests':>8}  {'continued':>9}  {'worth':>19}  last used by")
        for each in self.cells:
            worth = "" if each.least is None or each.most is None else f"{each.least:.6f} to {each.most:.6f}"
            lines.append(f"{each.requests:8,}  {each.continued / each.requests:9.1%}  {worth:>19}  {each.text}")
        return "\n".join(lines)
