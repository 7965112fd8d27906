"""Result of a replay: one frozen value for the table, the JSON and the report alike."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from unified_cache.core.pool import Hits
from unified_cache.sizing.replay.missed import ComponentMiss
from unified_cache.sizing.replay.plan import ReplayPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequests:
    """Requests that follow each other: what they asked for, and what was handed back, in pages and in tokens."""

    requests: int = 0
    timestamp_ms: float = 0.0
    """Of the last of them."""
    pages: int = 0
    """Pages asked for, padded tails included."""
    seen_pages: int = 0
    """Pages asked for that stand in a prefix which the trace had asked for before: a cache that starts empty and never
    evicts would have handed back these."""
    hits: Hits = field(default_factory=Hits)
    tokens: int = 0
    """Tokens asked for, last blocks at their true length; so are the two below."""
    seen_tokens: int = 0
    hit_tokens: Hits = field(default_factory=Hits)

    @property
    def block_hit_ratio(self) -> float:
        """Share of the blocks that were hit."""
        return self.hits.total / self.pages if self.pages else 0.0

    @property
    def seen_block_ratio(self) -> float:
        """Share of the blocks that an earlier request of the trace had."""
        return self.seen_pages / self.pages if self.pages else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Share of the tokens that were hit."""
        return self.share(self.hit_tokens.total)

    @property
    def seen_token_ratio(self) -> float:
        """Share of the tokens that an earlier request of the trace had."""
        return self.share(self.seen_tokens)

    def share(self, tokens: int) -> float:
        """Return what part ``tokens`` is of those asked for."""
        return tokens / self.tokens if self.tokens else 0.0

    def token_ratios(self) -> dict[str, float]:
        """Return by tier what part of the tokens was handed back."""
        return {tier: self.share(tokens) for tier, tokens in self.hit_tokens.by_tier().items()}

    def tokens_as_json(self) -> dict[str, object]:
        """Return the counts under the names that they have everywhere."""
        return {"tokens": self.tokens, "seen_tokens": self.seen_tokens, "hit_tokens": self.hit_tokens.by_tier()}

    def __add__(self, later: "ServedRequests") -> "ServedRequests":
        return ServedRequests(
            requests=self.requests + later.requests,
            timestamp_ms=later.timestamp_ms,
            pages=self.pages + later.pages,
            seen_pages=self.seen_pages + later.seen_pages,
            hits=self.hits + later.hits,
            tokens=self.tokens + later.tokens,
            seen_tokens=self.seen_tokens + later.seen_tokens,
            hit_tokens=self.hit_tokens + later.hit_tokens,
        )


@dataclass(frozen=True, slots=True)
class ComponentUse:
    """Pages that one component held, hit and moved in a run. Bytes are the true sizes that the pages stand for."""

    name: str
    page_bytes: int
    """Payload of one page in all pools."""
    capacity_pages: Mapping[str, int]
    """Pages that each memory tier can cache."""
    filled_pages: Mapping[str, int | None]
    """Pages that each memory tier held in the end; None where it was full on the way and evicted."""
    hits: Hits
    """Pages handed back: what the resumes that were made needed of this component."""
    moved_pages: Mapping[str, int]
    """Moved pages by kind of transfer."""

    def hit_bytes(self) -> dict[str, int]:
        """Return the bytes handed back, by tier."""
        return {tier: pages * self.page_bytes for tier, pages in self.hits.by_tier().items()}

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes moved, by kind of transfer; without bytes, what would have moved."""
        return {kind: pages * self.page_bytes for kind, pages in self.moved_pages.items()}

    def as_json(self) -> dict[str, object]:
        """Return everything under stable names."""
        return {
            "page_bytes": self.page_bytes,
            "capacity_pages": dict(self.capacity_pages),
            "filled_pages": dict(self.filled_pages),
            "hit_pages": self.hits.by_tier(),
            "hit_bytes": self.hit_bytes(),
            "bytes_moved": self.moved_bytes(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Result of a replay. Blocks are those of the trace."""

    trace: str
    plan: ReplayPlan
    served: ServedRequests
    """All requests together."""
    series: tuple[ServedRequests, ...]
    """The same in parts, as a time series."""
    components: tuple[ComponentUse, ...]
    missed: Mapping[ComponentMiss, int] | None
    """Missed tokens by reason and component, most first; None where it was not asked for."""
    pages_verified: int
    """Pages handed back whose every byte was compared with the oracle."""
    wrong_pages: int
    """Verified pages that held wrong bytes. Anything but 0 is a bug."""
    leaked_slots: int
    """Slots that were not given back. Anything but 0 is a bug."""
    flawed_pages: int
    """Pages that storage returned damaged, each refused and taken for a miss."""
    seconds: float
    environment: Mapping[str, str]
    """Versions and machine: a figure without them says little."""

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Payload by kind of transfer; without bytes, what would have moved."""
        totals: Counter[str] = Counter()
        for component in self.components:
            totals.update(component.moved_bytes())
        return dict(totals)

    @property
    def blocks(self) -> float:
        """Blocks of all prompts; a fraction where prompts count at their true length."""
        return self._blocks(self.served.pages)

    @property
    def requests_per_s(self) -> float:
        """Requests served in a second of wall time, waiting for every transfer."""
        return self.served.requests / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, object]:
        """Return everything under stable names, for ``json.dump``."""
        served = self.served
        return {
            "trace": self.trace,
            "requests": served.requests,
            "blocks": self.blocks,
            "hit_blocks": self._blocks_by_tier(served.hits),
            "block_hit_ratio": served.block_hit_ratio,
            **served.tokens_as_json(),
            "token_hit_ratio": served.token_hit_ratio,
            "seen_token_ratio": served.seen_token_ratio,
            "seen_block_ratio": served.seen_block_ratio,
            "pages_verified": self.pages_verified,
            "wrong_pages": self.wrong_pages,
            "leaked_slots": self.leaked_slots,
            "flawed_pages": self.flawed_pages,
            "bytes_moved": self.bytes_moved,
            "missed": self._missed_as_json(),
            "components": {component.name: component.as_json() for component in self.components},
            "seconds": self.seconds,
            "requests_per_s": self.requests_per_s,
            "settings": self.plan.as_json(),
            "environment": dict(self.environment),
            "series": list(self._series_as_json()),
        }

    def _series_as_json(self) -> Iterator[dict[str, object]]:
        start = 0
        for window in self.series:
            yield {
                "requests": [start, start + window.requests],
                "timestamp_ms": window.timestamp_ms,
                "blocks": self._blocks(window.pages),
                "seen_blocks": self._blocks(window.seen_pages),
                "hit_blocks": self._blocks_by_tier(window.hits),
                **window.tokens_as_json(),
            }
            start += window.requests

    def _missed_as_json(self) -> dict[str, object] | None:
        if self.missed is None:
            return None
        total = sum(self.missed.values())
        by_reason = [
            {
                "component": component,
                "why": why.name.lower(),
                "text": why.value,
                "tokens": tokens,
                "share": tokens / total,
            }
            for (component, why), tokens in self.missed.items()
        ]
        return {"tokens": total, "by_reason": by_reason}

    def _blocks(self, pages: int) -> float:
        blocks = self.plan.blocks_of(pages)
        return int(blocks) if blocks.is_integer() else blocks

    def _blocks_by_tier(self, hits: Hits) -> dict[str, float]:
        """Return blocks handed back by tier; a fraction where a block was handed back in part."""
        return {tier: self._blocks(pages) for tier, pages in hits.by_tier().items()}
