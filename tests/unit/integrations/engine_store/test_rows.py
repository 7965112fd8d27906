"""Pages of engines' host pools as views: addresses that follow a rule, and those that do not."""

from collections.abc import Sequence

import numpy as np
import pytest

from unified_cache.core.errors import InputError
from unified_cache.integrations.engine_store.pools import AffineRows, AskedRows

SLOTS = 40


class TwoBuffers:
    """Keys and values in one array each, as a pool of an engine has them."""

    def __init__(self, keys_bytes: int = 24, values_bytes: int = 16, gap_bytes: int = 8) -> None:
        self.keys = np.zeros((SLOTS, keys_bytes + gap_bytes), np.uint8)
        self.values = np.zeros((SLOTS, values_bytes), np.uint8)
        self.sizes = [keys_bytes, values_bytes]
        self.asked = 0

    def locate(self, slots: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        self.asked += 1
        bases = [(self.keys.ctypes.data, self.keys.shape[1]), (self.values.ctypes.data, self.values.shape[1])]
        return [base + slot * stride for slot in slots for base, stride in bases], self.sizes * len(slots)


def learnt(pool: TwoBuffers, slots_count: int = SLOTS) -> AffineRows:
    rows = AffineRows.learn(pool.locate, slots_count)
    assert rows is not None
    return rows


def test_the_engine_is_asked_once_and_its_pages_are_written_in_place() -> None:
    pool = TwoBuffers()
    rows = learnt(pool)
    assert rows.buffers_bytes == (24, 16)
    for slot in (0, 7, SLOTS - 1):
        ((key, value),) = rows.rows_to_fill([slot])
        key[:], value[:] = bytes([slot]) * 24, bytes([slot + 1]) * 16
    assert pool.asked == 1
    assert (pool.keys[7, :24] == 7).all()
    assert not pool.keys[7, 24:].any()
    assert (pool.values[SLOTS - 1] == SLOTS).all()
    assert not pool.keys[8].any()


@pytest.mark.parametrize("slots_count", [1, 2, 3, SLOTS])
def test_a_rule_is_learnt_from_pools_of_any_size(slots_count: int) -> None:
    pool = TwoBuffers()
    rows = learnt(pool, slots_count)
    pool.values[slots_count - 1] = 9
    assert rows.rows_to_store([slots_count - 1])[0][1].tobytes() == bytes([9]) * 16


def test_a_slot_that_the_pool_does_not_have_is_refused() -> None:
    rows = learnt(TwoBuffers())
    for slot in (-1, SLOTS):
        with pytest.raises(InputError, match="slots in"):
            rows.rows_to_store([0, slot])


@pytest.mark.parametrize("how", ["anywhere", "of different sizes", "overlapping"])
def test_pages_that_follow_no_rule_are_not_learnt(how: str) -> None:
    pool = TwoBuffers(gap_bytes=0)
    order = np.random.default_rng(1).permutation(SLOTS).tolist() if how == "anywhere" else list(range(SLOTS))
    if how == "overlapping":
        pool.sizes = [25, 16]

    def locate(slots: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        addresses, sizes = pool.locate([order[slot] for slot in slots])
        return addresses, [*sizes[:-1], sizes[-1] - (how == "of different sizes")]

    assert AffineRows.learn(locate, SLOTS) is None


def test_a_pool_that_moves_its_pages_is_asked_at_every_call() -> None:
    pool = TwoBuffers()
    moved = list(range(SLOTS))
    rows = AskedRows(lambda slots: pool.locate([moved[slot] for slot in slots]), (24, 16), SLOTS)
    pool.values[3] = 1
    assert rows.rows_to_store([3])[0][1].tobytes() == bytes([1]) * 16
    moved[3] = 4
    assert rows.rows_to_store([3])[0][1].tobytes() == bytes(16)
    assert rows.rows_to_store([]) == []
    with pytest.raises(InputError, match="slots in"):
        rows.rows_to_store([0, SLOTS])


@pytest.mark.parametrize("sizes", [[24, 15], [24], [24, 16, 8]])
def test_a_page_of_other_buffers_than_the_pools_is_refused(sizes: list[int]) -> None:
    pool = TwoBuffers()
    rows = AskedRows(pool.locate, pool.sizes, SLOTS)
    assert len(rows.rows_to_store([0, 1])) == 2
    pool.sizes = sizes
    with pytest.raises(InputError, match=r"buffers of \(24, 16\) bytes"):
        rows.rows_to_store([0, 1])
