"""Graph buffers: fixed addresses, refilled before each replay. With a CUDA device the graph is a real one.

Without one a "replay" runs the same operations again on the tensors that the "capture" chose, which is what a graph
does with addresses; that a stream keeps the order is then not shown.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.forward import (
    CPU,
    PAGE_SIZE,
    ToyPool,
    allocate,
    batch_of,
    diverged,
    free,
    free_peers,
    mirrored,
    naive_locs,
    shared,
    slots,
    token_locs,
)
from tests.support.gpu import with_streams
from tests.support.operations import present
from unified_cache.core.errors import CaptureError, InputError
from unified_cache.core.pool import Slots
from unified_cache.core.slots import PairedAllocator
from unified_cache.forward import (
    ForwardBatch,
    ForwardMode,
    GraphBucket,
    GraphBuffers,
    HybridAttentionMetadata,
    HybridGraphBuffers,
    LayerKind,
    SwaTranslation,
    init_metadata,
    write_locs,
)

MakeTranslation = Callable[[PairedAllocator], SwaTranslation]
both = pytest.mark.parametrize("make", [shared, mirrored])

REQUESTS_MAX = 4
PAGES_MAX = 3
DECODE = GraphBucket.decode(REQUESTS_MAX, PAGES_MAX)
QUERY_LEN = 3
BUCKETS = {
    "decode": DECODE,
    "target verify": GraphBucket.target_verify(REQUESTS_MAX, QUERY_LEN, PAGES_MAX),
    "draft extend": GraphBucket.draft_extend(REQUESTS_MAX, QUERY_LEN, PAGES_MAX),
    "prefill": GraphBucket.prefill(REQUESTS_MAX, 12, PAGES_MAX),
}
every_bucket = pytest.mark.parametrize("bucket", BUCKETS.values(), ids=BUCKETS)


def decode(rows: list[Slots], device: torch.device = CPU) -> ForwardBatch:
    """Return a decode batch that writes the last token of each request's last page."""
    return batch_of(
        [token_locs(row, len(row) * PAGE_SIZE - 1, len(row) * PAGE_SIZE)[0] for row in rows], rows, device=device
    )


def addresses(buffers: HybridGraphBuffers) -> list[int]:
    tensors = (buffers.out_cache_loc, buffers.seq_lens, buffers.page_table)
    return [tensor.data_ptr() for tensor in (*tensors, buffers.out_cache_loc_swa, buffers.page_table_swa)]


def contents(buffers: HybridGraphBuffers) -> list[object]:
    tensors = (buffers.out_cache_loc, buffers.seq_lens, buffers.page_table)
    return [tensor.tolist() for tensor in (*tensors, buffers.out_cache_loc_swa, buffers.page_table_swa)]


def padding() -> list[object]:
    row = [0] * REQUESTS_MAX
    table = [[0] * PAGES_MAX] * REQUESTS_MAX
    return [row, [1] * REQUESTS_MAX, table, row, table]


def test_buffers_have_the_dtypes_that_kernels_take_and_start_as_padding_r19_r20() -> None:
    buffers = HybridGraphBuffers(DECODE, shared(diverged()))
    assert buffers.out_cache_loc.dtype == torch.int64
    assert buffers.out_cache_loc_swa.dtype == torch.int32
    assert {buffers.seq_lens.dtype, buffers.page_table.dtype, buffers.page_table_swa.dtype} == {torch.int32}
    assert contents(buffers) == padding()


def test_a_model_without_windows_has_no_swa_buffers() -> None:
    buffers = GraphBuffers(DECODE, CPU)
    assert not isinstance(buffers, HybridGraphBuffers)
    assert buffers.refill(decode([slots(3), slots(5)]))
    assert buffers.out_cache_loc.tolist() == [15, 23, 0, 0]
    batch, metadata = buffers.views(2)
    assert not isinstance(metadata, HybridAttentionMetadata)
    assert metadata.out_cache_loc is batch.out_cache_loc


@pytest.mark.parametrize("padding_len", [0, 1])
def test_padding_has_as_many_tokens_as_the_attention_backend_wants(padding_len: int) -> None:
    buffers = GraphBuffers(replace(DECODE, padding_len=padding_len), CPU)
    batch, _ = buffers.views(REQUESTS_MAX)
    assert batch.seq_lens.tolist() == [padding_len] * 4
    assert buffers.refill(decode([slots(3)]))
    assert batch.seq_lens.tolist() == [PAGE_SIZE, *[padding_len] * 3]
    buffers.clear()
    assert batch.seq_lens.tolist() == [padding_len] * 4


