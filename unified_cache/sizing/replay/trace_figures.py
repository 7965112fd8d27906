"""Figures of a trace: how much of it repeats, how soon, how often, and in which sessions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

from unified_cache.sizing.replay.lru_stack import Fenwick
from unified_cache.sizing.replay.trace import OnProgress, TraceRequest, no_progress
from unified_cache.sizing.replay.trace_sessions import sessions_of
from unified_cache.sizing.report.charts import BarChart, Hue, Series, Unit
from unified_cache.sizing.report.page import Page, TableSection

PROGRESS_BLOCKS = 65_536
"""Blocks between two reports of progress."""


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Figures of a trace before it is replayed. Histograms count by powers of two: [2**n, 2**(n + 1))."""

    requests: int
    seconds: float
    """From the first request to the last, by their timestamps."""
    block_tokens: int
    input_tokens: int
    output_tokens: int
    blocks: int
    """Blocks of all prompts."""
    different_blocks: int
    reuse_distances: tuple[int, ...]
    """Uses of a block again, by how many other blocks were used meanwhile: what an LRU cache must hold to have it."""
    popularity: tuple[int, ...]
    """Uses, by how often their block is used in all."""
    session_requests: tuple[int, ...]
    """Sessions, by their requests."""

    @property
    def seen_ratio(self) -> float:
        """Share of the blocks that had been used before: what a cache of any size could hit."""
        return 1 - self.different_blocks / self.blocks if self.blocks else 0.0

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return sum(self.session_requests)

    @classmethod
    def of(cls, requests: Sequence[TraceRequest], on_progress: OnProgress = no_progress) -> "TraceFigures":
        """Count a trace; its blocks are used in the order of its requests. Costs n log n of its blocks.

        ``on_progress`` is called now and then with how many blocks were counted.
        """
        uses = [block for request in requests for block in request.hash_ids]
        counts = Counter(uses)
        sessions = Counter(sessions_of(requests))
        return cls(
            requests=len(requests),
            seconds=(requests[-1].timestamp - requests[0].timestamp) / 1000,
            block_tokens=requests[0].block_tokens,
            input_tokens=sum(request.input_length for request in requests),
            output_tokens=sum(request.output_length for request in requests),
            blocks=len(uses),
            different_blocks=len(counts),
            reuse_distances=_by_powers(_distances(uses, on_progress)),
            popularity=_by_powers([count for count in counts.values() for _ in range(count)]),
            session_requests=_by_powers(list(sessions.values())),
        )

    def as_json(self) -> dict[str, object]:
        """Return everything under stable names."""
        return {**asdict(self), "seen_block_ratio": self.seen_ratio, "sessions": self.sessions}


def page_of(name: str, figures: TraceFigures) -> Page:
    """Return what the figures of a trace say: how soon blocks are used again, how often, how long sessions are."""
    lru = [f"{hits / figures.blocks:.2%}" for hits in accumulate(figures.reuse_distances)]
    histograms = {
        "Uses again, by the blocks used meanwhile (reuse distance)": ("uses again", figures.reuse_distances),
        "Uses, by how often their block is used (popularity)": ("uses", figures.popularity),
        "Sessions, by their requests": ("sessions", figures.session_requests),
    }
    distances, *tables = [
        TableSection(title, (title, counted), _rows(counts)) for title, (counted, counts) in histograms.items()
    ]
    distances = replace(
        distances,
        columns=(*distances.columns, "an LRU cache hits"),
        rows=[(*row, share) for row, share in zip(distances.rows, lru, strict=True)],
    )
    return Page(
        title=f"Trace {name}",
        headline=f"{figures.seen_ratio:.2%} of {figures.blocks:,} blocks had been asked for before, "
        f"in {figures.sessions:,} sessions of {figures.requests:,} requests.",
        lead="An LRU cache of so many blocks has what is used again at a smaller distance.",
        alarm="",
        charts=[
            BarChart(title, Unit.COUNT, [text for text, _ in _rows(counts)], [Series(counted, Hue.PLAIN, counts)])
            for title, (counted, counts) in histograms.items()
            if counts
        ],
        tables=[distances, *tables],
        notes=[],
        settings=[
            ("requests", f"{figures.requests:,}"),
            ("sessions", f"{figures.sessions:,}"),
            ("time", f"{figures.seconds / 60:,.1f} minutes"),
            ("input tokens", f"{figures.input_tokens:,}"),
            ("output tokens", f"{figures.output_tokens:,}"),
            ("tokens of a block", f"{figures.block_tokens:,}"),
            ("blocks", f"{figures.blocks:,}"),
            ("different blocks", f"{figures.different_blocks:,}"),
        ],
    )


def _rows(counts: Sequence[int]) -> list[tuple[str, str]]:
    """Return a row for each power of two: 1, 2 to 3, 4 to 7, and its count."""
    spans = ((1 << power, (1 << power + 1) - 1) for power in range(len(counts)))
    texts = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in spans]
    return [(text, f"{count:,}") for text, count in zip(texts, counts, strict=True)]


def _distances(uses: Sequence[int], on_progress: OnProgress) -> list[int]:
    """Return, for each use of a block again, how many blocks were used since its last use, itself included.

    ``latest`` has a one at each position where a block was used last.
    """
    latest = Fenwick(len(uses))
    last: dict[int, int] = {}
    distances: list[int] = []
    for at, block in enumerate(uses):
        before = last.get(block)
        if before is not None:
            distances.append(1 + latest.sum_after(before))
            latest.add(before, -1)
        latest.add(at, 1)
        last[block] = at
        if not (at + 1) % PROGRESS_BLOCKS:
            on_progress(at + 1, "")
    return distances


def _by_powers(values: Sequence[int]) -> tuple[int, ...]:
    """Count positive values by the power of two that they reach."""
    counts = Counter(value.bit_length() - 1 for value in values)
    return tuple(counts[power] for power in range(max(counts, default=-1) + 1))
