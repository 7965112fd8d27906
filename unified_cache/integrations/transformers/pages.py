"""A model's state in pages: which tensors there are, where a page of each lies, in and out of a cache object.

strand   one tensor of one layer, cut into pages: the same number of rows of it in each
pool     the strands that share slots, layer after layer: what the cache moves
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.controller.memory import DevicePool
from unified_cache.core.errors import ConfigError, LayoutError, check_kind
from unified_cache.core.pool import Component, ModelLayout, PoolSpec, Slots
from unified_cache.core.window import SPAN_ALL, window
from unified_cache.integrations.transformers.layer_rows import (
    CHECKPOINT,
    FULL_POOLS,
    STATE_POOLS,
    WINDOW_POOLS,
    LayerRows,
    LayerState,
    layer_state,
)

UNTYPED_CACHES = ("cache", "past_key_values")
"""Arguments that take a cache object though their type says otherwise, as of RoBERTa's decoders in transformers 5."""

PROBE_TOKENS = 2
"""Tokens that a model is seen to go on by: several at once, and so few that the prefix before them decides."""
APART_MAX, APART_HALF_MAX = 0.03, 0.15
"""Largest distance between the logits of a prompt read at once and in two parts, of their length: for models in fp32,
and in shorter types. Rounding and another choice of experts stay below; state that is not read is far above."""

NO_ROWS: Mapping[int, torch.Tensor] = {}

PAGE_SIZE = 64
"""Usual tokens per page; what most attention kernels take."""


