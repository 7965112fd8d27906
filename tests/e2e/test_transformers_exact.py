"""A prefix restored from any tier is indistinguishable from one that was never evicted, whatever a model keeps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.exactness import (
    FAMILIES,
    L3,
    MEMORY_SCENARIOS,
    SHARED_STORAGE_SCENARIOS,
    STEPS_MAX,
    STORAGE_SCENARIOS,
    Scenario,
    all_but_last,
    digest,
    engine,
    prompt_of,
    serve,
    untouched,
)

IS_ALIGNED = pytest.mark.parametrize("is_aligned", [True, False], ids=["aligned", "unaligned"])
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


@FAMILY
@IS_ALIGNED
@scenarios(STORAGE_SCENARIOS)
def test_a_prefix_in_storage_continues_bit_by_bit(scenario: Scenario, family: str, is_aligned: bool, l3: L3) -> None:
    scenario(family, l3, is_aligned=is_aligned)


@FAMILY
@scenarios(SHARED_STORAGE_SCENARIOS)
def test_a_prefix_outlives_the_engine_bit_by_bit(scenario: Scenario, family: str, tmp_path: Path) -> None:
    scenario(family, L3(f"file:{tmp_path}", is_shared=True), is_aligned=False)


def test_a_fresh_process_continues_bit_by_bit(tmp_path: Path) -> None:
    l3 = L3(f"file:{tmp_path}", is_shared=True)
    prompts = {family: prompt_of(family, 1, is_aligned=False) for family in FAMILIES}
    for family, tokens in prompts.items():
        with engine(family, l3) as ours:
            serve(ours, tokens)
    command = [sys.executable, "-m", "tests.support.exactness", l3.url]
    ended = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=240)
    expected = {
        family: {
            "logits_digest": digest(untouched(family, tokens, STEPS_MAX)),
            "storage_tokens": all_but_last(tokens, family),
        }
        for family, tokens in prompts.items()
    }
    assert json.loads(ended.stdout.splitlines()[-1]) == expected
