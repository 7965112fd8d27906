"""Tables as values: the page of a result shows them, and so does a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TableSection"]


@dataclass(frozen=True, slots=True)
class TableSection:
    """A table with a heading; its first columns are text, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    has_total: bool = False
    """Whether the last row sums up the others."""
