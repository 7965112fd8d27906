"""Random histories of a paired allocator against a dict; every loc translated against the definition."""

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.budget import examples
from tests.support.forward import allocate, free, free_peers, take_peers
from unified_cache.core.errors import SlotError
from unified_cache.core.pool import Slots
from unified_cache.core.slots import PairedAllocator, SlotAllocator
from unified_cache.forward import SwaTranslation

CPU = torch.device("cpu")
PAGE_SIZES = (1, 4, 64, 256)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "free", "free_peers", "free_full", "move", "load"]),
        st.integers(0, 7),
        st.integers(0, 7),
        st.integers(0, 2**16 - 1),
    ),
    max_size=30,
)
"""What to do, two small numbers, and which of the slots at hand, bit by bit."""


def slots(values: list[int]) -> Slots:
    return np.array(values, np.int32)


@dataclass
class AllocatorHistory:
    """The allocator and, beside it, what it should be: who has which peer."""

    allocator: PairedAllocator
    peers: dict[int, int | None] = field(default_factory=dict)

    def chosen(self, bits: int) -> list[int]:
        return [full for i, full in enumerate(self.peers) if bits >> (i % 16) & 1]

    def step(self, name: str, first: int, second: int, bits: int) -> None:
        at_hand = self.chosen(bits)
        if name == "allocate":
            self.allocate(max(first, second), min(first, second))
        elif name == "free":
            free(self.allocator, slots(at_hand))
            for full in at_hand:
                del self.peers[full]
        elif name == "free_peers":
            free_peers(self.allocator, slots(at_hand))
            self.peers.update(dict.fromkeys(at_hand))
        elif name == "free_full":
            self.free_full(at_hand)
        elif name == "move":
            self.move(at_hand)
        else:
            self.load(at_hand)

    def allocate(self, count: int, tail_count: int) -> None:
        free_full, free_tail = self.free_counts()
        if count > free_full or tail_count > free_tail:
            return
        full = allocate(self.allocator, count, tail_count)
        peers = self.allocator.map.peers(full)[count - tail_count :].tolist()
        assert self.peers.keys().isdisjoint(full.tolist())
        assert set(self.peers.values()).isdisjoint(peers)
        self.peers.update(zip(full.tolist(), [None] * (count - tail_count) + peers, strict=True))

    def free_full(self, at_hand: list[int]) -> None:
        if any(self.peers[full] is not None for full in at_hand):
            before = self.free_counts()
            try:
                self.allocator.free_full(slots(at_hand))
            except SlotError:
                assert self.free_counts() == before
                return
            raise AssertionError("Full slots were freed that still had a peer")
        self.allocator.free_full(slots(at_hand))
        for full in at_hand:
            del self.peers[full]

    def move(self, at_hand: list[int]) -> None:
        """Move peers from pages that have one to pages that have none: a tombstone recovered."""
        with_peer = [full for full in at_hand if self.peers[full] is not None]
        without = [full for full in at_hand if self.peers[full] is None]
        for source, target in zip(with_peer, without, strict=False):
            self.allocator.map.bind(slots([target]), take_peers(self.allocator, slots([source])))
            self.peers[target], self.peers[source] = self.peers[source], None

    def load(self, at_hand: list[int]) -> None:
        """Bring back the SWA pages of Full slots that are still there: new peers, bound."""
        without = [full for full in at_hand if self.peers[full] is None]
        taken = self.allocator.peer.allocate(len(without))
        if taken is None:
            return
        self.allocator.map.bind(slots(without), taken)
        self.peers.update(zip(without, taken.tolist(), strict=True))

    def free_counts(self) -> tuple[int, int]:
        return self.allocator.full.free_count, self.allocator.peer.free_count

    def check(self) -> None:
        full_capacity, peer_capacity = self.allocator.full.capacity, self.allocator.peer.capacity
        live = [peer for peer in self.peers.values() if peer is not None]
        assert len(set(live)) == len(live), "two Full slots share a peer"
        expected = [self.peers.get(slot) or 0 for slot in range(full_capacity + 1)]
        assert self.allocator.map.table.tolist() == [*expected, -1]
        assert self.free_counts() == (full_capacity - len(self.peers), peer_capacity - len(live))


def naive_loc(peers: dict[int, int | None], loc: int, page_size: int) -> int:
    """Translate one token from the definition."""
    if loc < 0:
        return -1
    return (peers.get(loc // page_size) or 0) * page_size + loc % page_size


@settings(max_examples=examples(short=300, long=5000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    page_size=st.sampled_from(PAGE_SIZES),
    capacities=st.tuples(st.integers(0, 16), st.integers(0, 12)),
    seeds=st.lists(st.integers(-40, 2**31), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.int16, torch.int32, torch.int64]),
)
def test_pairing_is_a_dict_and_translation_is_per_token(
    steps: list[tuple[str, int, int, int]],
    page_size: int,
    capacities: tuple[int, int],
    seeds: list[int],
    dtype: torch.dtype,
) -> None:
    history = AllocatorHistory(PairedAllocator(SlotAllocator(capacities[0]), SlotAllocator(capacities[1])))
    translations = [
        SwaTranslation.of(history.allocator, page_size, CPU),
        SwaTranslation.mirrored(history.allocator, page_size, CPU),
    ]
    loc_end = (capacities[0] + 1) * page_size
    locs = [seed if seed < 0 else seed % loc_end for seed in seeds]
    pages = [loc if loc < 0 else loc // page_size for loc in locs]
    for step in steps:
        history.step(*step)
        history.check()
        for translation in translations:
            translated = translation.translate_locs(torch.tensor(locs, dtype=dtype))
            assert translated.tolist() == [naive_loc(history.peers, loc, page_size) for loc in locs]
            table = translation.translate_pages(torch.tensor([pages], dtype=dtype))
            assert table.tolist() == [[naive_loc(history.peers, page, 1) for page in pages]]
