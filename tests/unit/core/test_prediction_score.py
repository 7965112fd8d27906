"""Score of predictions: good while requests come back as predicted, bad soon after they do not."""

import numpy as np
import pytest

from unified_cache.tree.reuse_predictor import Floats, PredictionScore

CLASSES, AGES = 6, 4
COMMON = np.full((1, AGES), 0.05)
HAZARDS = COMMON * np.array([0.2, 0.4, 0.6, 1.4, 1.6, 1.8])[:, None]
"""Hazards of classes that differ, and are the common one in the mean."""
CHECKS = 40


class CountedRequests:
    """Requests that are continued at given hazards, as a log counts them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.ended = np.zeros((CLASSES, AGES))
        self.spent = np.zeros((CLASSES, AGES))

    def go_on(self, hazards: Floats) -> tuple[Floats, Floats]:
        """Have requests spend some more time at every age; return the counts of all time."""
        spent = self.rng.integers(20, 60, (CLASSES, AGES)).astype(np.float64)
        self.ended = self.ended + self.rng.poisson(np.broadcast_to(hazards, spent.shape) * spent)
        self.spent = self.spent + spent
        return self.ended, self.spent


def bad_checks(record: PredictionScore, requests: CountedRequests, hazards: Floats) -> list[bool]:
    bad = []
    for _ in range(CHECKS):
        record.check(*requests.go_on(hazards))
        bad.append(record.is_bad)
    return bad


@pytest.mark.parametrize("seed", range(5))
def test_a_score_is_good_while_predictions_come_true_and_bad_soon_after(seed: int) -> None:
    record, requests = PredictionScore(), CountedRequests(seed)
    record.check(*requests.go_on(HAZARDS))
    record.predict(HAZARDS, COMMON)
    assert not any(bad_checks(record, requests, HAZARDS))
    assert all(bad_checks(record, requests, HAZARDS[::-1])[3:])
    assert not any(bad_checks(record, requests, HAZARDS)[4:])


@pytest.mark.parametrize("seed", range(5))
def test_differences_that_are_none_make_a_bad_record(seed: int) -> None:
    record, requests = PredictionScore(), CountedRequests(seed)
    record.predict(HAZARDS, COMMON)
    assert sum(bad_checks(record, requests, COMMON)) > 0.8 * CHECKS


def test_without_predictions_no_score_is_bad() -> None:
    record, requests = PredictionScore(), CountedRequests(1)
    assert not any(bad_checks(record, requests, HAZARDS))
    record.predict(np.broadcast_to(COMMON, HAZARDS.shape), COMMON)
    assert not any(bad_checks(record, requests, HAZARDS))


def test_requests_that_a_log_has_forgotten_are_not_missed() -> None:
    record, requests = PredictionScore(), CountedRequests(2)
    record.predict(HAZARDS, COMMON)
    assert not any(bad_checks(record, requests, HAZARDS))
    requests.ended, requests.spent = requests.ended // 2, requests.spent // 2
    assert not any(bad_checks(record, requests, HAZARDS))
