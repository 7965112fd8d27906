"""Forecast of reuse: how much a page promises to be worth if it is kept, learned from requests as they come.

What decides how soon a prefix is asked for again can be seen by a cache: which *turn* of its session a request is, how
long the session paused before it, how many pages it brings, and whether more of it is known than a first page that many
share. These make its *cell*. Every request is written into
a log under its cell, and closed there by the request that continues it; from the log follows for each cell and age

    hazard(cell, age)   requests continued at that age, per request that reached it: continued / exposed

and from the hazards what a page is worth that was asked for so long ago: the best rate of reuse that keeping it for
some further time t promises,

    worth(cell, age) = max over t of  P(continued within t | age) / E[time until then, or t | age]

which is the index of J. C. Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41 (1979): of
all rules that look at cell and age alone the one that evicts the least index first is the best. Hazards may rise before
they fall: people think before they answer. As LHD (NSDI 2018) it ranks by hits per byte and time, as LRB (NSDI 2020) it
learns when something is asked for next, as Marconi (MLSys 2025) it judges a prefix by how it is likely to be continued.

    cell        turns of sessions: 8 rows x 5 columns x 2 layers, then prefixes that sessions share, and pages that
                nobody has asked for yet
    rows        first turn alone, first below a shared prefix, second after a short, middle, long pause, later likewise
    columns     new pages, of 512 tokens: 0-1, 2-3, 4-7, 8-15, 16 and more
    layers      pages that the tree has, of 512 tokens: 0-1, more
    ages        in requests: half octaves

Everything is a function of the calls: ranks of a group make the same forecast. No random choice, no transcendental
function, no sum whose order is left to the machine.

Where requests do not differ by more than luck explains, there is no forecast, and lru is right: see ``tells_apart``.
Where they differ, but have not come back of late as was foretold, it is not believed: see ``TrackRecord``.
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from math import sqrt
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

__all__ = ["CELLS_COUNT", "Floats", "Forecast", "Returns", "TrackRecord", "Visit", "summed"]

HALVED_AT = 4096
"""Things that are counted before the counts are halved: habits change."""
RARE = 1 / 16
"""Part of a kind that may be asked for again, if it is to go before others."""


class Returns:
    """Count of how often one kind of page or window is asked for again."""

    __slots__ = ("_left", "_returned")

    def __init__(self, left: float = 0.0, returned: float = 0.0) -> None:
        """Begin with what is expected before anything was seen."""
        self._left = left
        self._returned = returned

    def leave(self) -> None:
        """Record a thing of that kind."""
        if self._left >= HALVED_AT:
            self._left /= 2
            self._returned /= 2
        self._left += 1

    def come_back(self) -> None:
        """Record that one was asked for again."""
        self._returned += 1

    @property
    def part(self) -> float:
        """Part of them that is asked for again."""
        return self._returned / self._left

    @property
    def are_rare(self) -> bool:
        """Whether hardly any is asked for again."""
        return self._returned <= RARE * self._left


FADING = 0.5
"""What the score of a check counts at the next one."""
RECORD_DEVIATIONS = 1.0
"""Standard deviations by which a score must be below zero before that is taken for more than luck."""

Floats: TypeAlias = npt.NDArray[np.float64]


class TrackRecord:
    """Score of what a forecast has foretold, by what came: whether requests come back so, or as if all were alike.

    A forecast is slow to unlearn: where users change their habits, it goes on being wrong for about as long as it has
    been right. But of every request that was waiting at some age two have foretold the chance that it is continued
    then: the forecast by its cell, and lru, which has one chance for all that never rises with age.

        score = sum of  (chance - common) x (continued / mean - went on waiting / (1 - mean)),  mean of both chances

    is more than zero on average where requests come back as the forecast says, and as much less where they come back as
    lru says: a logarithm of the ratio of likelihoods, with ``2 (x - 1) / (x + 1)`` in the place of ``log x``, which
    machines may round differently. A change of habits is seen long before hits tell it: no page has to be evicted.
    """

    __slots__ = ("_chances", "_common", "_ended", "_score", "_spent", "_spread")

    def __init__(self) -> None:
        self._ended = self._spent = np.zeros((1, 1))
        """Continuations, and time that requests spent, by cell and age, until the last check."""
        self._chances = self._common = np.full((1, 1), 0.5)
        """What is foretold: no difference, at first."""
        self._score = 0.0
        self._spread = 0.0
        """Variance of the score that luck would bring, were the truth half-way between both."""

    @property
    def is_bad(self) -> bool:
        """Whether what was foretold has not come true of late, by more than luck explains."""
        return self._score < 0 and self._score * self._score > RECORD_DEVIATIONS * RECORD_DEVIATIONS * self._spread

    def check(self, ended: Floats, spent: Floats) -> None:
        """Score what has come since the last check; counts are those of all that was seen."""
        continued, waited = ended - self._ended, spent - self._spent
        self._ended, self._spent = ended, spent
        if _total(continued) < 0:
            return  # the log has forgotten every other request meanwhile
        difference, mean = self._chances - self._common, (self._chances + self._common) / 2
        score = difference * (continued / mean - waited / (1 - mean))
        spread = difference * difference * (continued + waited) / (mean * (1 - mean))
        self._score = FADING * self._score + _total(score)
        self._spread = FADING * self._spread + _total(spread)

    def foretell(self, hazards: Floats, common: Floats) -> None:
        """Hold these hazards against what comes, by cell and age, beside the one that all cells have in common.

        A hazard is a number of requests that are continued for each that goes on waiting.
        """
        self._chances, self._common = hazards / (1 + hazards), common / (1 + common)


def summed(counts: Floats, axis: int) -> Floats:
    """Add up an axis in its order, whatever the machine, and keep it."""
    return np.add.accumulate(counts, axis=axis).take([-1], axis=axis)


def _total(counts: Floats) -> float:
    return float(summed(summed(counts, 1), 0)[0, 0])


COLUMN_TOKENS = 512
COLUMNS = 5
LAYERS = 2
ROWS = 8
ROW_CELLS = COLUMNS * LAYERS
SESSION_CELLS = ROWS * ROW_CELLS
IN_SESSIONS = slice(None, SESSION_CELLS)
"""Cells by which a forecast is judged: that prefixes which sessions share come back sooner would drown all else."""
SHARED_CELLS = 3
"""Prefixes below which 2, 3 to 4, 5 and more sessions have begun."""
SHARED = SESSION_CELLS
UNASKED = SHARED + SHARED_CELLS
"""Pages that came from storage and that nobody has asked for yet."""
CELLS_COUNT = UNASKED + 1

AGES = (0, 1, *(edge << octave for octave in range(13) for edge in (2, 3)))
"""First age of each bin, in requests: half octaves."""
BINS = len(AGES)

LOG_MAX = 65_536
"""Requests that the log remembers; when it is full, every other one is forgotten."""
REFRESH_REQUESTS = (64, 256)
"""Requests between two looks at the log, least and most: in between a quarter of those that were seen.