@dataclass(frozen=True, slots=True)
class Strand:
    """One tensor that one layer keeps, cut into pages."""

    pool: str
    layer: int
    part: int
    """Place among what ``LayerState.read`` returns of the layer."""
    page_rows: int
    """Rows of one page."""
    rows_max: int | None
    """Rows that the layer looks back on; None for all."""
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    is_checkpoint: bool
    """Whether a page is not rows of tokens, but the state after its last one."""

    @classmethod
    def of(cls, kept: LayerRows, layer: int, part: int, page_size: int) -> "Strand | None":
        """Cut what a layer keeps into pages of ``page_size`` tokens; None where this model keeps nothing there.

        Raises:
            LayoutError: there must be something, or a row would stand in two pages.
        """
        if kept.rows is None:
            if kept.is_optional:
                return None
            raise LayoutError(
                f"layer {layer} must keep {kept.pool} in the cache object after a page of tokens, found nothing: "
                f"the model keeps its state elsewhere"
            )
        is_checkpoint = kept.row_tokens == CHECKPOINT
        page_rows = 1 if is_checkpoint else page_size // kept.row_tokens
        shape = tuple(kept.rows.shape[1:])
        return cls(kept.pool, layer, part, page_rows, kept.rows_max, shape, kept.rows.dtype, is_checkpoint)

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
        """Read what a decoder-only model keeps off its own cache object, after one page of tokens.

        ``page_size`` is in tokens; None for 64, or more where rows stand for groups of tokens. Runs three forwards of
        little more than a page: the last ones see that the model goes on from its cache object as if it had read all
        at once.

        Raises:
            LayoutError: a layer's state is of a kind that is not known, stands in pages of another size, or does not
                lie in a ``DynamicCache``; or the model does not go on from there, or is no decoder alone.
        """
        check_kind(model, PreTrainedModel, "a model of transformers", LayoutError)
        if model.config.is_encoder_decoder:
            raise LayoutError(f"the model must be a decoder alone, found {type(model).__name__}, which has an encoder")
        probe = DynamicCache(config=model.config)
        states = [layer_state(layer) for layer in probe.layers]
        groups = {kept.row_tokens for state in states for kept in state.read()} - {CHECKPOINT}
        page_size = math.lcm(PAGE_SIZE, *groups) if page_size is None else page_size
        check_kind(page_size, int, "page_size as a whole number of tokens", LayoutError)
        for group in groups:
            if page_size < 1 or page_size % group:
                raise LayoutError(f"page_size must be a positive multiple of {group} tokens, found {page_size}")
        count = page_size + PROBE_TOKENS
        positions = _positions_count(model)
        if positions is not None and count > positions:
            raise LayoutError(
                f"page_size must be at most {positions - PROBE_TOKENS}, as the model has {positions} positions, "
                f"found {page_size}"
            )
        vocabulary_size = cast("torch.nn.Embedding", model.get_input_embeddings()).num_embeddings
        tokens = torch.arange(3, 3 + count, device=model.device) % vocabulary_size
        try:
            logits_of(model, probe, tokens[None, :page_size])
        except (TypeError, ValueError) as error:
            raise LayoutError(f"{type(model).__name__} must read tokens into a DynamicCache: {error}") from error
        if len(probe.layers) != len(states):
            raise LayoutError(
                f"{type(model).__name__} must keep the state of its {len(states)} layers in a DynamicCache, found "
                f"{len(probe.layers)} layers there after a page of tokens"
            )
        found = [
            Strand.of(kept, layer, part, page_size)
            for layer, state in enumerate(states)
            for part, kept in enumerate(state.read())
        ]
        strands = tuple(strand for strand in found if strand is not None)
        kept = {strand.layer for strand in strands}
        for layer, state in enumerate(states):
            if state.read() and layer not in kept:
                raise LayoutError(f"layer {layer} must keep its state in the cache object, found nothing there")
        layout = _layout(page_size, strands)
        at_once = logits_of(model, DynamicCache(config=model.config), tokens[None]).float()
        try:
            gone_on = logits_of(model, probe, tokens[None, page_size:]).float()
        except RuntimeError as error:  # XLM's, which reads no tokens then
            raise LayoutError(f"{type(model).__name__} must go on from its cache object by tokens: {error}") from error
        apart = float((at_once - gone_on).norm() / at_once.norm())
        if apart > (APART_MAX if model.dtype.itemsize >= torch.float32.itemsize else APART_HALF_MAX):
            raise LayoutError(
                f"{type(model).__name__} must go on from its cache object by {PROBE_TOKENS} tokens as if it had read "
                f"all at once, found logits {apart:.0%} apart"
            )
        return cls(model, layout, strands)

    def new_cache(self) -> DynamicCache:
        """Return an empty cache object of the model's own."""
        return DynamicCache(config=self.model.config)

    def run(
        self, past: DynamicCache, tokens: Sequence[int], media: Mapping[int, torch.Tensor] = NO_ROWS
    ) -> torch.Tensor:
        """Run the model on tokens after those in ``past``; return the logits of the last, shape (vocabulary,).

        ``media`` has embeddings, shape (tokens, hidden size), that the model reads in the place of those of tokens from
        that number on.
        """
        ids = torch.tensor([tokens], dtype=torch.int64, device=self.model.device)
        if not media:
            return logits_of(self.model, past, ids)
        with torch.no_grad():
            embedded = cast("torch.Tensor", self.model.get_input_embeddings()(ids)).clone()
            for start, rows in media.items():
                embedded[0, start : start + len(rows)] = rows.to(embedded)
        return logits_of(self.model, past, embedded)

    def allocate(self, device_pages: Sequence[int]) -> "DevicePages":
        """Allocate tensors for ``device_pages[component]`` pages, and the padding sink, on the model's device.

        Raises:
            ConfigError: not a number for each component.
        """
        names = [each.name for each in self.layout.components]
        if len(device_pages) != len(names):
            raise ConfigError(f"device_pages need an entry for each of {', '.join(names)}, found {device_pages}")
        pages = dict(zip(names, device_pages, strict=True))
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

    @torch.no_grad()
    def write(self, past: DynamicCache, locs: Sequence[torch.Tensor]) -> None:
        """Copy what the last tokens of ``past`` have left to their locations, as kernels of a paged engine do.

        ``locs[c]`` says where component ``c`` keeps them: ``slot * page_size + offset``, int64, shape (tokens,), on the
        model's device. Where it keeps none the slot is 0, the sink; the offset is the token's own all the same. A row
        of several tokens is written with the last of them, a checkpoint if the very last token ends a page. Rows
        that the model has released already are left as they are.
        """
        reads = [layer_state(layer).read() for layer in past.layers]
        for strand, tensor, home in zip(self.kept.strands, self._tensors, self._homes, strict=True):
            rows = reads[strand.layer][strand.part].rows
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

        Before the model releases state that is kept: of a page from ``start`` on that has a slot. ``slots[c]`` has an
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

        Otherwise bytes of a slot's previous page would be stored under another name. ``slots`` as for ``capture``.
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
            assert not (held[:-whole_pages] >= 0).any(), "a page is captured after the model has dropped it"
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
        past = self.kept.new_cache()
        if not end:
            return past
        for component, held in zip(self.layout.components, slots, strict=True):
            assert len(held) == end - window(end, component.span), f"{component.name}: not the pages of its window"
        strands = iter(zip(self.kept.strands, self._tensors, self._homes, strict=True))
        states: list[LayerState] = [layer_state(layer) for layer in past.layers]
        per_layer: list[list[torch.Tensor | None]] = [[None for _ in state.read()] for state in states]
        for strand, tensor, home in strands:
            at = torch.from_numpy(slots[home]).to(tensor.device, torch.int64)
            per_layer[strand.layer][strand.part] = strand.join(tensor[at])
        for state, rows in zip(states, per_layer, strict=True):
            state.write(rows, end * self.layout.page_size)
        return past


