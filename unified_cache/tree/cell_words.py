"""Cells of the forecast in words, as an explanation says them."""

from unified_cache.tree.forecast import (
    CELLS_COUNT,
    COLUMNS,
    ENDED,
    LAYERS,
    PASSED,
    SESSION_CELLS,
    SHARED,
    UNASKED,
)
from unified_cache.tree.window_worth import MOVED_PAST

__all__ = ["cell_text"]

_TURNS = (
    "first turn",
    "first turn below a shared prefix",
    "second turn after a short pause",
    "second turn after a usual pause",
    "second turn after a long pause",
    "later turn after a short pause",
    "later turn after a usual pause",
    "later turn after a long pause",
)
"""By row."""
_SHARED = ("prefix of 2 sessions", "prefix of 3 to 4 sessions", "prefix of 5 sessions or more")
_OTHERS = {
    PASSED: "left behind by its session",
    UNASKED: "from storage, not asked for yet",
    ENDED: "of a session that has ended",
}


def cell_text(cell: int, column_tokens: int) -> str:
    """Say which pages a cell of a lane is of; columns and layers count tokens by so many."""
    if cell == MOVED_PAST:
        return "end that its session has gone on from"
    if cell >= CELLS_COUNT:
        return f"before the end, {cell_text(cell - CELLS_COUNT, column_tokens)}"
    if cell in _OTHERS:
        return _OTHERS[cell]
    if cell >= SESSION_CELLS:
        return _SHARED[cell - SHARED]
    row, column, layer = cell // (COLUMNS * LAYERS), cell // LAYERS % COLUMNS, cell % LAYERS
    most = (2 << column) * column_tokens
    least = (1 << column) * column_tokens if column else 0
    new = f"{least:,} to {most - 1:,}" if column < COLUMNS - 1 else f"{least:,} and more"
    known = f"{2 * column_tokens:,} and more" if layer else f"fewer than {2 * column_tokens:,}"
    return f"{_TURNS[row]}, {new} new tokens, {known} known"
