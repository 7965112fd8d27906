"""Random histories of a paired allocator against a dict; every loc translated against the definition."""

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.budget import examples
from unified_cache.errors import SlotError
from unified_cache.forward import SwaTranslation
from unified_cache.pool import Slots
from unified_cache.slots import PairedAllocator, ReleaseGroup, SlotAllocator

CPU = torch.device("cpu")
PAGE_SIZES = (1, 4, 64, 256)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "allocate", "free", "free_peers", "free_full", "move", "load", "group", "clear"]),
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
    """The allocator and, beside it, what it should be: who has which peer, and what waits in a group."""

    allocator: PairedAllocator
    peers: dict[int, int | None] = field(default_factory=dict)
    waiting_full: list[int] = field(default_factory=list)
    waiting_peers: list[int] = field(default_factory=list)

    def chosen(self, bits: int) -> list[int]:
        return [full for i, full in enumerate(self.peers) if bits >> (i % 16) & 1]

    def step(self, name: str, first: int, second: int, bits: int, group: ReleaseGroup) -> None:
        at_hand = self.chosen(bits)
        if name == "allocate":
            self.allocate(max(first, second), min(first, second))
        elif name == "free":
            self.allocator.free(slots(at_hand))
            for full in at_hand:
                del self.peers[full]
        elif name == "free_peers":
            assert self.allocator.free_peers(slots(at_hand)) == sum(self.peers[full] is not None for full in at_hand)
            self.peers.update(dict.fromkeys(at_hand))
        elif name == "free_full":
            self.free_full(at_hand)
        elif name == "move":
            self.move(at_hand)
        elif name == "load":
            self.load(at_hand)
        elif name == "group":
            self.release_later(at_hand, whole=bool(first & 1), group=group)
        else:
            self.flush(group)

    def allocate(self, count: int, tail_count: int) -> None:
        before = self.free_counts()
        taken = self.allocator.allocate(count, tail_count)
        if taken is None:
            assert count > before[0] or tail_count > before[1]
            assert self.free_counts() == before
            return
        full, peers = taken[0].tolist(), taken[1].tolist()
        assert self.peers.keys().isdisjoint([*full, *self.waiting_full])
        assert {*self.peers.values(), *self.waiting_peers}.isdisjoint(peers)
        self.peers.update(zip(full, [None] * (count - tail_count) + peers, strict=True))

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
        """Move peers from pages that have one to pages that have none: a hole recovered."""
        with_peer = [full for full in at_hand if self.peers[full] is not None]
        without = [full for full in at_hand if self.peers[full] is None]
        for source, target in zip(with_peer, without, strict=False):
            self.allocator.map.bind(slots([target]), self.allocator.take_peers(slots([source])))
            self.peers[target], self.peers[source] = self.peers[source], None

    def load(self, at_hand: list[int]) -> None:
        """Bring back the SWA pages of Full slots that are still there: new peers, bound."""
        without = [full for full in at_hand if self.peers[full] is None]
        taken = self.allocator.peer.allocate(len(without))
        if taken is None:
            return
        self.allocator.map.bind(slots(without), taken)
        self.peers.update(zip(without, taken.tolist(), strict=True))

    def release_later(self, at_hand: list[int], *, whole: bool, group: ReleaseGroup) -> None:
        (group.free if whole else group.free_peers)(slots(at_hand))
        for full in at_hand:
            peer = self.peers[full]
            if peer is not None:
                self.waiting_peers.append(peer)
                self.peers[full] = None
            if whole:
                del self.peers[full]
                self.waiting_full.append(full)

    def flush(self, group: ReleaseGroup) -> None:
        group.flush()
        self.waiting_full.clear()
        self.waiting_peers.clear()

    def free_counts(self) -> tuple[int, int]:
        return self.allocator.full.free_count, self.allocator.peer.free_count

    def check(self) -> None:
        full_capacity, peer_capacity = self.allocator.full.capacity, self.allocator.peer.capacity
        live = [peer for peer in self.peers.values() if peer is not None]
        assert len(set(live)) == len(live), "two Full slots share a peer"
        expected = [self.peers.get(slot) or 0 for slot in range(full_capacity + 1)]
        assert self.allocator.map.table.tolist() == [*expected, -1]
        assert self.free_counts() == (
            full_capacity - len(self.peers) - len(self.waiting_full),
            peer_capacity - len(live) - len(self.waiting_peers),
        )


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
    seeds=st.lists(st.integers(-2, 2**31), min_size=1, max_size=12),
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
    group = ReleaseGroup(history.allocator)
    translations = [
        SwaTranslation.of(history.allocator, page_size, CPU),
        SwaTranslation.mirrored(history.allocator, page_size, CPU),
    ]
    loc_end = (capacities[0] + 1) * page_size
    locs = [seed if seed < 0 else seed % loc_end for seed in seeds]
    pages = [max(loc, -1) // page_size for loc in locs]
    for step in steps:
        history.step(*step, group)
        history.check()
        for translation in translations:
            translated = translation.translate_locs(torch.tensor(locs, dtype=dtype))
            assert translated.tolist() == [naive_loc(history.peers, loc, page_size) for loc in locs]
            table = translation.translate_pages(torch.tensor([pages], dtype=dtype))
            assert table.tolist() == [[naive_loc(history.peers, page, 1) for page in pages]]
    history.flush(group)
    history.check()