@torch.no_grad()
def logits_of(model: PreTrainedModel, past: DynamicCache, tokens: torch.Tensor) -> torch.Tensor:
    """Run ``model`` on tokens after those in ``past``; return the last token's logits.

    ``tokens`` are ids, int64, shape (1, tokens), or their embeddings, shape (1, tokens, hidden size).
    """
    taken = inspect.signature(model.forward).parameters
    typed = (name for name, each in taken.items() if "Cache" in str(each.annotation))
    name = next(typed, next((each for each in UNTYPED_CACHES if each in taken), None))
    if name is None:
        raise LayoutError(
            f"the forward of a model must take a cache object, found {type(model).__name__} with the arguments "
            f"{', '.join(taken)} alone"
        )
    options = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    tokens_name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    found = model(use_cache=True, **{tokens_name: tokens, name: past}, **options)
    return cast("torch.Tensor", found.logits[0, -1])


def _positions_count(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for; None where its configuration does not say."""
    text = model.config.get_text_config(decoder=True)
    name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    found = text.to_dict().get(name)
    return found if isinstance(found, int) and found > 0 else None


def _layout(page_size: int, strands: Sequence[Strand]) -> ModelLayout:
    """Return the layout of what a model keeps: the kinds of state that its layers have, each pool with its bytes."""
    sizes: dict[str, int] = {}
    for strand in strands:
        sizes[strand.pool] = sizes.get(strand.pool, 0) + strand.page_bytes

    def pools(names: Iterable[str]) -> tuple[PoolSpec, ...]:
        return tuple(PoolSpec(name, sizes[name]) for name in names if name in sizes)

    anchor, *sidecars = FULL_POOLS
    # A model without a full-attention layer has a logical anchor: slots without bytes.
    components: list[Component] = [Full((PoolSpec(anchor, sizes.get(anchor, 0)), *pools(sidecars)))]
    if WINDOW_POOLS[0] in sizes:
        looked_back = [strand.rows_max for strand in strands if strand.pool == WINDOW_POOLS[0]]
        components.append(SlidingWindow(max(each or 0 for each in looked_back), page_size, pools(WINDOW_POOLS)))
    if states := pools(STATE_POOLS):
        components.append(RecurrentState(states))
    return ModelLayout(page_size, tuple(components))
