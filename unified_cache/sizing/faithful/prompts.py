"""Documents with planted facts: a model that reads another page, or none, answers otherwise."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["FactDocument"]

PLACES = (
    *("Lisbon", "Oslo", "Cairo", "Quito", "Kyoto", "Lagos", "Lima", "Riga", "Turin", "Hanoi", "Perth", "Dakar"),
    *("Sofia", "Seoul", "Tunis", "Malmo", "Delhi", "Davos", "Boston", "Vienna", "Bergen", "Madrid", "Nantes", "Zagreb"),
)
QUESTIONS = 3
"""Of each document: about its beginning, its middle and its end."""


@dataclass(frozen=True)
class FactDocument:
    """A text that begins with a number of its own, so that it shares no page with another."""

    number: int
    facts: int

    @cached_property
    def _codes(self) -> list[tuple[str, int]]:
        rng = np.random.default_rng(self.number)
        codes = rng.integers(10_000, 100_000, self.facts).tolist()
        return [(f"{rng.choice(PLACES)} {index}", code) for index, code in enumerate(codes, 1)]

    @cached_property
    def text(self) -> str:
        """The document."""
        lines = [f"Locker {place} opens with the code {code}." for place, code in self._codes]
        return "\n".join([f"{self.number} is the number of this list.", *lines, "That was the whole list of lockers."])

    def prompt(self, question: int, padding: str = "") -> str:
        """Return the document and the beginning of a sentence from it; ``padding`` comes between them."""
        place, _ = self._codes[(len(self._codes) - 1) * question // (QUESTIONS - 1)]
        return f"{self.text}{padding}\nOnce more: Locker {place} opens with the code"

    def fact(self, question: int) -> str:
        """Return the code that the question asks for."""
        return str(self._codes[(len(self._codes) - 1) * question // (QUESTIONS - 1)][1])