@both
def test_a_batch_that_does_not_fit_leaves_the_buffers_alone_and_says_so_r20(make: MakeTranslation) -> None:
    allocator = diverged()
    buffers = HybridGraphBuffers(DECODE, make(allocator))
    row = allocate(allocator, 1)
    assert buffers.refill(decode([row]))
    before = contents(buffers)
    too_many = decode([row] * (REQUESTS_MAX + 1))
    too_long = decode([slots(*[3] * (PAGES_MAX + 1))])
    draft = batch_of(token_locs(row, 0, 2), [row], ForwardMode.DRAFT_EXTEND)
    prefill = batch_of(token_locs(row, 0, 1), [row], ForwardMode.EXTEND)
    for batch in (too_many, too_long, draft, prefill, decode([row]).padded(REQUESTS_MAX + 1)):
        assert not buffers.refill(batch)
        assert contents(buffers) == before
    assert buffers.refill(decode([row]).padded(REQUESTS_MAX))


# ---- every kind of forward ---------------------------------------------------------------------------------------


def batch_in(bucket: GraphBucket, allocator: PairedAllocator, query_lens: tuple[int, ...]) -> ForwardBatch:
    """Return a batch of requests of two pages that writes the last tokens of each, in the order of the requests."""
    rows = [allocate(allocator, 2) for _ in query_lens]
    end = 2 * PAGE_SIZE
    locs = [token_locs(row, end - count, end) for row, count in zip(rows, query_lens, strict=True)]
    return replace(batch_of([loc for each in locs for loc in each], rows, bucket.mode), query_lens=query_lens)


def lens_in(bucket: GraphBucket, requests_count: int) -> tuple[int, ...]:
    return (4, 1, 2, 5)[:requests_count] if bucket.is_prefill else (bucket.query_len,) * requests_count


def starts_in(bucket: GraphBucket, query_lens: tuple[int, ...]) -> list[int]:
    rest = 0 if bucket.is_prefill else bucket.query_len
    return [0, *accumulate((*query_lens, *[rest] * (REQUESTS_MAX - len(query_lens))))]


@every_bucket
@both
def test_a_replay_of_any_kind_reads_the_batch_in_front_and_padding_behind_at_fixed_addresses_r20(
    bucket: GraphBucket, make: MakeTranslation
) -> None:
    allocator = diverged(32, 24)
    translation = make(allocator)
    buffers = HybridGraphBuffers(bucket, translation)
    fixed = [*addresses(buffers), buffers.query_starts.data_ptr(), translation.table.data_ptr()]
    untouched = contents(buffers)
    for requests_count in (4, 2, 1, 3):
        query_lens = lens_in(bucket, requests_count)
        batch = batch_in(bucket, allocator, query_lens)
        assert buffers.refill(batch)
        locs, rows = batch.out_cache_loc.tolist(), batch.page_table.tolist()
        token_padding, row_padding = [0] * (bucket.tokens_max - len(locs)), REQUESTS_MAX - requests_count
        assert buffers.out_cache_loc.tolist() == locs + token_padding
        assert buffers.out_cache_loc_swa.tolist() == naive_locs(allocator, locs) + token_padding
        assert buffers.seq_lens.tolist() == [8] * requests_count + [1] * row_padding
        assert buffers.page_table.tolist() == [[*row, 0] for row in rows] + [[0] * 3] * row_padding
        peers = [[*allocator.map.peers(slots(*row)).tolist(), 0] for row in rows]
        assert buffers.page_table_swa.tolist() == peers + [[0] * 3] * row_padding
        assert buffers.query_starts.tolist() == starts_in(bucket, query_lens)
        for row in rows:
            free(allocator, slots(*row))
    buffers.clear()
    assert contents(buffers) == untouched
    assert [*addresses(buffers), buffers.query_starts.data_ptr(), translation.table.data_ptr()] == fixed


