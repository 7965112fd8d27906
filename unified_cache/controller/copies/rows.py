"""Copies of rows within host memory: as few calls of numpy and torch as the order of slots allows."""

import numpy as np
import numpy.typing as npt
import torch

from unified_cache.core.errors import CopyError
from unified_cache.core.pool import Pages, Slots, numbers_of

RUN_COPY_BYTES_MIN = 8 * 1024
"""Average bytes per contiguous run from which copying run by run beats one gather and scatter."""

SELECTED_ROWS_MIN = 64
"""Average rows per run of targets from which selecting rows into them beats copying row by row."""

SELECTED_BYTES_MAX = 64 * 1024
"""Average bytes per contiguous run from which selecting gains nothing."""

WIDE = torch.complex128
"""Widest element that torch has, since a selection is shared among threads by its elements."""

SELECTED_MAX = 32_768
"""Elements that torch selects on the calling thread; for more it wakes threads, which spin where cores are busy."""


def check_lengths(source_slots: Slots, target_slots: Slots) -> None:
    """Raise CopyError unless there is a target for each source."""
    if len(source_slots) != len(target_slots):
        raise CopyError(f"{len(source_slots)} source slots for {len(target_slots)} target slots")


def copy_rows(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows between two tensors of bytes without memory in common; where rows are many, in the order of targets."""
    check_lengths(source_slots, target_slots)
    if len(target_slots) >= SELECTED_ROWS_MIN:
        order = target_slots.argsort()
        source_slots, target_slots = source_slots[order], target_slots[order]
        target_breaks = _breaks(target_slots)
        run_rows = len(target_slots) / (np.count_nonzero(target_breaks) + 1)
        both_rows = len(target_slots) / (np.count_nonzero(target_breaks | _breaks(source_slots)) + 1)
        is_worth = run_rows >= SELECTED_ROWS_MIN and both_rows * source.shape[1] < SELECTED_BYTES_MAX
        if is_worth and _is_wide(source) and _is_wide(target):
            _select(source, source_slots, target, target_slots)
            return
    copy_runs(source, source_slots, target, target_slots)


def _breaks(slots: Slots) -> Pages:
    """Return a mask of the slots, but the first, that do not follow the one before."""
    follows: Pages = slots[1:] - slots[:-1] != 1
    return follows


def _is_wide(rows: torch.Tensor) -> bool:
    """Return whether rows of bytes can be taken for rows of WIDE."""
    return not any(count % WIDE.itemsize for count in (rows.shape[1], rows.stride(0), rows.storage_offset()))


def wide(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes in the widest elements they can be taken for: a GPU moves one element a thread and step."""
    return rows.view(WIDE) if _is_wide(rows) else rows


def _select(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows to slots that ascend in long runs: a call of torch for as much of a run as goes without its threads."""
    from_rows, to_rows = source.view(WIDE), target.view(WIDE)
    rows_max = max(1, SELECTED_MAX // from_rows.shape[1])
    gather = torch.from_numpy(source_slots.astype(np.int64))
    start = 0
    for end in [*(numbers_of(_breaks(target_slots)) + 1).tolist(), len(target_slots)]:
        for first in range(start, end, rows_max):
            last = min(first + rows_max, end)
            to_start = int(target_slots[first])
            torch.index_select(from_rows, 0, gather[first:last], out=to_rows[to_start : to_start + last - first])
        start = end


def copy_runs(source: torch.Tensor, source_slots: Slots, target: torch.Tensor, target_slots: Slots) -> None:
    """Copy rows run by run, or tiny ones by gather and scatter."""
    if not len(source_slots):
        return
    from_rows: npt.NDArray[np.uint8] = source.numpy()
    to_rows: npt.NDArray[np.uint8] = target.numpy()
    breaks = numbers_of(_breaks(source_slots) | _breaks(target_slots)) + 1
    if from_rows.shape[1] * len(source_slots) < RUN_COPY_BYTES_MIN * (len(breaks) + 1):
        to_rows[target_slots] = from_rows[source_slots]
        return
    starts = np.concatenate(([0], breaks))
    ends = [*breaks.tolist(), len(source_slots)]
    runs = zip(starts.tolist(), ends, source_slots[starts].tolist(), target_slots[starts].tolist(), strict=True)
    for start, end, from_start, to_start in runs:
        to_rows[to_start : to_start + end - start] = from_rows[from_start : from_start + end - start]
