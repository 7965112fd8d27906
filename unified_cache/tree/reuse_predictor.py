"""Predictor of reuse: the score of keeping a page, learned from requests as they come.

A request's *class* is what a cache can see of how soon its prefix is asked for again: which *turn* of its session it
is, how long the session paused before it, how many pages it brings, and whether the tree knows more of it than a first
page that many share. A log holds every request under its class, and closes it with the request that continues it. From
the log follows for each class and age

    hazard(class, age)   requests continued at that age, per request that reached it: continued / exposed

and from the hazards the score of a page that was asked for so long ago: the best rate of reuse that keeping it for
some further time t promises,

    score(class, age) = max over t of  P(continued within t | age) / E[time until then, or t | age]

which is the index of J. C. Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41 (1979): of
all rules that look at class and age alone, evicting the least index first is the best. Hazards may rise before they
fall: people think before they answer. As LHD (NSDI 2018) it ranks by hits per byte and time, as LRB (NSDI 2020) it
learns the time of the next request, as Marconi (MLSys 2025) it judges a prefix by how it is likely to be continued.

    class       turns of sessions: 8 rows x 5 columns x 2 layers, then prefixes that sessions share, and pages that
                nobody has asked for yet
    rows        first turn alone, first below a shared prefix, second after a short, middle, long pause, later likewise
    columns     new pages, of 512 tokens: 0-1, 2-3, 4-7, 8-15, 16 and more
    layers      pages that the tree has, of 512 tokens: 0-1, more
    ages        in requests: half octaves

Everything is a function of the calls: ranks of a group predict the same. No random choice, no transcendental
function, no sum whose order depends on the machine.

Nothing is predicted, and lru decides, where requests do not differ by more than luck explains (``classes_differ``), or
where recent predictions have failed (``PredictionScore``).
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from math import sqrt
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

__all__ = ["CLASSES_COUNT", "Floats", "PredictionScore", "Returns", "ReusePredictor", "TreeRequest", "summed"]

HALVED_AT = 4096
"""Count at which the counts are halved: habits change."""
RARE = 1 / 16
"""Part of a kind that may be asked for again, if it is to go before others."""


class Returns:
    """Count of how often pages or windows of one kind are asked for again."""

    __slots__ = ("_left", "_returned")

    def __init__(self, left: float = 0.0, returned: float = 0.0) -> None:
        """Begin with the expected counts."""
        self._left = left
        self._returned = returned

    def leave(self) -> None:
        """Record a page or window of that kind."""
        if self._left >= HALVED_AT:
            self._left /= 2
            self._returned /= 2
        self._left += 1

    def come_back(self) -> None:
        """Record that one of them was asked for again."""
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
"""Weight of a check's score at the next one."""
RECORD_DEVIATIONS = 1.0
"""Standard deviations below zero from which on a score is more than bad luck."""

Floats: TypeAlias = npt.NDArray[np.float64]


class PredictionScore:
    """Score of recent predictions: whether requests come back as predicted, or as if all were alike.

    A predictor is slow to unlearn where users change their habits. But for every request that waits at some age there
    are two predictions of the chance that it is continued then: the predictor's by class, and that of lru, one chance
    for all that never rises with age.

        score = sum of  (chance - common) x (continued / mean - went on waiting / (1 - mean)),  mean of both chances

    is above zero on average where requests come back as the predictor says, and as far below where they come back as
    lru says: a ratio of likelihoods, with ``2 (x - 1) / (x + 1)`` for its logarithm, which machines round differently.
    """

    __slots__ = ("_chances", "_common", "_ended", "_score", "_spent", "_spread")

    def __init__(self) -> None:
        self._ended = self._spent = np.zeros((1, 1))
        """Continuations, and time that requests spent, by class and age, until the last check."""
        self._chances = self._common = np.full((1, 1), 0.5)
        """Predicted chances: no difference, at first."""
        self._score = 0.0
        self._spread = 0.0
        """Variance of the score by luck, if the truth were half-way between both."""

    @property
    def is_bad(self) -> bool:
        """Whether recent predictions have failed by more than luck explains."""
        return self._score < 0 and self._score * self._score > RECORD_DEVIATIONS * RECORD_DEVIATIONS * self._spread

    def check(self, ended: Floats, spent: Floats) -> None:
        """Score the requests since the last check; counts are of all requests so far."""
        continued, waited = ended - self._ended, spent - self._spent
        self._ended, self._spent = ended, spent
        if _total(continued) < 0:
            return  # the log has forgotten every other request meanwhile
        difference, mean = self._chances - self._common, (self._chances + self._common) / 2
        score = difference * (continued / mean - waited / (1 - mean))
        spread = difference * difference * (continued + waited) / (mean * (1 - mean))
        self._score = FADING * self._score + _total(score)
        self._spread = FADING * self._spread + _total(spread)

    def predict(self, hazards: Floats, common: Floats) -> None:
        """Set the hazards to score from now on, by class and age, and the one that all classes have in common.

        A hazard is a number of requests that are continued for each that goes on waiting.
        """
        self._chances, self._common = hazards / (1 + hazards), common / (1 + common)


