"""Hits of requests, by the tier that their pages came from."""

from dataclasses import asdict, dataclass

__all__ = ["Hits"]


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

    def __str__(self) -> str:
        """Name the counts by tier, fastest first, as in ``12 from device, 4 from storage``."""
        return ", ".join(f"{count} from {tier}" for tier, count in self.by_tier().items() if count) or "none"

    def __add__(self, other: "Hits") -> "Hits":
        return Hits(self.device + other.device, self.host + other.host, self.storage + other.storage)

    def tokens(self, page_size: int, tokens_max: int) -> "Hits":
        """Return the tokens of so many pages of a prompt, which has ``tokens_max``: its last block may be partial."""
        pages_ends = (self.device, self.device + self.host, self.total)
        return Hits.of_ends(*(min(pages * page_size, tokens_max) for pages in pages_ends))
