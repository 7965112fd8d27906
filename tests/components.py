"""Component sets for tests: the first needs every page, the others a window."""

from dataclasses import dataclass, replace

from unified_cache.pool import HitPolicy, PoolSpec
from unified_cache.window import SPAN_ALL


@dataclass(frozen=True)
class ToyComponent:
    """Any span, any pools: what the tree and the controller know of a component is no more than this."""

    name: str
    span: int
    pools: tuple[PoolSpec, ...]
    mapped: bool = False

    @property
    def hit_policy(self) -> HitPolicy:
        return HitPolicy.ALL_PAGES if self.span == SPAN_ALL else HitPolicy.TRAILING_PAGES

    def check_page_size(self, page_size: int) -> None:
        """Accept any."""

    def with_pools(self, pools: tuple[PoolSpec, ...]) -> "ToyComponent":
        return replace(self, pools=pools)


def toy_components(spans: tuple[int, ...], page_bytes: int = 64) -> tuple[ToyComponent, ...]:
    """Make one component per span; every one but the first has a sidecar pool, the second is mapped."""
    components: list[ToyComponent] = []
    for number, span in enumerate(spans):
        pools = [PoolSpec(f"toy{number}", page_bytes * (number + 1))]
        if number:
            pools.append(PoolSpec(f"toy{number}_sidecar", 24 + number))
        components.append(ToyComponent(f"toy{number}", span, tuple(pools), mapped=number == 1))
    return tuple(components)


SPAN_SETS = (
    (SPAN_ALL,),
    (SPAN_ALL, 1),
    (SPAN_ALL, 2),
    (SPAN_ALL, 3),
    (SPAN_ALL, 1, 1),
    (SPAN_ALL, 3, 1),
    (SPAN_ALL, 1, 3),
)