def summed(counts: Floats, axis: int) -> Floats:
    """Sum over an axis in its order on every machine; the axis stays."""
    return np.add.accumulate(counts, axis=axis).take([-1], axis=axis)


def _total(counts: Floats) -> float:
    return float(summed(summed(counts, 1), 0)[0, 0])


COLUMN_TOKENS = 512
COLUMNS = 5
LAYERS = 2
ROWS = 8
ROW_CLASSES = COLUMNS * LAYERS
SESSION_CLASSES = ROWS * ROW_CLASSES
IN_SESSIONS = slice(None, SESSION_CLASSES)
"""Classes by which a predictor is judged; shared prefixes, which come back sooner, would drown all else."""
SHARED_CLASSES = 3
"""Prefixes below which 2, 3 to 4, 5 and more sessions have begun."""
SHARED = SESSION_CLASSES
UNASKED = SHARED + SHARED_CLASSES
"""Pages from storage that nobody has asked for yet."""
CLASSES_COUNT = UNASKED + 1

AGES = (0, 1, *(edge << octave for octave in range(13) for edge in (2, 3)))
"""First age of each bin, in requests: half octaves."""
BINS = len(AGES)

LOG_MAX = 65_536
"""Requests in the log; when it is full, every other one is dropped."""
REFRESH_REQUESTS = (64, 256)
"""Requests between two updates from the log, least and most; in between a quarter of the requests so far.

Predictions are checked more often: after a sixteenth of the requests so far, within the same bounds.
"""
EVICTED_RUNS_MAX = 16_384
"""Runs remembered after their eviction."""
PRIOR_EVENTS = 2.0
"""Continuations that a hazard begins with: the weight of the prior."""
MARGIN_EVENTS = 4.0
"""The same for a whole row, column or layer."""
ROW_FACTORS = (1.0, 1.0, 1.8, 1.3, 0.7, 2.8, 1.8, 1.0)
"""Prior factor of each row: sessions that came back soon and often come back."""
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
"""Expected continuations of a class or an age from which on it is compared: the usual bound."""
DEVIATIONS = 2.0
"""Standard deviations beyond luck from which on requests differ."""
NEIGHBOUR = 0.7
"""Weight of an age for the next half octave."""


class TreeRequest(NamedTuple):
    """One request's use of the tree, from its lock to its release."""

    number: int
    """Number of the request, which gives its age."""
    request_class: int
    start: int
    """Pages that the tree had of its prompt."""
    end: int
    """Pages of its prompt."""
    goes_on: bool
    """Whether it continues the request that was the last to use those pages."""


class EvictedRun(NamedTuple):
    """Last request of a run that was evicted."""

    number: int
    request_class: int
    end: int
    """Pages that it asked for; of a prefix that sessions share, how many have begun below it."""
    run_end: int
    """End of the evicted run."""