@every_bucket
def test_a_graph_of_any_size_reads_the_front_of_the_buffers(bucket: GraphBucket) -> None:
    allocator = diverged(32, 24)
    translation = shared(allocator)
    buffers = HybridGraphBuffers(bucket, translation)
    buffers.clear()
    batch = batch_in(bucket, allocator, lens_in(bucket, 2))
    size = bucket.size_of(batch)
    view, metadata = buffers.views(size)
    requests_count, tokens_count = bucket.shape(size)
    assert (view.mode, view.requests_count, view.tokens_count) == (bucket.mode, requests_count, tokens_count)
    assert (view.requests_count >= batch.requests_count, tokens_count) == (True, batch.tokens_count)
    assert write_locs(LayerKind.SWA, view, metadata, translation) is metadata.swa_out_cache_loc
    front = {
        metadata.out_cache_loc: buffers.out_cache_loc,
        metadata.swa_out_cache_loc: buffers.out_cache_loc_swa,
        metadata.page_table: buffers.page_table,
        metadata.swa_page_table: buffers.page_table_swa,
        metadata.cache_lens: buffers.seq_lens,
        metadata.query_starts: buffers.query_starts,
    }
    assert buffers.refill(batch)
    # Used in Python after a refill, where no graph has fixed the choice, they are translated like any other batch.
    chosen = write_locs(LayerKind.SWA, view, metadata, translation)
    assert chosen.tolist() == buffers.out_cache_loc_swa[:tokens_count].tolist()
    for read, buffer in front.items():
        assert read.data_ptr() == buffer.data_ptr()
        assert torch.equal(read, buffer[: len(read)])
    eager = init_metadata(batch, translation)
    assert metadata.swa_out_cache_loc.tolist() == eager.swa_out_cache_loc.tolist()
    assert metadata.query_starts.tolist()[: len(eager.query_starts)] == eager.query_starts.tolist()


@every_bucket
@both
def test_an_idle_forward_replays_the_graph_of_its_peers_over_padding_r21(
    bucket: GraphBucket, make: MakeTranslation
) -> None:
    allocator = diverged(32, 24)
    buffers = HybridGraphBuffers(bucket, make(allocator))
    untouched = [*contents(buffers), buffers.query_starts.tolist()]
    peers = batch_in(bucket, allocator, lens_in(bucket, 3))
    alone = ForwardBatch.idle(CPU, PAGES_MAX)
    idle = alone.padded(peers.tokens_count)
    assert bucket.size_of(idle) == bucket.size_of(peers)
    for batch in (idle, alone):
        assert buffers.refill(peers)
        assert buffers.refill(batch)
        assert [*contents(buffers), buffers.query_starts.tolist()] == untouched


@pytest.mark.parametrize("name", ["target verify", "draft extend"])
def test_requests_with_other_numbers_of_tokens_do_not_fit_even_where_their_sum_does(name: str) -> None:
    bucket, allocator = BUCKETS[name], diverged(32, 24)
    buffers = HybridGraphBuffers(bucket, shared(allocator))
    before = contents(buffers)
    mode = ForwardMode.DRAFT_EXTEND  # verified drafts are even by their mode
    ragged = replace(batch_in(bucket, allocator, (3, 3)), mode=mode, query_lens=(4, 2))
    assert not GraphBucket.draft_extend(REQUESTS_MAX, QUERY_LEN, PAGES_MAX).fits(ragged)
    assert not buffers.refill(ragged)
    assert not buffers.refill(replace(ragged, mode=bucket.mode, query_lens=(2, 2)))
    assert contents(buffers) == before
    # Padded to the length of other ranks, a batch fits as far as there are tokens.
    batch = batch_in(bucket, allocator, (QUERY_LEN,) * 2)
    assert buffers.refill(batch.padded(bucket.tokens_max))
    assert buffers.out_cache_loc.tolist() == batch.out_cache_loc.tolist() + [0] * 6
    assert not buffers.refill(batch.padded(bucket.tokens_max + 1))


@every_bucket
def test_a_refill_takes_few_operations(bucket: GraphBucket) -> None:
    allocator = diverged(32, 24)
    buffers = HybridGraphBuffers(bucket, mirrored(allocator))
    batch = batch_in(bucket, allocator, lens_in(bucket, 3))
    assert buffers.refill(batch)
    with CountedOperations() as counted:
        assert buffers.refill(batch)
    # Each is a kernel on a GPU: padding takes 5, copies 5, the translation of locations 6 and of pages 3.
    assert counted.count <= 19 + 2 * bucket.is_prefill


