"""Errors of the core say where they happened, in plain Python and compiled."""

import traceback

import numpy as np
import pytest

from tests.sources import ROOT
from unified_cache.components import Full
from unified_cache.core.errors import InputError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import PoolSpec, Tier
from unified_cache.tree import RadixTree


def test_a_traceback_names_the_lines_of_the_core_that_it_went_through() -> None:
    tree = RadixTree((Full((PoolSpec("kv", 0),)),), 1)
    with pytest.raises(InputError) as refused:
        tree.insert(Prompt.of([1, 2, 3], 1), 2, [np.array([7], np.int32)], Tier.DEVICE)
    frames = [
        frame
        for frame in traceback.extract_tb(refused.value.__traceback__)
        if frame.filename.endswith("unified_cache/tree/match.py")
    ]
    assert [frame.name for frame in frames] == ["insert", "_check_input"]
    source = (ROOT / "unified_cache/tree/match.py").read_text(encoding="utf-8").splitlines()
    for frame in frames:
        assert frame.lineno is not None
        assert frame.line == source[frame.lineno - 1].strip()
    assert frames[0].line is not None
    assert "_check_input(" in frames[0].line
    assert frames[1].line is not None
    assert frames[1].line.startswith("raise InputError(")
