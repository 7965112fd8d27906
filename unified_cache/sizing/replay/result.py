"""Result of a replay: one frozen value for the table, the JSON file and the report alike."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from unified_cache.core.hits import Hits
from unified_cache.sizing.replay.missed import ComponentMiss
from unified_cache.sizing.replay.references import ReferenceHits
from unified_cache.sizing.replay.settings import PlannedSettings


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Tokens of prompts, last blocks at their true length: asked for, seen before, and handed back by tier."""

    asked: int = 0
    seen: int = 0
    """In a prefix that the trace had asked for before: a cache that starts empty and never evicts hands back these."""
    hits: Hits = field(default_factory=Hits)

    @property
    def hit_ratio(self) -> float:
        """Share of the tokens that was handed back."""
        return self.share(self.hits.total)

    @property
    def seen_ratio(self) -> float:
        """Share of the tokens that had been asked for before."""
        return self.share(self.seen)

    def share(self, tokens: int) -> float:
        """Return what part ``tokens`` is of those asked for."""
        return tokens / self.asked if self.asked else 0.0

    def ratios(self) -> dict[str, float]:
        """Return by tier what part of the tokens was handed back."""
        return {tier: self.share(tokens) for tier, tokens in self.hits.by_tier().items()}

    def as_json(self) -> dict[str, object]:
        """Return the counts under the names that they have everywhere."""
        return {"tokens": self.asked, "seen_tokens": self.seen, "hit_tokens": self.hits.by_tier()}

    def __add__(self, other: "TokenUse") -> "TokenUse":
        return TokenUse(self.asked + other.asked, self.seen + other.seen, self.hits + other.hits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequests:
    """Requests that were served: what they asked for, and what was handed back, in pages and in tokens."""

    requests: int = 0
    pages: int = 0
    """Pages asked for, padded tails included."""
    seen_pages: int = 0
    """Pages asked for that stand in a prefix which the trace had asked for before: a cache that starts empty and never
    evicts would have handed back these."""
    hits: Hits = field(default_factory=Hits)
    tokens: TokenUse = TokenUse()

    @property
    def block_hit_ratio(self) -> float:
        """Share of the blocks that were hit."""
        return self.hits.total / self.pages if self.pages else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Share of the tokens that were hit, last blocks at their true length."""
        return self.tokens.hit_ratio

    @property
    def seen_ratio(self) -> float:
        """Share of the blocks that an earlier request of the trace had."""
        return self.seen_pages / self.pages if self.pages else 0.0

    def __add__(self, other: "ServedRequests") -> "ServedRequests":
        return ServedRequests(
            requests=self.requests + other.requests,
            pages=self.pages + other.pages,
            seen_pages=self.seen_pages + other.seen_pages,
            hits=self.hits + other.hits,
            tokens=self.tokens + other.tokens,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSeriesPoint(ServedRequests):
    """Requests of a replay that follow each other, as one point of its time series."""

    start: int
    """Number of the first of them."""
    timestamp_ms: float
    """Timestamp of the last of them."""

    @property
    def end(self) -> int:
        """Number of the first request after them."""
        return self.start + self.requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult(ServedRequests):
    """Result of a replay: all its requests together, and how they were served. Blocks are those of the trace."""

    trace: str
    settings: PlannedSettings
    apart: ServedRequests | None
    """The same requests served by as many engines that have an equal part of the store each; None for one engine, or no
    store."""
    engines: tuple[ServedRequests, ...]
    """What each engine has served."""
    components: tuple[ComponentUse, ...]
    missed: Mapping[ComponentMiss, int] | None
    """Missed tokens by reason and component, most first; None where it was not asked for."""
    references: Mapping[str, ReferenceHits] | None
    """Hits of lru and of the clairvoyant policy; None without reasons, and as ``references_of`` says."""
    pages_verified: int
    """Pages handed back whose every byte was compared with the oracle."""
    wrong_pages: int
    """Verified pages that held wrong bytes. Anything but 0 is a bug."""
    leaked_slots: int
    """Slots that were not given back. Anything but 0 is a bug."""
    flawed_pages: int
    """Pages that storage returned damaged, each refused and taken for a miss."""
    seconds: float
    series: tuple[TimeSeriesPoint, ...]
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
        return self._blocks(self.pages)

    @property
    def requests_per_s(self) -> float:
        """Requests served in a second of wall time, waiting for every transfer."""
        return self.requests / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, object]:
        """Return everything under stable names, for ``json.dump``."""
        return {
            "trace": self.trace,
            "requests": self.requests,
            "blocks": self.blocks,
            "hit_blocks": self._blocks_by_tier(self.hits),
            "block_hit_ratio": self.block_hit_ratio,
            "block_hit_ratio_apart": None if self.apart is None else self.apart.block_hit_ratio,
            **self.tokens.as_json(),
            "token_hit_ratio": self.token_hit_ratio,
            "token_hit_ratio_apart": None if self.apart is None else self.apart.token_hit_ratio,
            "seen_token_ratio": self.tokens.seen_ratio,
            "seen_block_ratio": self.seen_ratio,
            "pages_verified": self.pages_verified,
            "wrong_pages": self.wrong_pages,
            "leaked_slots": self.leaked_slots,
            "flawed_pages": self.flawed_pages,
            "bytes_moved": self.bytes_moved,
            "missed": self._missed_as_json(),
            "references": None
            if self.references is None
            else {
                name: {
                    "capacity_pages": each.capacity_pages,
                    "hit_blocks": self._blocks(each.hit_pages),
                    "hit_tokens": each.hit_tokens,
                }
                for name, each in self.references.items()
            },
            "engines": [
                {
                    "requests": engine.requests,
                    "pages": engine.pages,
                    "hit_pages": engine.hits.by_tier(),
                    **engine.tokens.as_json(),
                }
                for engine in self.engines
            ],
            "components": {
                component.name: {
                    "page_bytes": component.page_bytes,
                    "capacity_pages": dict(component.capacity_pages),
                    "filled_pages": dict(component.filled_pages),
                    "hit_pages": component.hits.by_tier(),
                    "hit_bytes": component.hit_bytes(),
                    "bytes_moved": component.moved_bytes(),
                }
                for component in self.components
            },
            "seconds": self.seconds,
            "requests_per_s": self.requests_per_s,
            "settings": self.settings.as_json(),
            "environment": dict(self.environment),
            "series": [
                {
                    "requests": [window.start, window.end],
                    "timestamp_ms": window.timestamp_ms,
                    "blocks": self._blocks(window.pages),
                    "seen_blocks": self._blocks(window.seen_pages),
                    "hit_blocks": self._blocks_by_tier(window.hits),
                    **window.tokens.as_json(),
                }
                for window in self.series
            ],
        }

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
        blocks = self.settings.plan.blocks_of(pages)
        return int(blocks) if blocks.is_integer() else blocks

    def _blocks_by_tier(self, hits: Hits) -> dict[str, float]:
        """Return blocks handed back by tier; a fraction where a block was handed back in part."""
        return {tier: self._blocks(pages) for tier, pages in hits.by_tier().items()}