What a look has foretold is checked more often: when a sixteenth of those has come, within the same bounds.
"""
GHOSTS_MAX = 16_384
"""Runs remembered after they left the tree."""
PRIOR_EVENTS = 2.0
"""Continuations that a hazard begins with: the weight of what is expected before anything was seen."""
MARGIN_EVENTS = 4.0
"""The same for a whole row, column or layer."""
ROW_FACTORS = (1.0, 1.0, 1.8, 1.3, 0.7, 2.8, 1.8, 1.0)
"""Hazard of each row that is expected before anything was seen: who came back soon and often comes back."""
MARGINS = (
    ((1, 2), MARGIN_EVENTS),
    ((0, 2), MARGIN_EVENTS),
    ((2,), PRIOR_EVENTS),
    ((0, 1), MARGIN_EVENTS),
    ((0,), PRIOR_EVENTS),
)
"""Axes of (row, column, layer) to sum over, and the events that a factor begins with: rows, columns, rows by columns,
layers, columns by layers."""
EXPECTED_MIN = 5.0
"""Continuations that luck would bring to a cell or an age, for what it has brought to be compared: as is usual."""
DEVIATIONS = 2.0
"""Standard deviations beyond luck from which on requests are taken to differ."""
NEIGHBOUR = 0.7
"""What an age tells of the next half octave."""


class Visit(NamedTuple):
    """One request's use of the tree, from its lock to its release."""

    number: int
    """Number of the request, which tells its age."""
    cell: int
    start: int
    """Pages that the tree had of its prompt."""
    end: int
    """Pages of its prompt."""
    goes_on: bool
    """Whether it continues the request that was the last to use those pages."""


