"""A layout together with what its bytes are made of, and what a number of tokens costs in it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.components.layouts.fields import COUNT_MAX
from unified_cache.core.errors import LayoutError, did_you_mean
from unified_cache.core.pool import Component, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES

COST_TOKENS = 1_000_000
"""Tokens that costs are given for."""

DTYPE_BYTES: Mapping[str, int] = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "float32": 4,
    "fp32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "int8": 1,
}
"""Bytes of one value of K or V, by the names of torch and by those that engines take on the command line."""

AUTO = "auto"
"""Data type of K and V that is the model's own, as engines call it."""


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """Quantised K or V of one token in one head: packed values, and scales beside them."""

    values_per_byte: int
    scale_bytes: int
    """Bytes of one scale."""
    scaled_values: int | None
    """Values that share a scale; None for all of the head."""

    def row_bytes(self, values: int) -> int:
        """Return the bytes of a head of so many values."""
        scales = 1 if self.scaled_values is None else -(-values // self.scaled_values)
        return -(-values // self.values_per_byte) + scales * self.scale_bytes


_FP4 = HeadFormat(values_per_byte=2, scale_bytes=1, scaled_values=16)

HEAD_FORMATS: Mapping[str, HeadFormat] = {
    "fp4_e2m1": _FP4,
    "nvfp4": _FP4,
    "fp8_per_token_head": HeadFormat(1, 4, None),
    "int8_per_token_head": HeadFormat(1, 4, None),
}
"""Formats of K and V with scales of their own, by the names that SGLang 0.5.23 and vLLM 0.32 take."""

DTYPE_DEFAULT = "bfloat16"
"""Data type where a configuration names none, as published ones of quantised models do."""


def value_bytes(dtype: str, field: str) -> int:
    """Return the bytes of a value of ``dtype``; a LayoutError that names ``field`` if it is none that is known."""
    found = DTYPE_BYTES.get(dtype.removeprefix("torch."))
    if found is None:
        close = did_you_mean(dtype, DTYPE_BYTES)
        raise LayoutError(f"{field} must be one of {', '.join(DTYPE_BYTES)}, found {dtype!r}{close}")
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings of the engine that a model's configuration does not contain."""

    page_size: int | None
    """Tokens per page; None for the architecture's usual."""
    dtype: str | None
    """Data type of K and V, maybe one of ``HEAD_FORMATS``; None for the model's own."""
    model_dtype: str = DTYPE_DEFAULT
    """Data type that the model computes in, of its convolution states, and of K and V unless ``dtype`` is set."""

    def page(self, usual: int) -> int:
        """Return the page size, ``usual`` where none is chosen."""
        if self.page_size is None:
            return usual
        if type(self.page_size) is not int or not 0 < self.page_size <= COUNT_MAX:
            raise LayoutError(f"page_size must be a positive integer of at most {COUNT_MAX}, found {self.page_size!r}")
        return self.page_size

    @property
    def kv_value_bytes(self) -> int:
        """Bytes of one value of K or V, without scales."""
        return self.model_value_bytes if self.dtype is None else value_bytes(self.dtype, "dtype")

    def head_bytes(self, values: int) -> int:
        """Return the bytes of K or V of one token in one head of so many values, scales included."""
        if self.dtype is not None and self.dtype in HEAD_FORMATS:
            return HEAD_FORMATS[self.dtype].row_bytes(values)
        return values * self.kv_value_bytes

    @property
    def model_value_bytes(self) -> int:
        """Bytes of one activation."""
        return value_bytes(self.model_dtype, "the config's dtype")


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that each layer keeps. Layers of one kind may differ."""

    layers: Sequence[Mapping[str, int]]
    """Bytes of each layer by pool, in the order of the model: of ``kv``, ``indexer`` and ``swa`` per token, of
    ``mamba`` per checkpoint; none for a layer without state."""
    replicated: bool = False
    """Whether every tensor-parallel rank keeps all rows of attention, as of MLA; recurrent state is always sharded."""

    def sized(self, architecture: str, page_size: int, window_tokens: int | None) -> "SizedLayout":
        """Return the layout; ``window_tokens`` is what sliding-window layers keep.

        A model without any full-attention layer gets a logical anchor: slots without bytes.
        """
        sums: Counter[str] = Counter()
        layers = Counter({"kv": 0})
        for layer in self.layers:
            sums.update(layer)
            layers.update(layer.keys())
        full = [PoolSpec("kv", sums["kv"] * page_size, self.replicated)]
        if "indexer" in sums:
            full.append(PoolSpec("indexer", sums["indexer"] * page_size, self.replicated))
        components: list[Component] = [Full(tuple(full))]
        if "swa" in sums:
            assert window_tokens is not None
            pool = PoolSpec("swa", sums["swa"] * page_size, self.replicated)
            components.append(SlidingWindow(window_tokens, page_size, (pool,)))
        if "mamba" in sums:
            components.append(RecurrentState((PoolSpec("mamba", sums["mamba"]),)))
        layout = ModelLayout(page_size, tuple(components))
        return SizedLayout(architecture, layout, layers, window_tokens if "swa" in sums else None)


@dataclass(frozen=True, slots=True)
class ComponentCost:
    """Bytes of one component for a run of tokens."""

    component: str
    dense_bytes: int
    """Every page kept."""
    trailing_bytes: int
    """Only the pages kept that a resume at the end needs; of Full, these are all."""


@dataclass(frozen=True, slots=True)
class SizedLayout:
    """A layout, and what its bytes are made of."""

    architecture: str
    """``model_type`` of the configuration."""
    layout: ModelLayout
    layers: Mapping[str, int]
    """Layers that keep state in a pool, by its name; 0 for a logical anchor."""
    window_tokens: int | None
    """Tokens that sliding-window layers keep; None where there are none."""
    notes: tuple[str, ...] = ()
    """What was assumed of an architecture that is not known, in sentences for people."""
    left_out: tuple[str, ...] = ()
    """Layers of the configuration that the layout has not, draft (MTP) layers, in sentences for people."""

    def costs(self, *, sealed: bool, tokens: int = COST_TOKENS) -> tuple[ComponentCost, ...]:
        """Return the cost of each component for ``tokens``, rounded up to whole pages.

        ``sealed`` counts the header beside every page that has bytes, as in host memory and storage; device pools
        have none.
        """
        pages = -(-tokens // self.layout.page_size)
        costs: list[ComponentCost] = []
        for component in self.layout.components:
            with_bytes = [pool.page_bytes for pool in component.pools if pool.page_bytes]
            page_bytes = sum(with_bytes) + (HEADER_BYTES * len(with_bytes) if sealed else 0)
            costs.append(ComponentCost(component.name, pages * page_bytes, min(pages, component.span) * page_bytes))
        return tuple(costs)
