"""Answer of a prefetch to what it could have brought and did not."""

from dataclasses import dataclass

__all__ = ["LeftAlone"]


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """Pages [start, end) of a prompt that storage has and that are not read, because computing them is faster."""

    start: int
    end: int
    page_size: int
    load_s: float
    """Seconds that reading them was expected to take."""
    compute_s: float
    """Seconds that computing them was expected to take."""

    @property
    def tokens(self) -> int:
        """Tokens of these pages."""
        return (self.end - self.start) * self.page_size

    @property
    def text(self) -> str:
        """The answer in words."""
        times = f"that takes {_seconds(self.load_s)}, computing them {_seconds(self.compute_s)}"
        return f"storage has {self.tokens:,} tokens, not worth loading: {times}"

    def as_json(self) -> dict[str, object]:
        """Return it under stable names, for ``json.dump``."""
        return {
            "start": self.start,
            "end": self.end,
            "load_s": self.load_s,
            "compute_s": self.compute_s,
            "text": self.text,
        }


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
