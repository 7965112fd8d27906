"""Counts of one simulation."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class SimTally:
    """Counts of what a simulation has done."""

    operations: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    nodes: list[int] = field(default_factory=list)
    """In the tree, after each operation."""
    fill: list[float] = field(default_factory=list)
    """After each operation: how full the tier is that has most room, of device, host and storage."""
