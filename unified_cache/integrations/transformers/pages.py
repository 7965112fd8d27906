"""A model's state in pages: which tensors there are, where a page of each lies, in and out of a cache object.

strand   one tensor of one layer, cut into pages: the same number of rows of it in each
pool     the strands that share slots, layer after layer: what the cache moves
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from unified_cache.components.layouts import from_hf_config
from unified_cache.errors import LayoutError
from unified_cache.integrations.transformers.layer_rows import CHECKPOINT, LayerRows, layer_state
from unified_cache.memory import DevicePool
from unified_cache.pool import Component, LayerPlace, ModelLayout, PoolSpec, Slots
from unified_cache.window import SPAN_ALL, window

__all__ = ["DevicePages", "KeptState", "Strand"]


@dataclass(frozen=True, slots=True)
class Strand:
    """One tensor that one layer keeps, cut into pages."""

    pool: str
    layer: int
    page_rows: int
    """Rows of one page."""
    rows_max: int | None
    """Rows that the layer looks back on; None for all."""
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    is_checkpoint: bool
    """Whether a page is not rows of tokens, but the state after its last one."""

    @classmethod
    def of(cls, kept: LayerRows, layer: int, page_size: int) -> "Strand":
        """Cut what a layer keeps into pages of ``page_size`` tokens.

        Raises:
            LayoutError: there is nothing, or a row would stand in two pages.
        """
        if kept.rows is None:
            raise LayoutError(f"a layer must keep {kept.pool} after a page of tokens, found nothing")
        if kept.row_tokens != CHECKPOINT and page_size % kept.row_tokens:
            raise LayoutError(
                f"page_size must be a multiple of {kept.row_tokens} tokens ({kept.pool}), not {page_size}"
            )
        is_checkpoint = kept.row_tokens == CHECKPOINT
        page_rows = 1 if is_checkpoint else page_size // kept.row_tokens
        shape = tuple(kept.rows.shape[1:])
        return cls(kept.pool, layer, page_rows, kept.rows_max, shape, kept.rows.dtype, is_checkpoint)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_rows * int(np.prod(self.row_shape)) * self.dtype.itemsize

    @property
    def whole_pages(self) -> int:
        """Pages before a boundary of which the layer still has all that anyone may ask for; at least the last."""
        return SPAN_ALL if self.rows_max is None else max(1, self.rows_max // self.page_rows)

    def join(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``pages``, shape (rows, ...), as far as the layer looks back."""
        rows = pages.reshape(-1, *self.row_shape)
        return rows if self.rows_max is None else rows[-self.rows_max :]


@dataclass(frozen=True, slots=True)
class KeptState:
    """State that one model keeps for a prefix: the layout that a cache is opened with, and the strands of its pools."""

    model: PreTrainedModel
    layout: ModelLayout
    strands: tuple[Strand, ...]
    """Strands in the order of layers, and within a layer in that of ``LayerState.read``."""

    @classmethod
    def of(cls, model: PreTrainedModel, page_size: int | None = None) -> "KeptState":
        """Read the structure from the model's config and the sizes from what it keeps after one page of tokens.

        ``page_size`` is in tokens; None for the architecture's usual. Runs one forward.

        Raises:
            LayoutError: the model is not supported, or not in pages of that size.
        """
        layout = from_hf_config(model.config.to_dict(), page_size=page_size)
        probe = DynamicCache(config=model.config)
        states = [layer_state(layer) for layer in probe.layers]
        with torch.no_grad():
            tokens = torch.zeros((1, layout.page_size), dtype=torch.int64, device=model.device)
            model(input_ids=tokens, past_key_values=probe, use_cache=True, logits_to_keep=1)
        strands = [
            Strand.of(kept, number, layout.page_size) for number, state in enumerate(states) for kept in state.read()
        ]
        return cls(model, _sized(layout, strands), tuple(strands))

    def allocate(self, device_pages: Sequence[int]) -> "DevicePages":
        """Allocate tensors for ``device_pages[component]`` pages, and the padding sink, on the model's device."""
        pages = dict(zip((each.name for each in self.layout.components), device_pages, strict=True))
        counts = {pool.name: pages[each.name] for each in self.layout.components for pool in each.pools}
        tensors = [
            torch.zeros(
                (counts[strand.pool] + 1, strand.page_rows, *strand.row_shape),
                dtype=strand.dtype,
                device=self.model.device,
            )
            for strand in self.strands
        ]
        return DevicePages(self, tensors)


