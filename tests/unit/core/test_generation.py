"""The generation of an identity: a part of its digest, so that pages of another one are never found."""

from dataclasses import replace

import pytest

from unified_cache.core.errors import InputError
from unified_cache.storage_backends.manifest import described_by, manifest_of
from unified_cache.testing.storage_contract import LAYOUT, MODEL


def test_generation_0_has_the_digest_of_stores_that_knew_none() -> None:
    assert MODEL.digest(LAYOUT).hex() == "696b40624d9b23a425b56027d3e34b76b914b12d100c5ddc2df3ba8f731a3765"
    assert manifest_of(MODEL, LAYOUT) == manifest_of(replace(MODEL, generation=0), LAYOUT)


def test_each_generation_has_a_digest_of_its_own_and_its_manifest_says_which() -> None:
    generations = [replace(MODEL, generation=number) for number in (0, 1, 2, 10)]
    assert len({each.digest(LAYOUT) for each in generations}) == 4
    for each in generations:
        assert described_by(manifest_of(each, LAYOUT)).identity == each


def test_a_negative_generation_is_an_input_error() -> None:
    with pytest.raises(InputError, match="generation"):
        replace(MODEL, generation=-1)
