"""Figures of a trace: how much of it repeats, how soon, how often, and in which sessions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from unified_cache.replay.lru_stack import Fenwick
from unified_cache.replay.trace import Tell, TraceRequest, untold
from unified_cache.replay.trace_sessions import sessions_of

__all__ = ["TraceFigures", "power_text"]

TOLD_BLOCKS = 65_536
"""Blocks between two times that whoever watches is told."""


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

    @property
    def headline(self) -> str:
        """How much of the trace repeats, in a sentence."""
        return (
            f"{self.seen_ratio:.2%} of {self.blocks:,} blocks had been asked for before, "
            f"in {self.sessions:,} sessions of {self.requests:,} requests."
        )

    def lru_ratios(self) -> list[float]:
        """Return the share of all blocks that an LRU cache hits which holds as many as each reuse distance's span."""
        return [hits / self.blocks for hits in accumulate(self.reuse_distances)]

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures in words: names and values."""
        return [
            ("requests", f"{self.requests:,}"),
            ("sessions", f"{self.sessions:,}"),
            ("time", f"{self.seconds / 60:,.1f} minutes"),
            ("input tokens", f"{self.input_tokens:,}"),
            ("output tokens", f"{self.output_tokens:,}"),
            ("tokens of a block", f"{self.block_tokens:,}"),
            ("blocks", f"{self.blocks:,}"),
            ("different blocks", f"{self.different_blocks:,}"),
            ("asked for before", f"{self.seen_ratio:.2%}"),
        ]

    @classmethod
    def of(cls, requests: Sequence[TraceRequest], tell: Tell = untold) -> "TraceFigures":
        """Count a trace; its blocks are used in the order of its requests. Costs n log n of its blocks.

        ``tell`` is told every now and then how many blocks were counted.
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
            reuse_distances=_by_powers(_distances(uses, tell)),
            popularity=_by_powers([count for count in counts.values() for _ in range(count)]),
            session_requests=_by_powers(list(sessions.values())),
        )

    def as_json(self) -> dict[str, object]:
        """Return everything under stable names."""
        return {
            "requests": self.requests,
            "seconds": self.seconds,
            "block_tokens": self.block_tokens,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "blocks": self.blocks,
            "different_blocks": self.different_blocks,
            "seen_block_ratio": self.seen_ratio,
            "sessions": self.sessions,
            "reuse_distances": list(self.reuse_distances),
            "popularity": list(self.popularity),
            "session_requests": list(self.session_requests),
        }


def power_text(power: int) -> str:
    """Say what a histogram counts at a power of two: 1, 2 to 3, 4 to 7."""
    first, last = 1 << power, (1 << power + 1) - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _distances(uses: Sequence[int], tell: Tell) -> list[int]:
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
        if not (at + 1) % TOLD_BLOCKS:
            tell(at + 1, "")
    return distances


def _by_powers(values: Sequence[int]) -> tuple[int, ...]:
    """Count positive values by the power of two that they reach."""
    counts = Counter(value.bit_length() - 1 for value in values)
    return tuple(counts[power] for power in range(max(counts, default=-1) + 1))