class DevicePages:
    """The engine's device pools: one tensor per strand, shape (slots, rows of a page, ...). Slot 0 is the sink."""

    __slots__ = ("_homes", "_tensors", "kept", "pools")

    def __init__(self, kept: KeptState, tensors: Sequence[torch.Tensor]) -> None:
        self.kept = kept
        self._tensors = tensors
        layers: dict[str, list[torch.Tensor]] = {}
        for strand, tensor in zip(kept.strands, tensors, strict=True):
            layers.setdefault(strand.pool, []).append(tensor)
        specs = {pool.name: pool for pool in kept.layout.pools}
        self.pools = [DevicePool(specs[name], each) for name, each in layers.items()]
        """Device pools, as ``UnifiedCache.open`` takes them."""
        homes = {pool.name: number for number, each in enumerate(kept.layout.components) for pool in each.pools}
        self._homes = [homes[strand.pool] for strand in kept.strands]

    @property
    def layout(self) -> ModelLayout:
        """The layout that a cache over these pools is opened with."""
        return self.kept.layout

    @property
    def whole_pages(self) -> tuple[int, ...]:
        """Pages before a boundary that can be captured there, by component; the layers have dropped older ones."""
        whole = [SPAN_ALL] * len(self.layout.components)
        for home, strand in zip(self._homes, self.kept.strands, strict=True):
            whole[home] = min(whole[home], strand.whole_pages)
        return tuple(whole)

    def tensors(self, pool: str) -> list[torch.Tensor]:
        """Return the tensors of one pool, strand after strand; views that share its memory."""
        return [each for each, strand in zip(self._tensors, self.kept.strands, strict=True) if strand.pool == pool]

    def new_cache(self) -> DynamicCache:
        """Return an empty cache object of the model's own."""
        return DynamicCache(config=self.kept.model.config)

    @torch.no_grad()
    def write(self, past: DynamicCache, locs: Sequence[torch.Tensor]) -> None:
        """Copy what the last tokens of ``past`` have left to their locations, as kernels of a paged engine do.

        ``locs[c]`` says where component ``c`` keeps them: ``slot * page_size + offset``, int64, shape (tokens,), on the
        model's device. Where it keeps none the slot is 0, the sink; the offset is the token's own all the same. A row
        of several tokens is written with the last of them, a checkpoint if the very last token ends a page. Rows
        that the model has let go of already are left as they are.
        """
        reads = [kept.rows for layer in past.layers for kept in layer_state(layer).read()]
        for rows, strand, tensor, home in zip(reads, self.kept.strands, self._tensors, self._homes, strict=True):
            row_tokens = self.layout.page_size // strand.page_rows
            whole = (locs[home] + 1) % row_tokens == 0
            if strand.is_checkpoint and not whole[-1]:
                continue
            targets = locs[home][whole] // row_tokens
            count = 0 if rows is None else min(len(targets), len(rows))
            if rows is not None and count:
                tensor.view(-1, *strand.row_shape)[targets[-count:]] = rows[-count:]

    def chunk_end(self, start: int, end: int, slots: Sequence[Slots]) -> int:
        """Return where a chunk of pages [start, end) must end at the latest.

        Before the model lets go of state that is kept: of a page from ``start`` on that has a slot. ``slots[c]`` has an
        entry for each page of the chunk, and may go on.
        """
        for held, whole_pages in zip(slots, self.whole_pages, strict=True):
            wanted = np.flatnonzero(held[: end - start] >= 0)
            if wanted.size:
                end = min(end, start + int(wanted[0]) + whole_pages)
        return end

    @torch.no_grad()
    def clear(self, slots: Sequence[Slots]) -> None:
        """Zero what ``write`` may leave of the pages' slots as it is: rows that leave a window before their page ends.

        Otherwise bytes of whoever had a slot before would be stored under another's name. ``slots`` as for ``capture``.
        """
        for strand, tensor, home in zip(self.kept.strands, self._tensors, self._homes, strict=True):
            if strand.rows_max is not None and strand.rows_max < strand.page_rows:
                held = slots[home]
                tensor[torch.from_numpy(held[held >= 0]).to(tensor.device, torch.int64)] = 0

    def capture(self, past: DynamicCache, slots: Sequence[Slots]) -> None:
        """Copy the last pages of ``past``, which ends at a page boundary, to the device slots of each component.

        ``slots[c]`` has an entry for each page, the last one's at the end; -1 where the component keeps none. No page
        with a slot may lie further back than ``whole_pages`` says; what it has of tokens before a window is zero.
        """
        device, page_size = self.kept.model.device, self.layout.page_size
        offsets = torch.arange(page_size, device=device)
        locs: list[torch.Tensor] = []
        for held, whole_pages in zip(slots, self.whole_pages, strict=True):
            assert not (held[:-whole_pages] >= 0).any(), "a page is captured after the model has let go of it"
            pages = torch.from_numpy(np.maximum(held, 0)).to(device, torch.int64)
            locs.append((pages[:, None] * page_size + offsets).flatten())
        self.clear(slots)
        self.write(past, locs)

    @torch.no_grad()
    def restore(self, slots: Sequence[Slots], end: int) -> DynamicCache:
        """Return a cache object of the model's own, as it was after ``end`` pages; it shares no memory with the pools.

        ``slots[c]`` holds the device slots of component ``c`` for the pages that a resume at ``end`` needs, as
        ``UnifiedCache.slots`` returns them.
        """
        past = self.new_cache()
        if not end:
            return past
        for component, held in zip(self.layout.components, slots, strict=True):
            assert len(held) == end - window(end, component.span), f"{component.name}: not the pages of its window"
        strands = iter(zip(self.kept.strands, self._tensors, self._homes, strict=True))
        per_layer: list[list[torch.Tensor]] = [[] for _ in past.layers]
        for strand, tensor, home in strands:
            at = torch.from_numpy(slots[home]).to(tensor.device, torch.int64)
            per_layer[strand.layer].append(strand.join(tensor[at]))
        for layer, rows in zip(past.layers, per_layer, strict=True):
            layer_state(layer).write(rows, end * self.layout.page_size)
        return past


