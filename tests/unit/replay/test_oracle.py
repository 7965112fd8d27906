import hashlib

import numpy as np
import pytest

from unified_cache.core.pool import PoolSpec
from unified_cache.sizing.replay.oracle import Oracle

KV = PoolSpec("kv", 4096)


def keys(count: int, seed: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(count)]


def test_a_page_is_a_function_of_its_key_and_its_pool_alone() -> None:
    together = Oracle(KV).payloads(keys(7))
    apart = [Oracle(KV).payloads([key])[0] for key in keys(7)]
    np.testing.assert_array_equal(together, np.stack(apart))


def test_pages_made_before_are_those_made_today() -> None:
    # Stores outlive versions: an oracle that changes would call every page of an older run wrong.
    made = Oracle(PoolSpec("kv", 100)).payloads(keys(3))
    assert (
        hashlib.sha256(made.tobytes()).hexdigest() == "a1eb0df4fd635746f1978d595018218eddeb6b809a5376465f497302b84f456d"
    )


@pytest.mark.parametrize("page_bytes", [1, 2, 7, 8, 9, 63, 4096, 4099])
def test_any_page_size_works_and_is_the_head_of_a_larger_one(page_bytes: int) -> None:
    made = Oracle(PoolSpec("kv", page_bytes)).payloads(keys(5))
    assert made.shape == (5, page_bytes)
    np.testing.assert_array_equal(made, Oracle(PoolSpec("kv", 8192)).payloads(keys(5))[:, :page_bytes])


def test_no_pages_have_no_payload() -> None:
    assert Oracle(KV).payloads([]).shape == (0, 4096)


def test_no_two_words_of_many_pages_are_equal() -> None:
    # So no page is another page, and none is itself shifted: not even one word stands anywhere else.
    words = Oracle(KV).payloads(keys(500)).view(np.uint64)
    assert len(np.unique(words)) == words.size


def test_pools_of_one_page_differ() -> None:
    here, there = (Oracle(PoolSpec(name, 4096)).payloads(keys(4)).view(np.uint64) for name in ("kv", "state"))
    assert not (here == there).any()
