"""Curves that an engine gives of how long it computes, and those that cannot be."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.config import CacheConfig
from unified_cache.errors import ConfigError
from unified_cache.transfer_policy import PrefillCurve, TransferPolicy


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ((), "found none"),
        (((100, 1.0), (200, 0.5)), "takes no less time"),
        (((200, 0.5), (100, 1.0)), "points that rise"),
        (((100, 1.0), (100, 1.0)), "points that rise"),
        (((100, -1.0),), "not negative"),
        (((100, math.nan),), "finite"),
        (((100, math.inf),), "finite"),
        (((0, 0.0),), "positive"),
        (((-5, 1.0),), "positive"),
        (((100,),), "found"),
        (((100, "1"),), "found"),
        (([100, 1.0],), "found list"),
        ("fast", "found 'fast'"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(points: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PrefillCurve(points)  # type: ignore[arg-type]  # what a caller may pass all the same


def test_between_points_it_is_straight_and_after_the_last_it_goes_on() -> None:
    curve = PrefillCurve(((100, 1.0), (200, 3.0)))
    assert curve.seconds([0, 50, 100, 150, 200, 300]) == [0.0, 0.5, 1.0, 2.0, 3.0, 5.0]


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 1_000)), min_size=1, max_size=6),
    st.lists(st.integers(0, 200_000), min_size=2, max_size=9),
)
def test_a_longer_prompt_never_takes_less(steps: list[tuple[int, float]], lengths: list[int]) -> None:
    points: list[tuple[int, float]] = []
    for tokens, more_s in steps:
        before, before_s = points[-1] if points else (0, 0.0)
        points.append((before + tokens, before_s + more_s))
    taken = PrefillCurve(tuple(points)).seconds(sorted(lengths))
    assert all(less <= more * (1 + 1e-9) + 1e-9 for less, more in pairwise(taken))
    assert min(taken) >= 0


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("transfer", "fastest", "expected transfer as a TransferPolicy"),
        ("transfer", None, "expected transfer as a TransferPolicy"),
        ("prefill", lambda length, start: 0.0, "expected prefill as a PrefillCurve or None"),
    ],
)
def test_a_setting_of_another_kind_is_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CacheConfig((10,), (10,), **{name: value})  # type: ignore[arg-type]  # what a caller may pass all the same


def test_a_cache_loads_all_that_it_can_unless_told_otherwise() -> None:
    assert CacheConfig((10,), (10,)).transfer is TransferPolicy.ALWAYS
