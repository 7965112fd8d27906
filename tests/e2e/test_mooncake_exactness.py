"""Stock models resumed from a cluster of three nodes continue bit by bit, in this process and in a fresh one."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.sources import ROOT
from tests.support.exactness import (
    FAMILIES,
    L3,
    SHARED_STORAGE_SCENARIOS,
    STEPS_MAX,
    STORAGE_SCENARIOS,
    Scenario,
    all_but_last,
    digest,
    engine,
    from_storage,
    prompt_of,
    serve,
    untouched,
)
from tests.support.mooncake import small_cluster
from tests.support.mooncake_needed import needs_mooncake

pytestmark = needs_mooncake

PROCESS_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def l3() -> Iterator[L3]:
    with small_cluster(nodes=3) as cluster:
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


def test_a_fresh_process_continues_bit_by_bit(l3: L3) -> None:
    prompts = {family: prompt_of(family, 1, is_aligned=False) for family in FAMILIES}
    for family, tokens in prompts.items():
        with engine(family, l3) as ours:
            serve(ours, tokens)
    command = [sys.executable, "-m", "tests.support.exactness", l3.url]
    ended = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S)
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        family: {
            "logits_digest": digest(untouched(family, tokens, STEPS_MAX)),
            "storage_tokens": all_but_last(tokens, family),
        }
        for family, tokens in prompts.items()
    }
