"""A store that has a model under another identity alone: an engine that finds nothing is warned once what differs."""

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engine_rows import IDENTITY, LAYOUT
from tests.support.operations import engine
from unified_cache.core.pool import Identity
from unified_cache.core.shards import Extent, HeadReplica, NamedShard, Shard, TokenRuns, are_cut_otherwise
from unified_cache.integrations.engine_store import EngineStore
from unified_cache.storage_backends.common.other_identities import OtherIdentities
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.url import open_storage

LAYERS = Extent.whole(32)


def rank(number: int, size: int, layers: Extent = LAYERS) -> str:
    return Shard.of_rank(number, size, 8, layers).text


def replica(number: int, size: int) -> str:
    return replace(Shard.of_rank(0, 1, 1, LAYERS), replica=HeadReplica(number, size)).rank_text


def turn(number: int, size: int) -> str:
    return Shard(Extent(0, 1, 1), LAYERS, TokenRuns(number, size)).text


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", False),
        (rank(0, 2), rank(0, 2), False),
        (rank(0, 2), rank(1, 2), False),
        (rank(0, 2, Extent(0, 20, 32)), rank(1, 2, Extent(20, 32, 32)), False),
        (replica(0, 2), replica(1, 2), False),
        (turn(0, 2), turn(1, 2), False),
        ("pp0of2.tp1of4", "pp1of2.tp0of4", False),
        (rank(0, 2), f"layers {LAYERS}", False),
        ("", rank(0, 2), True),
        (rank(0, 2), rank(0, 4), True),
        (rank(1, 2), rank(2, 4), True),
        (rank(0, 2, Extent(0, 16, 32)), rank(0, 2, Extent(0, 20, 32)), True),
        (replica(0, 2), replica(1, 4), True),
        (turn(0, 2), turn(1, 4), True),
        ("pp0of2.tp1of4", "pp0of2.tp1of2", True),
    ],
)
def test_names_of_shards_tell_whether_a_model_is_cut_otherwise(*, first: str, second: str, expected: bool) -> None:
    assert are_cut_otherwise(first, second) is expected
    assert are_cut_otherwise(second, first) is expected


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said of other identities since the last call."""
    said = [each.getMessage() for each in caplog.records if each.name.endswith("other_identities")]
    caplog.clear()
    return said


def test_a_cache_says_once_what_its_identity_has_otherwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def opened(identity: Identity) -> list[str]:
        toy = engine(open_storage(f"file:{tmp_path}"), identity=identity)
        assert toy.cache.close() == []
        return warnings(caplog)

    upgraded = Identity("toy", facts=(("attention backend", "new"),))
    with caplog.at_level(logging.WARNING):
        assert opened(Identity("toy", facts=(("attention backend", "old"),))) == []
        assert opened(Identity("another model")) == []
        (line,) = opened(upgraded)
        assert line.endswith(": attention backend (old there, new here)")
        assert opened(upgraded) == [], "its manifest is there by now"
        (line,) = opened(replace(upgraded, generation=1))
        assert line.endswith(": generation (0 there, 1 here)"), "the nearest one, not the oldest"


def test_ranks_say_of_another_number_of_ranks_and_not_of_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(number: int, size: int) -> list[str]:
        identity = replace(IDENTITY, shard=Shard.of_rank(number, size, 8, LAYERS))
        with closing(open_storage(f"file:{tmp_path}")) as store:
            others = OtherIdentities.of(store)
            for part in identity.parts(LAYOUT):
                manifest = manifest_of(part.identity, part.layout)
                store.register(manifest, {})
                others.warn(manifest)
        return warnings(caplog)

    with caplog.at_level(logging.WARNING):
        assert [opened(number, 2) for number in range(2)] == [[], []]
        assert [len(opened(number, 4)) for number in range(4)] == [1, 1, 1, 1]
        assert [opened(number, 4) for number in range(4)] == [[]] * 4


def test_an_engines_store_says_it_for_one_of_its_identities(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def opened(*identities: Identity) -> list[str]:
        store = EngineStore.open(f"file:{tmp_path}")
        for identity in identities:
            store.register(identity, LAYOUT)
        store.close()
        return warnings(caplog)

    groups = [replace(IDENTITY, shard=NamedShard(), facts=(("group", name),)) for name in ("full", "window")]
    with caplog.at_level(logging.WARNING):
        assert opened(*groups) == [], "the second is not warned of the first"
        (line,) = opened(*(replace(each, revision="2") for each in groups))
        assert line.endswith(": revision (none there, 2 here)")
