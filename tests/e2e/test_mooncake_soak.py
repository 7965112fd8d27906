"""The soak, short enough for a test: nodes die under two engines, and both go on having hits."""

import pytest

from tests.soak.mooncake import ENGINES, soak
from tests.support.mooncake_needed import needs_mooncake

pytestmark = [needs_mooncake, pytest.mark.long]

ROUNDS = 2
ROUND_S = 10.0


def test_engines_get_right_bytes_and_hits_in_every_round_in_which_a_node_dies() -> None:
    lines: list[str] = []
    outcome = soak(ROUNDS, ROUND_S, lines.append)
    assert outcome.complaints == []
    assert len(lines) == ROUNDS
    assert [len(accounts) for accounts in outcome.accounts] == [1 + ROUNDS] * ENGINES