class ReuseLog:
    """Log of requests by class, and of the age at which each was continued."""

    __slots__ = ("_ages", "_classes", "_left_out", "_shift", "now")

    def __init__(self) -> None:
        self.now = 0
        """Number of the latest entry."""
        self._shift = 0
        """Entries whose number is a multiple of two to this power are kept; entry n stands at n >> shift, minus 1."""
        self._left_out = 0
        """Bits that are zero in the numbers that are kept."""
        self._classes = array("b")
        self._ages = array("q")
        """Age at which each was continued; -1 while it is not."""

    def open(self, request_class: int) -> int:
        """Record a request; return its number."""
        number = self.now = self.now + 1
        if not number & self._left_out:
            if len(self._classes) == LOG_MAX:
                self._shift += 1
                self._left_out = (1 << self._shift) - 1
                self._classes = self._classes[1::2]
                self._ages = self._ages[1::2]
                if number & self._left_out:
                    return number
            self._classes.append(request_class)
            self._ages.append(-1)
        return number

    def close(self, number: int) -> None:
        """Record that an earlier request is continued now; a second time changes nothing."""
        if number & self._left_out:
            return
        place = (number >> self._shift) - 1
        if self._ages[place] < 0:
            self._ages[place] = self.now - number

    def counts(self) -> tuple[Floats, Floats]:
        """Return by class and bin the requests continued at that age, and the time that requests spent at it."""
        classes = np.frombuffer(self._classes, np.int8).astype(np.int64)
        closed = np.frombuffer(self._ages, np.int64)
        numbers = np.arange(1, len(classes) + 1, dtype=np.int64) << self._shift
        ages = np.where(closed < 0, self.now - numbers, closed)
        bins = np.searchsorted(_EDGES, ages, "right") - 1
        places = classes * BINS + bins
        size = CLASSES_COUNT * BINS
        ended = np.bincount(places[closed >= 0], minlength=size).reshape(CLASSES_COUNT, BINS)
        reached = np.bincount(places, minlength=size).reshape(CLASSES_COUNT, BINS)
        # Whole numbers below 2**53: sums of them are exact in any order.
        spent = np.bincount(places, weights=ages - _EDGES[bins], minlength=size).reshape(CLASSES_COUNT, BINS)
        beyond = reached[:, ::-1].cumsum(axis=1)[:, ::-1] - reached
        return ended.astype(np.float64), beyond * _WIDTHS + spent


