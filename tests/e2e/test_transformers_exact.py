"""A prefix restored from any tier is indistinguishable from one that was never evicted, whatever a model keeps."""

from pathlib import Path

import pytest

from tests.support.budget import one_in_every_run
from tests.support.exactness import (
    FAMILIES,
    L3,
    MEMORY_SCENARIOS,
    SHARED_STORAGE_SCENARIOS,
    STORAGE_SCENARIOS,
    Scenario,
    resumes_in_a_fresh_process,
)

IS_ALIGNED = pytest.mark.parametrize(
    "is_aligned", [False, pytest.param(True, marks=pytest.mark.long)], ids=["unaligned", "aligned"]
)
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def scenarios(chosen: tuple[Scenario, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", chosen, ids=[each.__name__ for each in chosen])


@pytest.fixture(params=["memory", "file"])
def l3(request: pytest.FixtureRequest, tmp_path: Path) -> L3:
    kinds = {"memory": L3("memory:", is_shared=False), "file": L3(f"file:{tmp_path}", is_shared=True)}
    return kinds[request.param]


@FAMILY
@IS_ALIGNED
@scenarios(MEMORY_SCENARIOS)
def test_a_prefix_in_memory_continues_bit_by_bit(scenario: Scenario, family: str, is_aligned: bool) -> None:
    scenario(family, is_aligned=is_aligned)


@pytest.mark.parametrize("family", one_in_every_run(FAMILIES))
@IS_ALIGNED
@scenarios(STORAGE_SCENARIOS)
def test_a_prefix_in_storage_continues_bit_by_bit(scenario: Scenario, family: str, is_aligned: bool, l3: L3) -> None:
    scenario(family, l3, is_aligned=is_aligned)


@FAMILY
@scenarios(SHARED_STORAGE_SCENARIOS)
def test_a_prefix_outlives_the_engine_bit_by_bit(scenario: Scenario, family: str, tmp_path: Path) -> None:
    scenario(family, L3(f"file:{tmp_path}", is_shared=True), is_aligned=False)


def test_a_fresh_process_continues_bit_by_bit(tmp_path: Path) -> None:
    resumes_in_a_fresh_process(L3(f"file:{tmp_path}", is_shared=True))
