"""Names for the part of a page that a rank holds: the same heads, layers and tokens have the same name in any group.

    tensor parallelism    heads    a rank holds a run of the KV heads; where ranks outnumber heads, some hold replicas
    pipeline parallelism  layers   a stage holds a run of the layers
    context parallelism   tokens   a rank holds some of every page's tokens, in turn with the other ranks

Three names follow from a shard, so that no engine has to remember them. State that is cut by heads has ``text``; state
that all tensor-parallel ranks of a stage hold alike has ``stage``; state of which each rank has its own part, heads or
no heads, has ``rank_text``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from unified_cache.core.errors import LayoutError, check_kind

__all__ = ["Extent", "Shard"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Heads or layers [start, end) of ``total``."""

    start: int
    end: int
    total: int

    def __post_init__(self) -> None:
        for bound in (self.start, self.end, self.total):
            check_kind(bound, Integral, "whole numbers of heads or layers", LayoutError)
        if not 0 <= self.start < self.end <= self.total:
            raise LayoutError(f"expected a range of [0, {self.total}), found [{self.start}, {self.end})")

    @classmethod
    def whole(cls, total: int) -> "Extent":
        """Return all of ``total``."""
        return cls(0, total, total)

    def contains(self, other: "Extent") -> bool:
        """Return whether ``other`` is part of it."""
        return self.total == other.total and self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        return f"{self.start}-{self.end}/{self.total}"


