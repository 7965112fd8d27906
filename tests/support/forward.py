"""A toy engine's side of a forward: a paired allocator, a pool whose tokens say who wrote them, and batches."""

import numpy as np
import torch

from unified_cache.core.pool import Slots
from unified_cache.core.slots import PairedAllocator, SlotAllocator
from unified_cache.forward import ForwardBatch, ForwardMode, SwaTranslation

CPU = torch.device("cpu")
PAGE_SIZE = 4


def slots(*values: int) -> Slots:
    return np.array(values, np.int32)


def paired(full: int = 16, peer: int = 8) -> PairedAllocator:
    return PairedAllocator(SlotAllocator(full), SlotAllocator(peer))


def diverged(full: int = 16, peer: int = 8) -> PairedAllocator:
    """Return an allocator whose next Full slots are 4, 5, 6 and whose next SWA slots are 2, 1, 4."""
    allocator = paired(full, peer)
    allocate(allocator, 3)
    free_peers(allocator, slots(1))
    free_peers(allocator, slots(2))
    return allocator


def allocate(allocator: PairedAllocator, count: int, tail_count: int | None = None) -> Slots:
    """Return the Full slots of ``count`` new pages, the last ``tail_count`` of them, or all, with a peer."""
    full = allocator.full.allocate(count)
    peers = allocator.peer.allocate(count if tail_count is None else tail_count)
    assert full is not None
    assert peers is not None
    allocator.map.bind(full[count - len(peers) :], peers)
    return full


def take_peers(allocator: PairedAllocator, full: Slots) -> Slots:
    """Return the peers of Full slots, which have none any more."""
    peers = allocator.map.peers(full)
    allocator.map.unbind(full[peers > 0])
    return peers[peers > 0]


def free_peers(allocator: PairedAllocator, full: Slots) -> None:
    """Free the peers of Full slots."""
    allocator.peer.free(take_peers(allocator, full))


def free(allocator: PairedAllocator, full: Slots) -> None:
    """Free Full slots and their peers."""
    free_peers(allocator, full)
    allocator.free_full(full)


def token_locs(full: Slots, start: int, end: int, page_size: int = PAGE_SIZE) -> list[int]:
    """Return the Full locs of tokens [start, end) of a request with these pages."""
    return [int(full[token // page_size]) * page_size + token % page_size for token in range(start, end)]


def naive_locs(allocator: PairedAllocator, locs: list[int], page_size: int = PAGE_SIZE) -> list[int]:
    """Translate one token at a time, from the definition."""
    result: list[int] = []
    for loc in locs:
        if loc < 0:
            result.append(-1)
            continue
        page, offset = divmod(loc, page_size)
        result.append(int(allocator.map.table[page]) * page_size + offset)
    return result


def batch_of(
    locs: list[int],
    rows: list[Slots],
    mode: ForwardMode = ForwardMode.DECODE,
    device: torch.device = CPU,
) -> ForwardBatch:
    """Return a batch of requests with these pages; lengths are whole pages, which nothing here reads.

    Requests have as many new tokens each, and the last one what is left over.
    """
    pages_max = max((len(row) for row in rows), default=1)
    table = np.zeros((len(rows), pages_max), np.int32)
    for row, full in zip(table, rows, strict=True):
        row[: len(full)] = full
    return ForwardBatch(
        mode,
        torch.tensor(locs, dtype=torch.int64, device=device),
        torch.tensor([len(row) * PAGE_SIZE for row in rows], dtype=torch.int32, device=device),
        torch.from_numpy(table).to(device),
        shared_out(len(locs), len(rows)),
    )


def shared_out(tokens_count: int, requests_count: int) -> tuple[int, ...]:
    if not requests_count:
        return ()
    each = tokens_count // requests_count
    return (*[each] * (requests_count - 1), tokens_count - each * (requests_count - 1))


def idle(locs: torch.Tensor) -> ForwardBatch:
    """Return an idle batch that writes to ``locs``, that very tensor."""
    count = len(locs)
    return ForwardBatch(
        ForwardMode.IDLE,
        locs,
        torch.zeros(count, dtype=torch.int32, device=locs.device),
        torch.zeros((count, 1), dtype=torch.int32, device=locs.device),
        (1,) * count,
    )


class ToyPool:
    """The SWA pool of one layer: one int64 per token, the number that was last written there."""

    def __init__(self, allocator: PairedAllocator, device: torch.device = CPU) -> None:
        self.tokens = torch.zeros((allocator.peer.capacity + 1) * PAGE_SIZE, dtype=torch.int64, device=device)

    def write(self, locs: torch.Tensor, values: torch.Tensor) -> None:
        """What a kernel does: store ``values`` at ``locs``; shapes and addresses are all it needs."""
        self.tokens.index_copy_(0, locs.to(torch.int64), values)

    def read(self, locs: list[int]) -> list[int]:
        return [int(self.tokens[loc]) for loc in locs]


def shared(allocator: PairedAllocator) -> SwaTranslation:
    return SwaTranslation.of(allocator, PAGE_SIZE, CPU)


def mirrored(allocator: PairedAllocator) -> SwaTranslation:
    """What runs on another device, on the CPU: a copy of the map that has to be brought up to date."""
    return SwaTranslation.mirrored(allocator, PAGE_SIZE, CPU)