class Ghost(NamedTuple):
    """The last request of a run, as it is remembered when the run has left the tree."""

    number: int
    cell: int
    end: int
    """Pages that it asked for; of a prefix that sessions share, how many have begun below it."""
    run_end: int
    """Where the run ended that left the tree."""


class ReuseLog:
    """Log of requests by cell, and of the age at which each was continued."""

    __slots__ = ("_ages", "_cells", "_left_out", "_shift", "now")

    def __init__(self) -> None:
        self.now = 0
        """Number of the latest entry."""
        self._shift = 0
        """Entries whose number is a multiple of two to this power are kept; entry n stands at n >> shift, minus 1."""
        self._left_out = 0
        """Bits that a number which is kept has not."""
        self._cells = array("b")
        self._ages = array("q")
        """Age at which each was continued; -1 while it is not."""

    def open(self, cell: int) -> int:
        """Write down that a request came; return its number."""
        number = self.now = self.now + 1
        if not number & self._left_out:
            if len(self._cells) == LOG_MAX:
                self._shift += 1
                self._left_out = (1 << self._shift) - 1
                self._cells = self._cells[1::2]
                self._ages = self._ages[1::2]
                if number & self._left_out:
                    return number
            self._cells.append(cell)
            self._ages.append(-1)
        return number

    def close(self, number: int) -> None:
        """Write down that an earlier request is continued now. Once more changes nothing."""
        if number & self._left_out:
            return
        place = (number >> self._shift) - 1
        if self._ages[place] < 0:
            self._ages[place] = self.now - number

    def counts(self) -> tuple[Floats, Floats]:
        """Return by cell and bin the requests continued at that age, and the time that requests spent at it."""
        cells = np.frombuffer(self._cells, np.int8).astype(np.int64)
        closed = np.frombuffer(self._ages, np.int64)
        numbers = np.arange(1, len(cells) + 1, dtype=np.int64) << self._shift
        ages = np.where(closed < 0, self.now - numbers, closed)
        bins = np.searchsorted(_EDGES, ages, "right") - 1
        places = cells * BINS + bins
        size = CELLS_COUNT * BINS
        ended = np.bincount(places[closed >= 0], minlength=size).reshape(CELLS_COUNT, BINS)
        reached = np.bincount(places, minlength=size).reshape(CELLS_COUNT, BINS)
        # Whole numbers below 2**53: sums of them are exact in any order.
        spent = np.bincount(places, weights=ages - _EDGES[bins], minlength=size).reshape(CELLS_COUNT, BINS)
        beyond = reached[:, ::-1].cumsum(axis=1)[:, ::-1] - reached
        return ended.astype(np.float64), beyond * _WIDTHS + spent