@dataclass(frozen=True, slots=True)
class HeadReplica:
    """One of ``count`` ranks of a stage that hold the same heads."""

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise LayoutError(f"a replica must be in [0, {self.count}), found {self.number}")


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Tokens of every page that one of ``size`` context-parallel ranks holds: each ``size``-th run, in turn.

    Token ``t`` of a prompt is held by rank ``t // run_tokens % size``.
    """

    rank: int = 0
    size: int = 1
    run_tokens: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or self.run_tokens < 1:
            raise LayoutError(
                f"expected a rank in [0, {self.size}) and runs of at least a token, "
                f"found {self.rank} and {self.run_tokens}"
            )


EVERY_TOKEN = TokenRuns()
"""All tokens, without context parallelism."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of every page that one rank holds; neither its number nor the group's size.

    Two ranks that hold the same heads, layers and tokens hold the same KV, and name it alike.
    """

    heads: Extent
    """KV heads."""
    layers: Extent
    tokens: TokenRuns = EVERY_TOKEN
    replica: HeadReplica = HeadReplica()

    def __post_init__(self) -> None:
        check_kind(self.heads, Extent, "the heads of a shard as an Extent, such as Extent(0, 4, 8)", LayoutError)
        check_kind(self.layers, Extent, "the layers of a shard as an Extent, such as Extent(0, 16, 32)", LayoutError)
        check_kind(self.tokens, TokenRuns, "the tokens of a shard as TokenRuns", LayoutError)
        check_kind(self.replica, HeadReplica, "the replica of a shard as a HeadReplica", LayoutError)

    @classmethod
    def of_rank(cls, rank: int, size: int, heads_total: int, layers: Extent) -> "Shard":
        """Return what a tensor-parallel rank holds of some layers; where ranks outnumber heads, some hold replicas.

        Latent attention (MLA) has one head.

        Raises:
            LayoutError: no such rank, or heads and ranks do not divide each other.
        """
        if not 0 <= rank < size:
            raise LayoutError(f"a rank must be in [0, {size}), found {rank}")
        heads = _heads_per_rank(heads_total, size)
        start = rank * heads_total // size
        replicas = max(1, size // heads_total)
        return cls(Extent(start, start + heads, heads_total), layers, replica=HeadReplica(rank % replicas, replicas))

    def interleaved(self, size: int, run_tokens: int = 1) -> "Shard":
        """Return the shard where ``size`` neighbouring replicas share every page's tokens (decode context parallelism).

        Raises:
            LayoutError: there are not as many replicas, or not a multiple of as many.
        """
        if size < 1 or self.replica.count % size:
            raise LayoutError(
                f"{size} context-parallel ranks must divide the ranks that hold the same heads, "
                f"found {self.replica.count} of those"
            )
        replica = HeadReplica(self.replica.number // size, self.replica.count // size)
        tokens = TokenRuns(self.replica.number % size, size, run_tokens)
        return replace(self, tokens=tokens, replica=replica)

    @property
    def text(self) -> str:
        """Name of what is cut by heads."""
        return f"heads {self.heads}, {self.stage}"

    @property
    def stage(self) -> str:
        """Name of what all tensor-parallel ranks hold alike: layers and tokens."""
        tokens = self.tokens
        if tokens.size == 1:
            return f"layers {self.layers}"
        return f"layers {self.layers}, tokens {tokens.rank}/{tokens.size} by {tokens.run_tokens}"

    @property
    def rank_text(self) -> str:
        """Name of what this rank alone holds; no other rank of its group has the same."""
        if self.replica.count == 1:
            return self.text
        return f"heads {self.heads}, replica {self.replica.number}/{self.replica.count}, {self.stage}"

    def units(self, heads: int) -> tuple["Shard", ...]:
        """Cut the heads into runs of ``heads``, in order: one object each, where a page's bytes lie head by head.

        Raises:
            LayoutError: they do not begin and end at multiples of ``heads``.
        """
        if heads < 1 or self.heads.start % heads or self.heads.end % heads:
            raise LayoutError(f"{self.text} cannot be cut into runs of {heads} heads")
        starts = range(self.heads.start, self.heads.end, heads)
        return tuple(replace(self, heads=Extent(start, start + heads, self.heads.total)) for start in starts)

    def check_cut(self, page_size: int, units: Sequence["Shard"]) -> None:
        """Raise LayoutError for pages that cannot be cut in this way, and units of heads that are not part of it."""
        turn_tokens = self.tokens.size * self.tokens.run_tokens
        if page_size % turn_tokens:
            raise LayoutError(
                f"page_size must be a multiple of the {turn_tokens} tokens after which context-parallel ranks "
                f"take turns again, found {page_size}"
            )
        for unit in units:
            if unit.stage != self.stage or not self.heads.contains(unit.heads):
                raise LayoutError(f"a unit of heads must be part of the shard {self.text!r}, found {unit.text!r}")


@dataclass(frozen=True, slots=True)
class NamedShard:
    """Shard of which only the name is known, as from a store's manifest; the whole model if that is empty."""

    text: str = ""

    @property
    def stage(self) -> str:
        """Name of what all tensor-parallel ranks hold alike; a LayoutError but for the whole model."""
        if self.text:
            raise LayoutError(
                f"replicated pools need a Shard, which says its layers, found the mere name {self.text!r}"
            )
        return self.text

    @property
    def rank_text(self) -> str:
        """The same name."""
        return self.text

    def check_cut(self, page_size: int, units: Sequence[Shard]) -> None:
        """Raise LayoutError for units of heads: whether they are part of it is unknown."""
        if units:
            raise LayoutError(f"a unit of heads must be part of the identity's Shard, found {units[0].text!r} and none")


WHOLE_MODEL = NamedShard()
"""All heads, layers and tokens: what a rank without others holds."""


def _heads_per_rank(heads_total: int, size: int) -> int:
    if size < 1 or heads_total < 1 or (heads_total % size and size % heads_total):
        raise LayoutError(f"{heads_total} heads and {size} ranks must divide each other")
    return max(1, heads_total // size)


_EXTENT = re.compile(r"(\d+)-(\d+)/")
_RANK = re.compile(r"\d+(?=of\d|/\d)")


def are_cut_otherwise(first: str, second: str) -> bool:
    """Return whether two names of shards cannot be of ranks of one group: another number of ranks, or other bounds.

    Two ranks of one group hold the same heads and layers, or none in common.
    """
    if not (first and second):
        return first != second
    if re.sub(r"\d+", "", first) != re.sub(r"\d+", "", second):
        return False
    if _RANK.sub("", _EXTENT.sub("", first)) != _RANK.sub("", _EXTENT.sub("", second)):
        return True
    pairs = zip(_EXTENT.findall(first), _EXTENT.findall(second), strict=True)
    bounds = [tuple(map(int, here + there)) for here, there in pairs]
    return any((a, b) != (c, d) and a < d and c < b for a, b, c, d in bounds)
