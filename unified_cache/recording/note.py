"""One request as it is recorded: its pages, and what was found of them by tier."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from unified_cache.page import PageKey, Prompt

__all__ = ["Hits", "KeyedPages", "RequestNote"]


@dataclass(frozen=True, slots=True)
class KeyedPages:
    """Pages of a request by their keys alone, as a service knows them."""

    keys: Sequence[PageKey]
    page_size: int
    seed: bytes
    """Digest of their namespace, or of whatever keeps them apart from pages of the same tokens."""

    @property
    def pages_count(self) -> int:
        """Number of pages."""
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Hits:
    """Hits by tier, in pages where nothing else is said.

    Hits of a prompt count for the slowest tier needed to resume there; hits of a component for the tier that held them.
    """

    device: int = 0
    host: int = 0
    storage: int = 0

    @classmethod
    def of_ends(cls, device: int, host: int, storage: int) -> "Hits":
        """Return the hits of a prompt that the device alone can resume at ``device``, and so on with each tier more.

        They end at ``storage``, whatever the tiers before it have beyond that.
        """
        device, host = min(device, storage), min(host, storage)
        return cls(device, host - device, storage - host)

    @property
    def total(self) -> int:
        """What was handed back, from anywhere."""
        return self.device + self.host + self.storage

    def by_tier(self) -> dict[str, int]:
        """Return the counts under the tiers' names, fastest first."""
        return asdict(self)

    def __add__(self, other: "Hits") -> "Hits":
        return Hits(self.device + other.device, self.host + other.host, self.storage + other.storage)

    def tokens(self, page_size: int, tokens_max: int) -> "Hits":
        """Return the tokens of so many pages of a prompt, which has ``tokens_max``: its last block may be partial."""
        pages_ends = (self.device, self.device + self.host, self.total)
        return Hits.of_ends(*(min(pages * page_size, tokens_max) for pages in pages_ends))


@dataclass(frozen=True, slots=True)
class RequestNote:
    """One request that is over."""

    at_s: float
    """Time of its look-up, in seconds since the epoch."""
    pages: Prompt | KeyedPages
    output_pages: int
    """Whole pages that were inserted after those of the prompt."""
    found: Hits
    """Pages that need not be computed."""
    bound_by: tuple[str, ...]
    """Components that kept more from being found; empty where everything was."""

    @property
    def pages_count(self) -> int:
        """Whole pages of the prompt."""
        return self.pages.pages_count