class Forecast:
    """Tells requests that continue others, and what pages are worth by the request that used them last."""

    __slots__ = (
        "_check_at",
        "_column_pages",
        "_ghosts",
        "_log",
        "_look_at",
        "_mean_pause",
        "_record",
        "is_ready",
        "now",
        "requests_count",
        "table",
    )

    def __init__(self, page_size: int) -> None:
        self._column_pages = max(1, COLUMN_TOKENS // page_size)
        self.now = 0
        """Number of the latest request."""
        self._log = ReuseLog()
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._mean_pause = 0.0
        self._record = TrackRecord()
        self._check_at = self._look_at = REFRESH_REQUESTS[0]
        self.table: list[list[float]] = []
        """Worth by cell and age, as the latest look at the log has found; empty where requests do not differ."""
        self.is_ready = False
        """Whether enough was seen to tell what pages are worth, they differ beyond luck, and that came true of late."""
        self.requests_count = 0

    def worth(self, cell: int, number: int) -> float:
        """Return what a page is worth that request ``number`` used last; only once the forecast is ready."""
        return self.table[cell][bisect_right(AGES, self.now - number) - 1]

    # ---- requests ------------------------------------------------------------------------------------------------

    def begin(self, start: int, total: int, last: Ghost | None, *, below_shared: bool) -> Visit:
        """Note a request of ``total`` pages, of which the tree knows ``start``; ``last`` is the one it continues."""
        self.requests_count += 1
        if last is None:
            row, new_pages = int(below_shared), total - start
        else:
            self._log.close(last.number)
            row, new_pages = self._row(last), total - last.end
        column = max(1, min(new_pages // self._column_pages, 16)).bit_length() - 1
        layer = int(start >= 2 * self._column_pages)
        cell = (row * COLUMNS + column) * LAYERS + layer
        number = self.now = self._log.open(cell)
        if self.requests_count >= self._check_at:
            self._check()
        return Visit(number, cell, start, total, last is not None)

    def _check(self) -> None:
        """Hold what has come against what was foretold, and look at the log anew when it is time for that."""
        seen = self.requests_count
        least, most = REFRESH_REQUESTS
        ended, spent = self._log.counts()
        self._record.check(ended[IN_SESSIONS], spent[IN_SESSIONS])
        if seen >= self._look_at:
            self._look_at = seen + min(max(least, seen // 4), most)
            hazards = hazards_by_cell(ended, spent)
            self._record.foretell(hazards[IN_SESSIONS], _never_rising(*_of_sessions(ended, spent)))
            self.table = worths(hazards) if tells_apart(ended, spent) else []
        self.is_ready = bool(self.table) and not self._record.is_bad
        self._check_at = min(self._look_at, seen + min(max(least, seen // 16), most))

    def _row(self, last: Ghost) -> int:
        """Return the row of a request that continues another."""
        pause = self.now + 1 - last.number
        mean = self._mean_pause
        self._mean_pause = mean + (pause - mean) / 64 if mean else float(pause)
        length = 0 if pause < 0.3 * mean else 1 if pause < 1.5 * mean else 2
        return 2 + length + (0 if first_turn(last.cell) else 3)

    def open(self, cell: int) -> int:
        """Note a run that is no request's own, from now on; return its number."""
        self.now = self._log.open(cell)
        return self.now

    def close(self, number: int) -> None:
        """Note that such a run is used again."""
        self._log.close(number)

    # ---- ghosts --------------------------------------------------------------------------------------------------

    def remember(self, start: int, page: bytes, ghost: Ghost) -> None:
        """Keep the last request of a run that leaves the tree; ``page`` is its first one, which stood at ``start``."""
        ghosts = self._ghosts
        ghosts[xxh3_64_intdigest(page, start)] = ghost
        if len(ghosts) > GHOSTS_MAX:
            ghosts.popitem(last=False)

    def recall(self, start: int, page: bytes) -> Ghost | None:
        """Take back what is remembered of a run that began with ``page`` at ``start``."""
        return self._ghosts.pop(xxh3_64_intdigest(page, start), None)


_EDGES: npt.NDArray[np.int64] = np.array(AGES, np.int64)
_WIDTHS: Floats = np.diff(_EDGES, append=2 * AGES[-1]).astype(np.float64)
_FADING: Floats = np.multiply.accumulate(np.full(BINS, NEIGHBOUR))
_PRIOR: Floats = 0.3 / (_EDGES.astype(np.float64) + 30.0)
"""Hazard that is expected before anything was seen: the older, the less."""


def hazards_by_cell(ended: Floats, spent: Floats) -> Floats:
    """Return the hazards by cell and age, from how many requests were continued and how long they waited.

    A hazard is that of all requests at that age, times what each of ``MARGINS`` makes of what those before it leave to
    explain; each of these factors begins at one and needs evidence to leave it.
    """
    known, waited = _of_sessions(ended, spent)
    base = known / waited
    grid = (ROWS, COLUMNS, LAYERS, BINS)
    ended_grid, spent_grid = ended[IN_SESSIONS].reshape(grid), spent[IN_SESSIONS].reshape(grid)
    by_grid = base * np.array(ROW_FACTORS).reshape(ROWS, 1, 1, 1) * np.ones(grid)
    for axes, events in MARGINS:
        seen, expected = ended_grid, spent_grid * by_grid
        for axis in axes:
            seen, expected = summed(seen, axis), summed(expected, axis)
        continued, awaited = _smoothed(seen, expected) + events
        by_grid *= continued / awaited
    others = slice(SESSION_CELLS, None)
    continued, awaited = _smoothed(ended[others], spent[others] * base) + PRIOR_EVENTS
    return np.concatenate([by_grid.reshape(SESSION_CELLS, BINS), base * (continued / awaited)])


def _of_sessions(ended: Floats, spent: Floats) -> tuple[Floats, Floats]:
    """Return by age what was seen of all requests of sessions, and what is expected of them before that."""
    known, waited = summed(ended[IN_SESSIONS], 0)[0], summed(spent[IN_SESSIONS], 0)[0]
    return known + PRIOR_EVENTS, waited + PRIOR_EVENTS / _PRIOR


def tells_apart(ended: Floats, spent: Floats) -> bool:
    """Tell whether requests differ by cell, or come back the likelier the older they are, beyond what luck explains.

    Where they do not, the oldest is worth least, whatever its cell, and lru is right. Pearson's test against hazards
    that are the same in all cells and never rise, on those cells and ages of which five continuations are expected.
    """
    base = _never_rising(summed(ended, 0)[0], summed(spent, 0)[0])
    expected = spent * base
    chi_squared = count = 0.0
    for axis in (0, 1):
        for seen, awaited in zip(summed(ended, axis).flat, summed(expected, axis).flat, strict=True):
            if awaited >= EXPECTED_MIN:
                chi_squared += float((seen - awaited) ** 2 / awaited)
                count += 1
    return chi_squared - count > DEVIATIONS * sqrt(2 * count)


def _never_rising(ended: Floats, spent: Floats) -> Floats:
    """Return the hazards by age that fit best of those that never rise: neighbours that do are made one."""
    runs: list[list[float]] = []
    for seen, waited in zip(ended.tolist(), spent.tolist(), strict=True):
        runs.append([seen, waited, 1])
        while len(runs) > 1 and runs[-1][0] * runs[-2][1] > runs[-2][0] * runs[-1][1]:
            later, before = runs.pop(), runs.pop()
            runs.append([before[0] + later[0], before[1] + later[1], before[2] + later[2]])
    return np.array([seen / waited if waited else 0.0 for seen, waited, bins in runs for _ in range(int(bins))])


def _smoothed(*counts: Floats) -> Floats:
    """Let ages speak for their neighbours, less the further they are: the sum of ``NEIGHBOUR ** distance`` of all.

    Each of ``counts``, all of one shape, is smoothed by itself, by sums of what has been divided by how it fades.
    """
    given = np.array(counts)
    rising = np.add.accumulate(given / _FADING, axis=-1) * _FADING
    falling = np.add.accumulate((given * _FADING)[..., ::-1], axis=-1)[..., ::-1] / _FADING
    smoothed: Floats = rising + falling - given
    return smoothed


def worths(hazards: Floats) -> list[list[float]]:
    """Return what a page is worth by cell and age: the best rate of reuse of all times to keep it for."""
    by_age = hazards.T
    widths = _WIDTHS.reshape(BINS, 1)
    lasting = 1 / (1 + by_age * widths)
    """Chance to leave a bin unused."""
    kept = lasting * widths
    here = np.array((kept * by_age, kept))
    expected = np.zeros_like(here)
    """Uses, and time, expected of keeping a page from one age on, by the age until which it is kept."""
    found = np.empty_like(by_age)
    for age in range(BINS - 1, -1, -1):
        expected[:, age + 1 :] *= lasting[age]
        expected[:, age:] += here[:, age : age + 1]
        uses, time = expected[:, age:]
        found[age] = (uses / time).max(axis=0)
    worths_by_cell: list[list[float]] = found.T.tolist()
    return worths_by_cell


def first_turn(cell: int) -> bool:
    """Tell whether a request of that cell began a session."""
    return cell < 2 * ROW_CELLS


def in_session(cell: int) -> bool:
    """Tell whether a cell is that of a session's request."""
    return cell < SESSION_CELLS


def shared_cell(sessions: int) -> int:
    """Return the cell of a prefix below which so many sessions have begun."""
    return SHARED + min(max(sessions - 1, 1).bit_length() - 1, SHARED_CELLS - 1)


def goes_on(agreed: int, start: int, end: int) -> bool:
    """Tell whether a request that agrees with so many pages continues one that asked for ``end``, from ``start`` new.

    All but the last page will do, which a template or a partial block may change; or half of what was new.
    """
    return agreed >= end - 1 or 2 * (agreed - start) >= end - start