def _sized(layout: ModelLayout, strands: Sequence[Strand]) -> ModelLayout:
    """Return ``layout`` with the bytes that the strands take.

    Raises:
        LayoutError: the model keeps what the layout has no pool for, not what it has one for, or longer than it says.
    """
    _check_layers(layout, strands)
    sizes: dict[str, int] = {}
    for strand in strands:
        sizes[strand.pool] = sizes.get(strand.pool, 0) + strand.page_bytes
    for component in layout.components:
        names = {pool.name for pool in component.pools}
        for strand in strands:
            if strand.pool in names and (strand.rows_max or 0) > component.span * strand.page_rows:
                raise LayoutError(f"{strand.pool}: the model looks back on {strand.rows_max} rows, past its window")
    return replace(layout, components=tuple(_with_sizes(component, sizes) for component in layout.components))


def _check_layers(layout: ModelLayout, strands: Sequence[Strand]) -> None:
    """Raise LayoutError unless each layer keeps state in the pools that the layout places it in."""
    kept: dict[int, set[str]] = {}
    for strand in strands:
        kept.setdefault(strand.layer, set()).add(strand.pool)
    owners: dict[LayerPlace, int] = {}
    for layer, places in enumerate(layout.layers_mapping):
        for place in places:
            owners.setdefault(place, layer)  # a layer that borrows its state keeps none
    expected: dict[int, set[str]] = {}
    for place, layer in owners.items():
        expected.setdefault(layer, set()).add(place.pool)
    for layer in sorted(kept.keys() | expected.keys()):
        found, said = sorted(kept.get(layer, ())), sorted(expected.get(layer, ()))
        if found != said:
            raise LayoutError(f"layer {layer} of the model keeps {found}, its config says {said}")


def _with_sizes(component: Component, sizes: Mapping[str, int]) -> Component:
    pools: tuple[PoolSpec, ...] = tuple(
        replace(pool, page_bytes=sizes.get(pool.name, pool.page_bytes)) for pool in component.pools
    )
    return replace(component, pools=pools)
