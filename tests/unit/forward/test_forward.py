"""Batches, translation and metadata of one forward. R17 to R21 are rules that SGLang 0.5.23 keeps, in pages."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.forward import (
    CPU,
    PAGE_SIZE,
    ToyPool,
    allocate,
    batch_of,
    diverged,
    free_peers,
    idle,
    mirrored,
    naive_locs,
    paired,
    shared,
    slots,
    token_locs,
)
from tests.support.gpu import keep_busy, stream_of, with_streams
from tests.support.operations import present
from unified_cache.components.layouts import layout
from unified_cache.core.errors import CaptureError, ConfigError, InputError
from unified_cache.core.pool import Slots
from unified_cache.core.slots import PairedAllocator
from unified_cache.forward import (
    AttentionMetadata,
    ForwardBatch,
    ForwardMode,
    HybridAttentionMetadata,
    LayerKind,
    SwaTranslation,
    init_metadata,
    write_locs,
)

MakeTranslation = Callable[[PairedAllocator], SwaTranslation]
both = pytest.mark.parametrize("make", [shared, mirrored])


def prepared(make: MakeTranslation, pages: int) -> tuple[PairedAllocator, SwaTranslation, Slots]:
    allocator = diverged()
    return allocator, make(allocator), allocate(allocator, pages)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_locs_of_any_integer_dtype_become_int32_of_the_same_shape_r19(dtype: torch.dtype) -> None:
    translation = shared(diverged())
    locs = torch.tensor([[[12, 13], [14, 0]]], dtype=dtype)
    for result in (translation.translate_locs(locs), translation.translate_pages(locs)):
        assert result.dtype == torch.int32
        assert result.shape == locs.shape
    assert translation.translate_locs(locs).tolist() == [[[12, 13], [14, 0]]]
    assert translation.translate_locs(torch.zeros(0, dtype=dtype)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_locs_that_are_no_integers_are_an_error(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="integers"):
        shared(paired()).translate_locs(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize(("peer", "page_size"), [(8, 0), (8, -4), (8, 2**28), (2, (2**31 + 1) // 3)])
def test_a_page_size_that_leaves_no_int32_locs_is_an_error(peer: int, page_size: int) -> None:
    for make in (SwaTranslation.of, SwaTranslation.mirrored):
        with pytest.raises(ConfigError):
            make(paired(8, peer), page_size, CPU)


def test_the_last_page_that_int32_can_name_is_translated_exactly() -> None:
    allocator = paired(8, 7)
    allocator.map.bind(slots(1), slots(7))
    translation = SwaTranslation.of(allocator, 2**28, CPU)
    assert translation.translate_locs(torch.tensor([2**29 - 1])).tolist() == [2**31 - 1]


def test_on_the_cpu_the_table_is_the_maps_own_memory_and_a_capture_has_nothing_to_refuse() -> None:
    allocator = diverged()
    table = torch.from_numpy(allocator.map.table)
    assert shared(allocator).table.data_ptr() == table.data_ptr()
    translation = SwaTranslation(allocator.map, table, PAGE_SIZE, lambda: True)
    locs = token_locs(allocate(allocator, 2), 0, 2 * PAGE_SIZE)
    assert translation.translate_locs(torch.tensor(locs)).tolist() == naive_locs(allocator, locs)


@both
def test_nothing_keeps_a_translation_and_no_two_share_memory(make: MakeTranslation) -> None:
    _, translation, full = prepared(make, 2)
    batch = batch_of(token_locs(full, 0, 2), [full], ForwardMode.EXTEND)
    metadata = init_metadata(batch, translation)
    rebound = replace(batch, out_cache_loc=batch.out_cache_loc.clone())
    translated = [
        *(metadata.swa_out_cache_loc, metadata.swa_page_table),
        write_locs(LayerKind.SWA, rebound, metadata, translation),
        *(translation.translate_locs(batch.out_cache_loc) for _ in range(2)),
        *(translation.translate_pages(batch.page_table) for _ in range(2)),
    ]
    assert len({tensor.data_ptr() for tensor in translated}) == len(translated)
    references = [weakref.ref(tensor) for tensor in translated]
    del metadata, translated
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@with_streams
def test_a_stream_translates_by_the_map_that_another_stream_copies(device: torch.device) -> None:
    allocator = paired()
    translation = SwaTranslation.of(allocator, PAGE_SIZE, device)
    full = allocate(allocator, 4)
    locs = torch.from_numpy(full.astype(np.int64) * PAGE_SIZE).to(device)
    streams = [stream_of(device) for _ in range(3)]
    for stream, other in pairwise(streams):
        allocator.map.bind(full, allocator.map.peers(full)[::-1].copy())
        with torch.cuda.stream(stream):
            keep_busy(device)
            translation.refresh()
        with torch.cuda.stream(other):
            found = translation.translate_locs(locs).tolist(), translation.translate_pages(locs // PAGE_SIZE).tolist()
        peers = allocator.map.peers(full)
        assert found == ((peers * PAGE_SIZE).tolist(), peers.tolist())


def test_a_map_that_changed_is_not_copied_while_a_graph_is_captured() -> None:
    allocator = diverged()
    capturing = [False]
    table = torch.zeros(len(allocator.map.table), dtype=torch.int32)
    translation = SwaTranslation(allocator.map, table, PAGE_SIZE, lambda: capturing[0])
    full = allocate(allocator, 2)
    locs = torch.tensor(token_locs(full, 0, 4))
    translation.refresh()
    capturing[0] = True
    # Up to date, there is nothing to copy, and what is captured reads the table where it always is.
    before = translation.translate_locs(locs)
    free_peers(allocator, full)
    version, entries = translation.map_version, translation.table.clone()
    for call in (translation.refresh, lambda: translation.translate_locs(locs)):
        with pytest.raises(CaptureError, match="refresh before the capture"):
            call()
    assert torch.equal(translation.table, entries)
    capturing[0] = False
    assert translation.translate_locs(locs).tolist() != before.tolist()
    assert translation.map_version == version


@both
def test_a_forward_is_translated_once_and_every_swa_layer_gets_the_same_tensor_r18(make: MakeTranslation) -> None:
    allocator = diverged()
    full = allocate(allocator, 2)
    translation = make(allocator)
    batch = batch_of(token_locs(full, 2, 7), [full], ForwardMode.EXTEND)
    metadata = init_metadata(batch, translation)
    layers = [write_locs(LayerKind.SWA, batch, metadata, translation) for _ in range(4)]
    assert all(layer is metadata.swa_out_cache_loc for layer in layers)
    assert write_locs(LayerKind.FULL, batch, metadata, translation) is batch.out_cache_loc
    assert metadata.swa_out_cache_loc.tolist() == naive_locs(allocator, batch.out_cache_loc.tolist())
    assert metadata.swa_page_table.tolist() == [[2, 1]]
    assert (metadata.swa_out_cache_loc.dtype, metadata.swa_page_table.dtype) == (torch.int32, torch.int32)
    assert metadata.out_cache_loc is batch.out_cache_loc
    assert metadata.page_table is batch.page_table
    assert metadata.cache_lens is batch.seq_lens


def test_metadata_of_a_model_without_windows_has_no_swa_part() -> None:
    batch = batch_of([4], [slots(1)])
    metadata = init_metadata(batch, None)
    assert type(metadata) is AttentionMetadata
    assert metadata.out_cache_loc is batch.out_cache_loc
    assert not isinstance(metadata, HybridAttentionMetadata)


@both
def test_a_load_between_two_forwards_moves_the_next_write_and_the_stale_one_corrupts_r17(make: MakeTranslation) -> None:
    allocator = diverged()
    pool = ToyPool(allocator)
    translation = make(allocator)
    ours = allocate(allocator, 2)
    first = batch_of(token_locs(ours, 7, 8), [ours])
    old = init_metadata(first, translation)
    pool.write(write_locs(LayerKind.SWA, first, old, translation), torch.tensor([100]))

    # Our SWA pages go to the host, and who comes next gets their slots and fills them.
    free_peers(allocator, ours)
    theirs = allocate(allocator, 2)
    extend = batch_of(token_locs(theirs, 0, 8), [theirs], ForwardMode.EXTEND)
    pool.write(init_metadata(extend, translation).swa_out_cache_loc, torch.arange(200, 208))
    their_locs = naive_locs(allocator, extend.out_cache_loc.tolist())
    assert old.swa_out_cache_loc.tolist()[0] in their_locs

    # Ours are loaded into new slots, under the Full slots that we still have.
    loaded = present(allocator.peer.allocate(2))
    allocator.map.bind(ours, loaded)
    now = batch_of(token_locs(ours, 7, 8), [ours])
    metadata = init_metadata(now, translation)
    for batch in (now, first):  # a new batch as engines make it, or the old one once more, old metadata and all
        for known in (metadata, old, None):
            chosen = write_locs(LayerKind.SWA, batch, known, translation)
            assert chosen.tolist() == [int(loaded[1]) * PAGE_SIZE + 3]
    pool.write(write_locs(LayerKind.SWA, now, metadata, translation), torch.tensor([101]))
    assert pool.read(their_locs) == list(range(200, 208))
    assert pool.read(naive_locs(allocator, now.out_cache_loc.tolist())) == [101]

    # What this test is about, done wrong: the old translation writes into their page.
    pool.write(old.swa_out_cache_loc, torch.tensor([666]))
    assert 666 in pool.read(their_locs)


def written(batch: ForwardBatch, memory: torch.Tensor) -> ForwardBatch:
    memory.add_(5)
    return batch


CHANGES: dict[str, Callable[[ForwardBatch, torch.Tensor], ForwardBatch]] = {
    # A batch of a request's tokens [0, 3), and the memory of all eight that they are a view of.
    "other locs, as many": lambda batch, memory: replace(batch, out_cache_loc=memory[5:].clone()),
    "fewer": lambda batch, memory: replace(batch, out_cache_loc=batch.out_cache_loc[1:], query_lens=(2,)),
    "fewer, at the same address": lambda batch, memory: replace(
        batch, out_cache_loc=batch.out_cache_loc[:2], query_lens=(2,)
    ),
    "the same, in another tensor": lambda batch, memory: replace(batch, out_cache_loc=memory[:3].clone()),
    "written in place": lambda batch, memory: written(batch, batch.out_cache_loc),
    "written through another view": written,
    "padded": lambda batch, memory: batch.padded(5),
    "padded and cut again": lambda batch, memory: batch.padded(3),
}


@both
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND, ForwardMode.TARGET_VERIFY])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_batch_that_changed_after_its_metadata_was_built_is_translated_now_r21(
    make: MakeTranslation, mode: ForwardMode, change: str, *, inference: bool
) -> None:
    allocator, translation, full = prepared(make, 2)
    with torch.inference_mode(inference):
        memory = torch.tensor(token_locs(full, 0, 8))
        batch = replace(batch_of(token_locs(full, 0, 3), [full], mode), out_cache_loc=memory[:3])
        metadata = init_metadata(batch, translation)
        assert write_locs(LayerKind.SWA, batch, metadata, translation) is metadata.swa_out_cache_loc
        if inference and "written" in change:
            return  # torch counts no writes then: ``ForwardBatch`` says that nobody does
        changed = CHANGES[change](batch, memory)
        chosen = write_locs(LayerKind.SWA, changed, metadata, translation)
        assert chosen is not metadata.swa_out_cache_loc
        assert chosen.tolist() == naive_locs(allocator, changed.out_cache_loc.tolist())


@both
def test_an_idle_batch_never_uses_what_was_translated_before_r21(make: MakeTranslation) -> None:
    _, translation, full = prepared(make, 2)
    busy = batch_of(token_locs(full, 7, 8), [full])
    left_behind = init_metadata(busy, translation)
    batch = ForwardBatch.idle(CPU, 1).padded(1)
    assert write_locs(LayerKind.SWA, batch, left_behind, translation).tolist() == [0]
    # Not even where everything else says that it is this batch's.
    same = idle(busy.out_cache_loc)
    assert left_behind.is_current(same, translation)
    assert write_locs(LayerKind.SWA, same, left_behind, translation) is not left_behind.swa_out_cache_loc
    nothing = ForwardBatch.idle(CPU, 1)
    assert write_locs(LayerKind.SWA, nothing, left_behind, translation).shape == (0,)
    assert init_metadata(nothing, translation).swa_page_table.shape == (0, 1)


def test_padding_adds_rows_where_a_token_is_a_request_and_tokens_alone_elsewhere() -> None:
    rows = [slots(3, 4), slots(5)]
    decode = batch_of([19, 23], rows).padded(4)
    assert (decode.tokens_count, decode.requests_count) == (4, 4)
    assert decode.out_cache_loc.tolist() == [19, 23, 0, 0]
    assert decode.seq_lens.tolist() == [8, 4, 0, 0]
    assert decode.page_table.tolist() == [[3, 4], [5, 0], [0, 0], [0, 0]]
    extend = batch_of([18, 19, 23], rows, ForwardMode.EXTEND).padded(4)
    assert (extend.tokens_count, extend.requests_count) == (4, 2)
    assert (extend.out_cache_loc.dtype, extend.seq_lens.dtype) == (torch.int64, torch.int32)
    assert (decode.query_lens, extend.query_lens) == ((1, 1, 1, 1), (1, 2))
    verify = batch_of([16, 17, 20, 21], rows, ForwardMode.TARGET_VERIFY).padded(9)
    assert (verify.tokens_count, verify.requests_count, verify.query_lens) == (9, 4, (2, 2, 2, 2))
    assert verify.page_table.tolist() == [[3, 4], [5, 0], [0, 0], [0, 0]]
    with pytest.raises(InputError, match="2 tokens cannot be padded to 1"):
        batch_of([19, 23], rows).padded(1)


def test_metadata_says_where_the_tokens_of_each_request_begin_and_end() -> None:
    rows = [slots(3, 4), slots(5), slots(6)]
    extend = replace(batch_of([16, 17, 18, 20, 24, 25], rows, ForwardMode.EXTEND), query_lens=(3, 1, 2))
    metadata = init_metadata(extend, None)
    assert (metadata.query_starts.tolist(), metadata.query_starts.dtype) == ([0, 3, 4, 6], torch.int32)
    # What pads it belongs to no request.
    assert init_metadata(extend.padded(9), None).query_starts.tolist() == [0, 3, 4, 6]
    decode = batch_of([19, 23], rows[:2]).padded(4)
    assert init_metadata(decode, shared(diverged())).query_starts.tolist() == [0, 1, 2, 3, 4]
    assert init_metadata(ForwardBatch.idle(CPU, 1), None).query_starts.tolist() == [0]


def test_a_layers_place_in_the_layout_says_by_which_locations_it_writes() -> None:
    gpt_oss = layout("gpt-oss-20b")
    assert [LayerKind.of(gpt_oss, pool.name) for pool in gpt_oss.pools] == [LayerKind.FULL, LayerKind.SWA]
    deepseek = layout("deepseek-v4-flash")
    found = {pool.name: LayerKind.of(deepseek, pool.name) for pool in deepseek.pools}
    assert [pool for pool, kind in found.items() if kind is LayerKind.SWA] == [
        "swa",
        "deepseek_v4_c4_state",
        "deepseek_v4_c4_indexer_state",
    ]
    with pytest.raises(InputError, match="rows of tokens"):
        LayerKind.of(layout("nemotron-h-8b"), "mamba")
    with pytest.raises(InputError, match="'elsewhere'"):
        LayerKind.of(deepseek, "elsewhere")


def test_a_batch_with_wrong_shapes_or_dtypes_is_an_error() -> None:
    good = batch_of([19, 23], [slots(4), slots(5)])
    changes: tuple[Callable[[], ForwardBatch], ...] = (
        lambda: replace(good, out_cache_loc=good.out_cache_loc.to(torch.int32)),
        lambda: replace(good, out_cache_loc=good.out_cache_loc[None]),
        lambda: replace(good, out_cache_loc=good.out_cache_loc[:1]),
        lambda: replace(good, seq_lens=good.seq_lens.to(torch.int64)),
        lambda: replace(good, page_table=good.page_table[:1]),
        lambda: replace(good, page_table=good.page_table.to(torch.int64)),
        lambda: replace(good, page_table=good.page_table.to("meta")),
        lambda: replace(good, query_lens=(1,)),
        lambda: replace(good, query_lens=(2, 0)),
        lambda: replace(good, query_lens=(1, 0)),
        lambda: replace(good, mode=ForwardMode.EXTEND, query_lens=(1, 2)),
        lambda: replace(good, mode=ForwardMode.EXTEND, query_lens=(3, -1)),
        lambda: replace(good, mode=ForwardMode.TARGET_VERIFY, query_lens=(2, 0)),
    )
    for change in changes:
        with pytest.raises(InputError):
            change()
