"""Sizes to try: what each tier is given at least and at most, and the combinations of them that make sense."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from unified_cache.components.layouts import SizedLayout
from unified_cache.core.config import Retention
from unified_cache.core.errors import ConfigError
from unified_cache.core.sizes import parse_bytes
from unified_cache.sizing.replay.plan import ReplayPlan

TIERS = ("device", "host", "storage")

COMBINATIONS_MAX = 100_000
"""Combinations of one sweep: a thousand are evaluated in some seconds, and more are not readable."""

STEPS = {"device": 4, "host": 11, "storage": 10}
"""Sizes of each tier where a sweep does not say how many."""

DEFAULT_SWEEPS = ("device=16GiB..64GiB", "host=0..2TiB", "storage=0..20TiB")

HALVINGS = 9
"""A range that begins with 0 goes on with its end halved so often at most."""

_SWEEP = re.compile(r"(device|host|storage)=([^:]+?)(?::([0-9]{1,4}))?")


@dataclass(frozen=True, slots=True, order=True)
class TierBytes:
    """True bytes of each tier, of each engine but for storage; 0 for no host memory, and for no storage."""

    device: int
    host: int
    storage: int

    def by_tier(self) -> dict[str, int]:
        """Return the sizes under the tiers' names, fastest first."""
        return asdict(self)

    def as_json(self) -> dict[str, object]:
        """Return the sizes under stable names."""
        return {f"{tier}_bytes": size for tier, size in self.by_tier().items()}


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model whose tiers are to be sized, and what of a prompt it keeps."""

    name: str
    sized: SizedLayout
    retention: Retention
    devices: int = 1
    """Ranks of one engine, which hold a prompt's pages together, or each all of them."""
    engines: int = 1
    """Engines that take the requests in turn, each with devices and host memory of its own, over one store."""
    storage_ratio: float = 1.0
    """Bytes that storage keeps for each byte of a page."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"devices must be at least 1, found {self.devices}")

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds all of a page, as with latent attention; else each holds its heads."""
        return all(pool.replicated for pool in self.sized.layout.components[0].pools)

    def stored_page_bytes(self, sizes: TierBytes) -> int:
        """Return the bytes of the pages that storage of this size holds, compressed or not."""
        return int(sizes.storage / self.storage_ratio)

    def plan(self, sizes: TierBytes) -> ReplayPlan:
        """Return the plan of a replay without bytes at these sizes, those of the device by rank."""
        plan = ReplayPlan.of_model(
            self.name,
            self.sized,
            self.retention,
            device_bytes=sizes.device * (1 if self.is_replicated else self.devices),
            host_bytes=sizes.host,
            storage="memory:" if sizes.storage else None,
            storage_bytes=self.stored_page_bytes(sizes) or None,
        )
        return replace(plan, with_bytes=False, engines=self.engines)

    def fitting(self, sweep: Sequence[TierBytes], named: Collection[str]) -> list[TierBytes]:
        """Return the combinations in which the model's prompts fit; ``named`` tiers have sizes that a user gave.

        Raises:
            ConfigError: a named size fits into no combination, or several engines have windows or states.
        """
        if self.engines > 1 and len(self.sized.layout.components) > 1:
            raise ConfigError(
                f"several engines are planned for full attention alone, found {self.engines}: "
                f"replay --engines runs others, one combination at a time"
            )
        found: list[TierBytes] = []
        refused: list[tuple[TierBytes, ConfigError]] = []
        for sizes in sweep:
            try:
                _ = self.plan(sizes)
                found.append(sizes)
            except ConfigError as error:
                refused.append((sizes, error))
        fitted = {tuple(sizes.by_tier()[tier] for tier in named) for sizes in found}
        for sizes, refusal in refused:
            if tuple(sizes.by_tier()[tier] for tier in named) not in fitted:
                raise refusal
        return found


def parse_sweeps(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of each tier, ascending, from ``TIER=FROM..TO[:STEPS]`` or ``TIER=SIZE,..``; others default."""
    sizes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        tier, steps = _parse_sweep(text)
        if tier in sizes:
            raise ConfigError(f"--sweep must name each tier once, found {tier} twice")
        sizes[tier] = steps
    defaults = dict(_parse_sweep(text) for text in DEFAULT_SWEEPS)
    return {tier: sizes.get(tier, defaults[tier]) for tier in STEPS}


def combinations(sizes: Mapping[str, Sequence[int]]) -> list[TierBytes]:
    """Return all combinations of the sizes; none has storage without host memory, through which it is reached."""
    found = [
        TierBytes(device, host, storage)
        for device, host, storage in product(*(sizes[tier] for tier in TIERS))
        if host or not storage
    ]
    if not 0 < len(found) <= COMBINATIONS_MAX:
        raise ConfigError(f"a sweep must have 1 to {COMBINATIONS_MAX} combinations, found {len(found)}")
    return found


def _parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    found = _SWEEP.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"--sweep must be TIER=FROM..TO, TIER=FROM..TO:STEPS or TIER=SIZE,SIZE with the tier device, host or "
            f"storage, found {text!r}"
        )
    tier, range_text, steps_text = found.groups()
    if ".." not in range_text:
        listed = {parse_bytes("--sweep", size) for size in range_text.split(",")}
        return tier, _checked(tier, sorted(listed))
    first, last = (parse_bytes("--sweep", size) for size in range_text.split("..", 1))
    steps = STEPS[tier] if steps_text is None else int(steps_text)
    if first >= last or steps < 2:
        raise ConfigError(f"--sweep must rise over at least 2 steps, found {text!r}")
    return tier, _checked(tier, _steps(first, last, steps))


def _steps(first: int, last: int, count: int) -> list[int]:
    """Return sizes of equal ratio from first to last; after 0, the last size halved again and again."""
    zero = [0] if first == 0 else []
    left = count - len(zero)
    low = first or last / 2 ** min(HALVINGS, left - 1)
    if left == 1:
        return [*zero, last]
    ratio = (last / low) ** (1 / (left - 1))
    return [*zero, *(round(low * ratio**step) for step in range(left - 1)), last]


def _checked(tier: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if tier == "device" and not sizes[0]:
        raise ConfigError("a sweep of the device must begin above 0: an engine computes there")
    return tuple(sizes)
