"""Stock models resumed from a cluster of three nodes continue bit by bit, in this process and in a fresh one."""

from collections.abc import Iterator

import pytest

from tests.support.exactness import (
    FAMILIES,
    L3,
    SHARED_STORAGE_SCENARIOS,
    STORAGE_SCENARIOS,
    Scenario,
    from_storage,
    resumes_in_a_fresh_process,
)
from tests.support.mooncake import LocalCluster
from tests.support.mooncake_needed import needs_mooncake

pytestmark = needs_mooncake


@pytest.fixture(scope="module")
def l3() -> Iterator[L3]:
    with LocalCluster.running(nodes=3) as cluster:
        yield L3(cluster.url, is_shared=True)


def cases() -> Iterator[object]:
    """Yield every scenario, prompts with and without a last page that is whole; of every run is one for each family."""
    for scenario in (*STORAGE_SCENARIOS, *SHARED_STORAGE_SCENARIOS):
        for is_aligned in (False, True):
            marks = () if scenario is from_storage and not is_aligned else pytest.mark.long
            name = f"{scenario.__name__}-{'aligned' if is_aligned else 'unaligned'}"
            yield pytest.param(scenario, is_aligned, id=name, marks=marks)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("scenario", "is_aligned"), tuple(cases()))
def test_a_prefix_in_a_cluster_continues_bit_by_bit(scenario: Scenario, family: str, is_aligned: bool, l3: L3) -> None:
    scenario(family, l3, is_aligned=is_aligned)


@pytest.mark.long
def test_a_fresh_process_continues_bit_by_bit(l3: L3) -> None:
    resumes_in_a_fresh_process(l3)
