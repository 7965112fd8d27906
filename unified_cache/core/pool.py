"""State that a model keeps per page, as values: pools, components, layout, tiers, identity, copies of pages.

Values only; no torch. The tree, the controller and the backends are written against tuples of components and
never against a component by name.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from numbers import Integral
from operator import index

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import (
    ConfigError,
    InputError,
    LayoutError,
    check_each,
    check_kind,
    check_text,
    did_you_mean,
)
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.shards import WHOLE_MODEL, NamedShard, Shard
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN, needed_pages

__all__ = ["Component", "Hits", "Identity", "ModelLayout", "PoolSpec", "Slots", "Tier", "facts_of"]

Slots = npt.NDArray[np.int32]
"""Page slots of one pool on one tier, shape (pages,); -1 for a tombstone, a page that the component lacks."""

Pages = npt.NDArray[np.bool_]
"""Mask over the pages of a range, shape (pages,)."""

PageNumbers = npt.NDArray[np.int64]
"""Numbers of pages in a prompt, from 0, shape (pages,)."""


# Of few pages these three take a fifth of the time of ``np.full``, ``np.ones`` and ``np.flatnonzero``.
def no_slots(count: int) -> Slots:
    """Return an array for so many pages, none of which has a slot."""
    slots = np.empty(count, np.int32)
    slots.fill(-1)
    return slots


def all_pages(count: int) -> Pages:
    """Return a mask of so many pages that is True for each."""
    pages = np.empty(count, np.bool_)
    pages.fill(True)
    return pages


def numbers_of(pages: Pages) -> PageNumbers:
    """Return the numbers of the pages for which a mask is True, ascending."""
    return pages.nonzero()[0]


POOL_NAME_BYTES_MAX = 32
"""Longest pool name; it stands in the header of every sealed page."""

_POOL_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


class Tier(IntEnum):
    """Memory tiers that the tree keeps slots of."""

    DEVICE = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One kind of state kept per page: equal-sized slots on every tier. As SidecarPoolSpec in SGLang 0.5.23."""

    name: str
    page_bytes: int
    """Payload of one page in this pool. Zero for a logical pool: slots without bytes or objects."""
    replicated: bool = field(default=False, compare=False, repr=False)
    """True if all tensor-parallel ranks of a stage hold the same bytes, as with MLA: one of them stores them for all.
    Two pools that differ in this alone are equal."""
    tensors: str = field(default="", compare=False, repr=False)
    """Dtype and shape of a page in the engine's tensors, part of every digest; empty where the engine has none. A cache
    reads it off its pools: two pools that differ in this alone are equal."""
    unit: Shard | None = field(default=None, compare=False, repr=False)
    """Unit of heads that the pool holds, if they are fewer than the rank's; None otherwise. Ranks of any group that
    hold the same heads of the same layers share its objects. See ``of_units``."""

    def __post_init__(self) -> None:
        check_kind(self.name, str, "the name of a pool as text", LayoutError)
        check_kind(self.page_bytes, Integral, f"page_bytes of pool {self.name} as a whole number", LayoutError)
        check_kind(self.unit, Shard | None, f"the unit of heads of pool {self.name} as a Shard", LayoutError)
        if not _POOL_NAME.fullmatch(self.name) or len(self.name) > POOL_NAME_BYTES_MAX:
            raise LayoutError(f"a pool name is at most {POOL_NAME_BYTES_MAX} of a-z, 0-9 and _, found {self.name!r}")
        if self.page_bytes < 0:
            raise LayoutError(f"pool {self.name}: page_bytes must not be negative, found {self.page_bytes}")

    @classmethod
    def of_units(cls, name: str, shard: Shard, heads: int, page_bytes: int) -> tuple["PoolSpec", ...]:
        """Return a pool of ``page_bytes`` for each run of ``heads`` in ``shard``, in order: the KV of ``name`` by head.

        The engine keeps a tensor per layer for each of them. Groups of all sizes that cut alike share the objects.

        Raises:
            LayoutError: as ``Shard.units``, or a name that is none.
        """
        return tuple(cls(f"{name}_h{unit.heads.start}", page_bytes, unit=unit) for unit in shard.units(heads))


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of state that a model keeps, with its own validity rule, locks and eviction queues per tier.

    Everything that differs between kinds is in these fields. ``unified_cache.components`` makes the usual ones.
    """

    name: str
    """Name for people: tables, errors, metrics."""
    span: int
    """Pages before ``end`` that a resume at ``end`` needs; ``SPAN_ALL`` for all of them. ``SPAN_UNKNOWN`` where an
    engine does not say: such pages can be stored and had again, and only the engine knows what it needs of them."""
    pools: tuple[PoolSpec, ...]
    """The anchor pool, whose slots the component allocates, then the sidecars that follow its slots."""
    mapped: bool = False
    """True if engines reach its device slots through Full's, by a map (see ``slots.PageMap``)."""
    page_size: int | None = None
    """Tokens per page that the span was counted in; None where the span is right for pages of any size.

    A cache needs the layout's. In a layout of stored pages it may be another: pages of so many tokens, with page keys
    of their own."""

    def __post_init__(self) -> None:
        check_each(self.pools, PoolSpec, f"the pools of {self.name} as a tuple, such as (PoolSpec(...),)", LayoutError)
        if self.span != SPAN_UNKNOWN and not 1 <= self.span <= SPAN_ALL:
            raise LayoutError(f"the span of {self.name} must be in [1, {SPAN_ALL}], found {self.span}")
        check_kind(self.page_size, Integral | None, f"page_size of {self.name} as a whole number", LayoutError)
        if self.page_size is not None and self.page_size <= 0:
            raise LayoutError(f"page_size of {self.name} must be positive, found {self.page_size}")
        if not self.pools:
            raise LayoutError(f"component {self.name} needs at least one pool")

    @property
    def page_bytes(self) -> int:
        """Payload of one page in all its pools."""
        return sum(pool.page_bytes for pool in self.pools)

    @property
    def hit_policy(self) -> str | None:
        """The span in the words of PoolHitPolicy in SGLang 0.5.23; None where it is unknown."""
        if self.span == SPAN_UNKNOWN:
            return None
        return "all_pages" if self.span == SPAN_ALL else "trailing_pages"


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Page size and components of one model; the first component is the one every other depends on (Full).

    A layout of stored pages alone may have any components in any order; ``check_resumable`` says what a cache needs.
    """

    page_size: int
    """Tokens per page."""
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        check_kind(self.page_size, Integral, "page_size as a whole number of tokens", LayoutError)
        check_each(self.components, Component, "components as a tuple, such as (Full(...),)", LayoutError)
        if self.page_size <= 0:
            raise LayoutError(f"page_size must be positive, found {self.page_size}")
        if not self.components:
            raise LayoutError("a layout needs at least one component")
        first = self.components[0]
        mapped = [component.name for component in self.components if component.mapped]
        if len(mapped) > 1 or first.mapped:
            raise LayoutError(f"at most one component, and not the first, may be mapped, found {mapped}")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise LayoutError(f"pool names must differ, found {names}")
        sharded = [pool.name for pool in first.pools if not pool.replicated]
        if sharded and any(pool.replicated for pool in self.pools):
            raise LayoutError(f"where any pool is replicated, those of {first.name} must be, found {sharded} sharded")
        units = {pool.unit for pool in first.pools}
        stray = [pool.name for pool in self.pools if pool.unit is not None and pool.unit not in units]
        if stray:
            raise LayoutError(f"a pool's unit must be one of {first.name}'s pools' too, found {stray} of others")

    def check_resumable(self) -> None:
        """Raise LayoutError unless a cache can resume from it: all spans known, one size of pages, and Full first."""
        first = self.components[0]
        for component in self.components:
            if component.span == SPAN_UNKNOWN:
                raise LayoutError(f"{component.name} must say which pages a resume needs, found an unknown span")
            if component.page_size not in {None, self.page_size}:
                raise LayoutError(
                    f"{component.name}: a window counted in pages of {component.page_size} tokens, "
                    f"found {self.page_size}"
                )
        if first.span != SPAN_ALL:
            raise LayoutError(
                f"the first component must need all pages, as Full does, found {first.name}, which needs "
                f"the last {first.span}; put Full before it"
            )

    def check_page_sizes(self, names: Collection[str]) -> None:
        """Raise LayoutError if pages of these pools have another number of tokens: no page keys of it name them."""
        for component in self.components:
            for pool in component.pools:
                if pool.name in names and self.page_size_of(component) != self.page_size:
                    raise LayoutError(
                        f"pages of {pool.name} have {component.page_size} tokens, expected {self.page_size}: "
                        f"a prompt's page keys name pages of one size"
                    )

    def page_size_of(self, component: Component) -> int:
        """Return how many tokens a page of one of its components has."""
        return self.page_size if component.page_size is None else component.page_size

    @property
    def pools(self) -> tuple[PoolSpec, ...]:
        """Every pool: each component's anchor before its sidecars, Full's pools first."""
        return tuple(pool for component in self.components for pool in component.pools)

    def with_tensors(self, tensors: Mapping[str, str]) -> "ModelLayout":
        """Return the same layout with what the engine's tensors hold of a page, by pool; see ``PoolSpec.tensors``."""
        components: list[Component] = []
        for component in self.components:
            pools = tuple(replace(pool, tensors=tensors.get(pool.name, "")) for pool in component.pools)
            components.append(replace(component, pools=pools))
        return replace(self, components=tuple(components))

    def only(self, names: Collection[str]) -> "ModelLayout":
        """Return the same model with the pools of these names alone, one of the first component among them."""
        left = [(each, tuple(pool for pool in each.pools if pool.name in names)) for each in self.components]
        return ModelLayout(self.page_size, tuple(replace(component, pools=pools) for component, pools in left if pools))

    @property
    def mapped(self) -> int | None:
        """Index of the component whose device slots are reached through Full's; None if there is none."""
        return next((number for number, component in enumerate(self.components) if component.mapped), None)

    @property
    def transfer_order(self) -> tuple[tuple[int, PoolSpec], ...]:
        """Every (component, pool) in the order of every transfer, or of each page of one: KV before sidecars.

        First all of Full's pools, then the other components' anchors, then their sidecars.
        """
        first, *others = enumerate(self.components)
        anchors = [(number, component.pools[0]) for number, component in others]
        sidecars = [(number, pool) for number, component in others for pool in component.pools[1:]]
        return (*((first[0], pool) for pool in first[1].pools), *anchors, *sidecars)

    def pages_to_allocate(self, start: int, end: int, ends: Iterable[int]) -> list[Pages]:
        """Return by component a mask of the pages of [start, end) that a resume at one of ``ends`` needs; of Full, all.

        New arrays, the caller's own: an engine that computes a window densely may set its pages to True before it
        allocates.

        Raises:
            InputError: no range of pages, or no numbers of pages.
        """
        try:
            start, end, resumed = index(start), index(end), tuple(map(index, ends))
        except TypeError as error:
            raise InputError(f"expected whole numbers of pages, found [{start}, {end}) and {ends!r}") from error
        if not 0 <= start <= end:
            raise InputError(f"expected 0 <= start <= end, found [{start}, {end})")
        others = (needed_pages(resumed, other.span, start, end) for other in self.components[1:])
        return [all_pages(end - start), *others]

    def check_component(self, component: int) -> None:
        """Raise InputError for a number that no component has."""
        names = [each.name for each in self.components]
        if not isinstance(component, Integral) or component not in range(len(names)):
            raise InputError(
                f"a component is a number in [0, {len(names)}), for {', '.join(names)}, found {component!r}"
            )

    def check_masks(self, masks: Sequence[Pages]) -> None:
        """Raise InputError unless there is a mask for each component, all of one length, the first all True."""
        names = ", ".join([component.name for component in self.components])
        check_each(masks, np.ndarray, f"one array of bool for each of {names}")
        shapes = [mask.shape for mask in masks if mask.dtype == np.bool_ and mask.ndim == 1]
        are_alike = len(masks) == len(self.components) and shapes == [masks[0].shape] * len(masks)
        if not are_alike or np.count_nonzero(masks[0]) < len(masks[0]):
            raise InputError(
                f"expected one array for each of {names}, of bool and of one length, the first all True, "
                f"found {_shapes(masks)}"
            )

    def check_slots(self, slots: Sequence[Slots]) -> None:
        """Raise InputError unless there is a flat array of slots for each component."""
        check_each(slots, np.ndarray, "an array of slots for each component")
        if not all(given.dtype.kind == "i" and given.ndim == 1 for given in slots):
            raise InputError(f"expected slots as flat arrays of int32, found {_shapes(slots)}")
        if len(slots) != len(self.components):
            raise InputError(f"expected slots for {len(self.components)} components, found {len(slots)}")

    @property
    def page_bytes(self) -> int:
        """Payload of one page in all pools."""
        return sum(pool.page_bytes for pool in self.pools)

    def prompt_bytes(self, pages: Sequence[int], *, sealed: bool) -> int:
        """Return the bytes of ``pages[component]`` pages of each component, with their headers where ``sealed``."""
        total = 0
        for component, count in zip(self.components, pages, strict=True):
            headers = HEADER_BYTES * sum(pool.page_bytes > 0 for pool in component.pools) if sealed else 0
            total += count * (component.page_bytes + headers)
        return total


