"""Random histories of a page map: every loc and page is translated as the definition says, by a mirror of it too."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.budget import examples
from tests.support.forward import CPU, allocate, free, free_peers, naive_locs, paired, slots
from unified_cache.forward import SwaTranslation


@settings(max_examples=examples(short=300, long=5000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["allocate", "allocate", "free", "free_peers", "load"]),
            st.integers(0, 7),
            st.integers(0, 7),
            st.integers(0, 2**16 - 1),
        ),
        max_size=30,
    ),
    page_size=st.sampled_from((1, 4, 64, 256)),
    capacities=st.tuples(st.integers(0, 16), st.integers(0, 12)),
    seeds=st.lists(st.integers(-40, 2**31), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.int16, torch.int32, torch.int64]),
)
def test_translation_is_per_token(
    steps: list[tuple[str, int, int, int]],
    page_size: int,
    capacities: tuple[int, int],
    seeds: list[int],
    dtype: torch.dtype,
) -> None:
    """A step has a name, two small numbers, and which of the Full slots at hand, bit by bit."""
    allocator, held = paired(*capacities), list[int]()
    translations = [SwaTranslation.of(allocator, page_size, CPU), SwaTranslation.mirrored(allocator, page_size, CPU)]
    locs = [seed if seed < 0 else seed % ((capacities[0] + 1) * page_size) for seed in seeds]
    pages = [loc if loc < 0 else loc // page_size for loc in locs]
    for name, first, second, bits in steps:
        chosen = slots(*(full for place, full in enumerate(held) if bits >> (place % 16) & 1))
        count, tail_count = max(first, second), min(first, second)
        if name == "allocate" and count <= allocator.full.free_count and tail_count <= allocator.peer.free_count:
            held += allocate(allocator, count, tail_count).tolist()
        elif name == "free":
            free(allocator, chosen)
            held = [full for full in held if full not in chosen]
        elif name == "free_peers":
            free_peers(allocator, chosen)
        elif name == "load":  # the pages of Full slots that are still there come back: new peers, bound
            without = chosen[allocator.map.peers(chosen) == 0]
            taken = allocator.peer.allocate(len(without))
            if taken is not None:
                allocator.map.bind(without, taken)
        for translation in translations:
            translated = translation.translate_locs(torch.tensor(locs, dtype=dtype))
            assert translated.tolist() == naive_locs(allocator, locs, page_size)
            table = translation.translate_pages(torch.tensor([pages], dtype=dtype))
            assert table.tolist() == [naive_locs(allocator, pages, 1)]
    peers = allocator.map.peers(np.array(held, np.int32))
    assert allocator.peer.out_count == np.count_nonzero(peers) == len(set(peers[peers > 0].tolist()))