class ReusePredictor:
    """Predictor of requests that continue others, and of the score of pages by the last request that used them."""

    __slots__ = (
        "_check_at",
        "_column_pages",
        "_evicted_runs",
        "_log",
        "_mean_pause",
        "_record",
        "_update_at",
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
        self._evicted_runs: OrderedDict[int, EvictedRun] = OrderedDict()
        self._mean_pause = 0.0
        self._record = PredictionScore()
        self._check_at = self._update_at = REFRESH_REQUESTS[0]
        self.table: list[list[float]] = []
        """Score by class and age, as of the latest update; empty where requests do not differ."""
        self.is_ready = False
        """Whether requests differ beyond luck, and recent predictions have come true."""
        self.requests_count = 0

    def score(self, request_class: int, number: int) -> float:
        """Return the score of a page that request ``number`` used last; only once the predictor is ready."""
        return self.table[request_class][bisect_right(AGES, self.now - number) - 1]

    # ---- requests ------------------------------------------------------------------------------------------------

    def begin(self, start: int, total: int, last: EvictedRun | None, *, below_shared: bool) -> TreeRequest:
        """Record a request of ``total`` pages, of which the tree has ``start``; ``last`` is the one it continues."""
        self.requests_count += 1
        if last is None:
            row, new_pages = int(below_shared), total - start
        else:
            self._log.close(last.number)
            row, new_pages = self._row(last), total - last.end
        column = max(1, min(new_pages // self._column_pages, 16)).bit_length() - 1
        layer = int(start >= 2 * self._column_pages)
        request_class = (row * COLUMNS + column) * LAYERS + layer
        number = self.now = self._log.open(request_class)
        if self.requests_count >= self._check_at:
            self._check()
        return TreeRequest(number, request_class, start, total, last is not None)

    def _check(self) -> None:
        """Score the predictions, and update them from the log when that is due."""
        seen = self.requests_count
        least, most = REFRESH_REQUESTS
        ended, spent = self._log.counts()
        self._record.check(ended[IN_SESSIONS], spent[IN_SESSIONS])
        if seen >= self._update_at:
            self._update_at = seen + min(max(least, seen // 4), most)
            hazards = hazards_by_class(ended, spent)
            self._record.predict(hazards[IN_SESSIONS], _never_rising(*_of_sessions(ended, spent)))
            self.table = scores(hazards) if classes_differ(ended, spent) else []
        self.is_ready = bool(self.table) and not self._record.is_bad
        self._check_at = min(self._update_at, seen + min(max(least, seen // 16), most))

    def _row(self, last: EvictedRun) -> int:
        """Return the row of a request that continues another."""
        pause = self.now + 1 - last.number
        mean = self._mean_pause
        self._mean_pause = mean + (pause - mean) / 64 if mean else float(pause)
        length = 0 if pause < 0.3 * mean else 1 if pause < 1.5 * mean else 2
        return 2 + length + (0 if first_turn(last.request_class) else 3)

    def open(self, request_class: int) -> int:
        """Record a run that belongs to no single request; return its number."""
        self.now = self._log.open(request_class)
        return self.now

    def close(self, number: int) -> None:
        """Record that such a run is used again."""
        self._log.close(number)

    # ---- evicted runs --------------------------------------------------------------------------------------------

    def remember(self, start: int, page: bytes, evicted_run: EvictedRun) -> None:
        """Remember the last request of an evicted run, whose first page is ``page``, number ``start`` of its prompt."""
        evicted_runs = self._evicted_runs
        evicted_runs[xxh3_64_intdigest(page, start)] = evicted_run
        if len(evicted_runs) > EVICTED_RUNS_MAX:
            evicted_runs.popitem(last=False)

    def recall(self, start: int, page: bytes) -> EvictedRun | None:
        """Return and forget the evicted run that began with ``page`` at ``start``; None if there is none."""
        return self._evicted_runs.pop(xxh3_64_intdigest(page, start), None)


_EDGES: npt.NDArray[np.int64] = np.array(AGES, np.int64)
_WIDTHS: Floats = np.diff(_EDGES, append=2 * AGES[-1]).astype(np.float64)
_FADING: Floats = np.multiply.accumulate(np.full(BINS, NEIGHBOUR))
_PRIOR: Floats = 0.3 / (_EDGES.astype(np.float64) + 30.0)
"""Prior hazard: the older, the less."""


def hazards_by_class(ended: Floats, spent: Floats) -> Floats:
    """Return the hazards by class and age, from how many requests were continued and how long they waited.

    A hazard is that of all requests at that age, times a factor for each of ``MARGINS``, in their order; a factor
    begins at one and needs evidence to leave it.
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
    others = slice(SESSION_CLASSES, None)
    continued, awaited = _smoothed(ended[others], spent[others] * base) + PRIOR_EVENTS
    return np.concatenate([by_grid.reshape(SESSION_CLASSES, BINS), base * (continued / awaited)])


def _of_sessions(ended: Floats, spent: Floats) -> tuple[Floats, Floats]:
    """Return by age the continuations and waiting time of all requests of sessions, with the prior."""
    known, waited = summed(ended[IN_SESSIONS], 0)[0], summed(spent[IN_SESSIONS], 0)[0]
    return known + PRIOR_EVENTS, waited + PRIOR_EVENTS / _PRIOR


def classes_differ(ended: Floats, spent: Floats) -> bool:
    """Return whether requests differ by class, or come back the likelier the older they are, by more than luck.

    Where they do not, the oldest scores least, whatever its class, and lru is right. Pearson's test against hazards
    that are the same in all classes and never rise, on those classes and ages of which five continuations are expected.
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
    """Return the best fit of hazards by age that never rise: neighbours that rise are merged."""
    runs: list[list[float]] = []
    for seen, waited in zip(ended.tolist(), spent.tolist(), strict=True):
        runs.append([seen, waited, 1])
        while len(runs) > 1 and runs[-1][0] * runs[-2][1] > runs[-2][0] * runs[-1][1]:
            later, before = runs.pop(), runs.pop()
            runs.append([before[0] + later[0], before[1] + later[1], before[2] + later[2]])
    return np.array([seen / waited if waited else 0.0 for seen, waited, bins in runs for _ in range(int(bins))])


def _smoothed(*counts: Floats) -> Floats:
    """Smooth each of ``counts``, all of one shape, over neighbouring ages, by weights ``NEIGHBOUR ** distance``."""
    given = np.array(counts)
    rising = np.add.accumulate(given / _FADING, axis=-1) * _FADING
    falling = np.add.accumulate((given * _FADING)[..., ::-1], axis=-1)[..., ::-1] / _FADING
    smoothed: Floats = rising + falling - given
    return smoothed


def scores(hazards: Floats) -> list[list[float]]:
    """Return the score of a page by class and age: the best rate of reuse of all times to keep it for."""
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
    scores_by_class: list[list[float]] = found.T.tolist()
    return scores_by_class


def first_turn(request_class: int) -> bool:
    """Return whether a request of that class began a session."""
    return request_class < 2 * ROW_CLASSES


def in_session(request_class: int) -> bool:
    """Return whether a class is that of a session's request."""
    return request_class < SESSION_CLASSES


def shared_class(sessions: int) -> int:
    """Return the class of a prefix below which so many sessions have begun."""
    return SHARED + min(max(sessions - 1, 1).bit_length() - 1, SHARED_CLASSES - 1)


def goes_on(agreed: int, start: int, end: int) -> bool:
    """Return whether a request that shares ``agreed`` pages continues one of ``end`` pages, those from ``start`` new.

    All but the last page will do, which a template or a partial block may change; or half of what was new.
    """
    return agreed >= end - 1 or 2 * (agreed - start) >= end - start