def _shapes(arrays: Sequence[Slots] | Sequence[Pages]) -> str:
    return ", ".join(f"{array.dtype} {array.shape}" for array in arrays)


def facts_of(reported: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return facts for an ``Identity`` from what an engine reports: sorted, text as it is, everything else as JSON.

    What is None is left out: it is not known, and a fact that is not known is none.

    Raises:
        InputError: a name that is no text, or a value that JSON has no form for.
    """
    facts: list[tuple[str, str]] = []
    for name, value in reported.items():
        check_text("name of a fact", name)
        if value is None:
            continue
        try:
            text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise InputError(f"the fact {name!r} must be text or a value that JSON has, found {value!r}") from error
        facts.append((name, text))
    return tuple(sorted(facts))


_DTYPES = (
    *("bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8"),
    *("float8_e4m3", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_OTHER_NAMES = {
    "bf16": "bfloat16",
    "float": "float32",
    "float8_e4m3fn": "float8_e4m3",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    "half": "float16",
}
"""Names that torch, vLLM and SGLang have beside these."""


def dtype_name(text: str) -> str:
    """Return the one name of a dtype that engines have several for; empty if it is none."""
    name = text.removeprefix("torch.").lower()
    name = _OTHER_NAMES.get(name, name)
    return name if name in _DTYPES else ""


def check_facts(facts: object) -> None:
    """Raise InputError unless facts are sorted pairs of text with names that differ."""
    expected = "facts of an identity as sorted pairs of text, as facts_of makes them"
    if not isinstance(facts, tuple):
        raise InputError(f"expected {expected}, found {facts!r}")
    names: list[str] = []
    for fact in facts:
        if not isinstance(fact, tuple) or len(fact) != 2:  # a name and a value
            raise InputError(f"expected {expected}, found {fact!r}")
        name, value = fact
        check_text("name of a fact", name)
        check_text(f"the fact {name!r}", value)
        names.append(name)
    if names != sorted(set(names)) or "" in names:
        raise InputError(f"expected {expected}, found the names {names}")


@dataclass(frozen=True, slots=True)
class OwnedPools:
    """Pools of a layout that are stored under one identity."""

    identity: "Identity"
    layout: ModelLayout
    """Layout that the identity's digest counts; it may have more pools."""
    names: tuple[str, ...]
    """Names of those pools."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Model, revision, dtype and shard that pages belong to. Pages of different identities never mix in a store."""

    model: str
    revision: str = ""
    dtype: str = ""
    """One of the dtypes of the pools' tensors, by any of its names; a cache refuses another."""
    shard: Shard | NamedShard = WHOLE_MODEL
    """Part of the model that a rank holds; of several ranks each names its own, see ``Shard.of_rank``."""
    generation: int = 0
    """Pages of another generation are never found: raise it where a store could not be cleared of all of them."""
    facts: tuple[tuple[str, str], ...] = ()
    """What else the bytes of a page depend on, by name, sorted: weights, quantization, attention backend. See
    ``facts_of``. Pages written under other facts are never found."""

    def __post_init__(self) -> None:
        for name, value in (("model", self.model), ("revision", self.revision), ("dtype", self.dtype)):
            check_text(f"{name} of an identity", value)
        if not self.model:
            raise InputError("an identity needs the name of a model, found none")
        if self.dtype:
            if not dtype_name(self.dtype):
                like = did_you_mean(self.dtype, (*_DTYPES, *_OTHER_NAMES))
                raise InputError(f"the dtype of an identity is one such as bfloat16, found {self.dtype!r}{like}")
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        check_kind(self.shard, Shard | NamedShard, "the shard of an identity as a Shard, such as Shard.of_rank makes")
        check_text("name of a shard", self.shard.text)
        check_kind(self.generation, Integral, "the generation of an identity as a whole number")
        if self.generation < 0:
            raise InputError(f"a generation is 0 or more, found {self.generation}")
        check_facts(self.facts)

    def differences(self, other: "Identity") -> list[str]:
        """Name what another identity has otherwise, with both values."""
        here, there = (
            {"model": each.model, "revision": each.revision, "dtype": each.dtype, "shard": each.shard.text}
            | {"generation": str(each.generation), **dict(each.facts)}
            for each in (self, other)
        )
        return [
            f"{name} ({there.get(name) or 'none'} there, {here.get(name) or 'none'} here)"
            for name in here | there
            if here.get(name) != there.get(name)
        ]

    def parts(self, layout: ModelLayout) -> tuple[OwnedPools, ...]:
        """Return the identities that the layout's pools are stored under, each with its pools.

        Replicated pools belong to the stage and go by its name; pools of units of heads belong to the owner of the
        unit, in groups of any size. The others, with the whole layout, go by the shard; but of state that is not cut by
        heads, as recurrent state is not, each rank has its own part, also where several ranks hold the same heads.

        Raises:
            LayoutError: the layout's pools cannot be those of the shard.
        """
        shard = self.shard
        shard.check_cut(layout.page_size, [pool.unit for pool in layout.pools if pool.unit is not None])
        owned: dict[tuple[str, bool], list[str]] = {}
        for number, component in enumerate(layout.components):
            is_attention = number == 0 or component.mapped
            for pool in component.pools:
                if pool.unit is not None:
                    owner, is_shared = pool.unit.text, True
                elif pool.replicated:
                    owner, is_shared = shard.stage, shard.stage != shard.text
                else:
                    owner, is_shared = shard.text if is_attention else shard.rank_text, False
                owned.setdefault((owner, is_shared), []).append(pool.name)
        return tuple(
            OwnedPools(
                replace(self, shard=NamedShard(owner)), layout.only(names) if is_shared else layout, tuple(names)
            )
            for (owner, is_shared), names in owned.items()
        )

    def owners(self, layout: ModelLayout) -> dict[str, bytes]:
        """Return by pool the digest of the identity that it is stored under, 32 bytes; see ``parts``."""
        owners: dict[str, bytes] = {}
        for part in self.parts(layout):
            owners.update(dict.fromkeys(part.names, part.identity.digest(part.layout)))
        return owners

    def digest(self, layout: ModelLayout) -> bytes:
        """Digest identity and layout together, 32 bytes; it names a store's directory and seals every page."""
        fields: list[str] = [self.model, self.revision, self.dtype, self.shard.text, str(layout.page_size)]
        for component in layout.components:
            own_pages = (
                "" if layout.page_size_of(component) == layout.page_size else f" of {component.page_size} tokens"
            )
            fields += [component.name, f"{component.span}{own_pages}"]
            fields += [
                f"{pool.name}={pool.page_bytes}{pool.tensors and f' {pool.tensors}'}" for pool in component.pools
            ]
        fields += [text for fact in self.facts for text in fact]
        text = b"".join(len(field.encode()).to_bytes(8, "little") + field.encode() for field in fields)
        domain = b"unified-cache-identity-v1"
        if self.generation:
            # Generation 0 has the digest of the time before there were any: stores of that time stay readable.
            domain = b"unified-cache-identity-generation-%d" % self.generation
        if self.facts:
            # Their number tells where components end; without any the digest is that of the time before facts.
            domain += b"-facts-%d" % len(self.facts)
        return hashlib.sha256(domain + text).digest()


@dataclass(frozen=True, slots=True)
class PageCopies:
    """Pages that one component moves in one transfer, ascending, with slots at both ends. As PoolTransfer in SGLang."""

    component: int
    pages: npt.NDArray[np.int64]
    """Absolute page numbers within the prompt, shape (pages,)."""
    source: Slots
    target: Slots

    def __len__(self) -> int:
        return len(self.pages)

    def where(self, mask: npt.NDArray[np.bool_]) -> "PageCopies":
        """Return the copies of the pages for which ``mask``, shape (pages,), is True."""
        if np.count_nonzero(mask) == len(mask):
            return self
        return PageCopies(self.component, self.pages[mask], self.source[mask], self.target[mask])


def identity_of(identity: Identity | str) -> Identity:
    """Return the identity; that of the model if it is a name; a ConfigError if it is neither."""
    expected = 'identity as an Identity, or the name of a model, such as "my-model"'
    check_kind(identity, Identity | str, expected, ConfigError)
    return Identity(identity) if isinstance(identity, str) else identity


@dataclass(frozen=True, slots=True)
class Hits:
    """Hits by tier, in pages where nothing else is said.

    Hits of a prompt count for the slowest tier needed to resume there; hits of a component for the tier that held them.
    """

    device: int = 0
    host: int = 0
    storage: int = 0

    @classmethod
    def of_ends(cls, device: int, host: int, storage: int) -> "Hits":
        """Return the hits of a prompt that the device alone can resume at ``device``, and so on with each tier more.

        They end at ``storage``, whatever the tiers before it have beyond that.
        """
        device, host = min(device, storage), min(host, storage)
        return cls(device, host - device, storage - host)

    @property
    def total(self) -> int:
        """What was handed back, from anywhere."""
        return self.device + self.host + self.storage

    def by_tier(self) -> dict[str, int]:
        """Return the counts under the tiers' names, fastest first."""
        return asdict(self)

    def __str__(self) -> str:
        """Name the counts by tier, fastest first, as in ``12 from device, 4 from storage``."""
        return ", ".join(f"{count} from {tier}" for tier, count in self.by_tier().items() if count) or "none"

    def __add__(self, other: "Hits") -> "Hits":
        return Hits(self.device + other.device, self.host + other.host, self.storage + other.storage)

    def tokens(self, page_size: int, tokens_max: int) -> "Hits":
        """Return the tokens of so many pages of a prompt, which has ``tokens_max``: its last block may be partial."""
        pages_ends = (self.device, self.device + self.host, self.total)
        return Hits.of_ends(*(min(pages * page_size, tokens_max) for pages in pages_ends))
