"""A prefix that comes back through a service is the prefix that went there, bit by bit, for models of every family."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.budget import one_in_every_run
from tests.support.cluster import ServeProcess
from tests.support.exactness import FAMILIES, L3, SHARED_STORAGE_SCENARIOS, STORAGE_SCENARIOS


@pytest.fixture
def l3(tmp_path: Path) -> Iterator[L3]:
    """A server process over an empty directory."""
    with ServeProcess(variables={"STORAGE": f"file:{tmp_path / 'store'}"}) as server:
        yield L3(f"grpc://{server.address}", is_shared=True)


@pytest.mark.parametrize("family", one_in_every_run(FAMILIES))
def test_a_prefix_behind_a_service_continues_bit_by_bit(family: str, l3: L3) -> None:
    for scenario in STORAGE_SCENARIOS + SHARED_STORAGE_SCENARIOS:
        scenario(family, l3, is_aligned=False)