@pytest.mark.parametrize(
    "make",
    [
        lambda: GraphBucket.decode(0, 1),
        lambda: GraphBucket.decode(-1, 1),
        lambda: GraphBucket.decode(1, 0),
        lambda: GraphBucket.target_verify(2, 0, 1),
        lambda: GraphBucket.prefill(2, 0, 1),
        lambda: GraphBucket(ForwardMode.TARGET_VERIFY, 2, 3, 1),
        lambda: GraphBucket(ForwardMode.IDLE, 2, 2, 1),
        lambda: replace(DECODE, padding_len=-1),
        *(lambda size=size: DECODE.shape(size) for size in (0, -1, REQUESTS_MAX + 1)),
    ],
)
def test_a_bucket_without_room_or_mode_or_a_graph_of_that_size_is_an_error(make: Callable[[], object]) -> None:
    with pytest.raises(InputError):
        make()


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that compute or copy; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return what runs ``step`` again: a CUDA graph of it on a CUDA device, else the function itself."""
    if device.type != "cuda":
        step()
        return step
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def replay_across_a_load(make: MakeTranslation, device: torch.device) -> list[int]:
    """Capture one SWA layer's write, replay it before and after a load has rebuilt the map, and the stale way.

    Return what the page of another request holds after the stale one.
    """
    allocator = diverged()
    pool = ToyPool(allocator, device)
    translation = make(allocator)
    buffers = HybridGraphBuffers(DECODE, translation)
    values = torch.full((REQUESTS_MAX,), 99, dtype=torch.int64, device=device)
    buffers.clear()
    batch, metadata = buffers.views(REQUESTS_MAX)
    locs = write_locs(LayerKind.SWA, batch, metadata, translation)
    replay = captured(lambda: pool.write(locs, values), device)
    assert pool.tokens[PAGE_SIZE:].count_nonzero() == 0, "the capture wrote outside the sink"

    ours = allocate(allocator, 1)
    before = naive_locs(allocator, token_locs(ours, 3, 4))
    assert buffers.refill(decode([ours], device))
    values.fill_(100)
    replay()
    assert pool.read(before) == [100]

    free_peers(allocator, ours)
    theirs = allocate(allocator, 1)
    assert naive_locs(allocator, token_locs(theirs, 3, 4)) == before
    assert buffers.refill(decode([theirs], device))
    values.fill_(200)
    replay()
    loaded = present(allocator.peer.allocate(1))
    allocator.map.bind(ours, loaded)
    stale = buffers.out_cache_loc_swa.clone()
    assert buffers.refill(decode([ours], device))
    values.fill_(101)
    replay()
    assert pool.read(before) == [200]
    assert pool.read(naive_locs(allocator, token_locs(ours, 3, 4))) == [101]

    # Not refilled since the map was rebuilt, the same graph writes into their page.
    buffers.out_cache_loc_swa.copy_(stale)
    values.fill_(666)
    replay()
    return pool.read(before)


@both
def test_a_replay_after_a_load_writes_to_the_new_slots_r17_r20(
    make: MakeTranslation, record_property: Callable[[str, object], None]
) -> None:
    device = "present" if torch.cuda.is_available() else "absent: fixed buffers on the CPU, no captured graph"
    record_property("cuda", device)
    print(f"CUDA device {device}")  # noqa: T201 - says which of the two ways this run shows
    assert replay_across_a_load(make, CPU) == [666], "a stale buffer corrupts: the test is known to bite"


@with_streams
def test_a_captured_cuda_graph_writes_to_the_new_slots_after_a_load_r17_r20(device: torch.device) -> None:
    page = replay_across_a_load(lambda allocator: SwaTranslation.of(allocator, PAGE_SIZE, device), device)
    assert page == [666], "a stale buffer corrupts: the test is known to bite"


@with_streams
def test_a_translation_inside_a_captured_graph_reads_the_map_as_it_was_refreshed_r20(device: torch.device) -> None:
    allocator = diverged()
    translation = SwaTranslation.of(allocator, PAGE_SIZE, device)
    full = allocate(allocator, 1)
    locs = torch.tensor(token_locs(full, 0, 4), device=device)
    result = torch.zeros(4, dtype=torch.int32, device=device)

    def step() -> None:
        result.copy_(translation.translate_locs(locs))

    replay = captured(step, device)
    free_peers(allocator, full)
    allocate(allocator, 2)
    allocator.map.bind(full, slots(7))
    translation.refresh()
    replay()
    assert result.tolist() == [28, 29, 30, 31]


@with_streams
def test_a_map_that_changed_is_not_copied_into_a_cuda_graph(device: torch.device) -> None:
    allocator = diverged()
    translation = SwaTranslation.of(allocator, PAGE_SIZE, device)
    full = allocate(allocator, 1)
    locs = torch.tensor(token_locs(full, 0, 4), device=device)
    translation.refresh()
    free_peers(allocator, full)
    with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        translation.translate_locs(locs)
    assert translation.translate_locs(locs).tolist() == [0, 1, 2, 3]
