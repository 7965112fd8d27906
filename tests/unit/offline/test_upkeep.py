"""Verifying, scrubbing, collecting and clearing stores, and finding out what they hold."""

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.offline import (
    LAYOUTS,
    STORE_KINDS,
    TOY,
    ListedMemory,
    description_of,
    fill,
    flip,
    objects_of,
    open_store,
    prompt_of,
    replace,
    url_of,
)
from unified_cache.core.errors import ConfigError, StorageError, TokenError
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.shards import NamedShard
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.manifest import described_by, manifest_of
from unified_cache.storage_backends.offline import listing as listing_module
from unified_cache.storage_backends.offline import prompts as prompts_module
from unified_cache.storage_backends.offline.copying import copy_identity
from unified_cache.storage_backends.offline.listing import count_objects, listed, total_of, unwatched
from unified_cache.storage_backends.offline.prompts import read_prompts
from unified_cache.storage_backends.offline.stores import (
    StoredIdentity,
    Undescribed,
    choose,
    identities_of,
    open_existing,
    open_to_read,
)
from unified_cache.storage_backends.offline.upkeep import Garbage, Verification, clear, collect, shrink, verify
from unified_cache.storage_backends.protocol import NAMES_MAX, Answer, Level, Scan, Store, StoredObject
from unified_cache.testing.storage_contract import listing, sealed_page


def verified(storage: Store, kept: StoredIdentity, *, after: str = "", is_scrub: bool = False) -> Verification:
    result = Verification()
    verify(storage, kept, unwatched, result, after=after, is_scrub=is_scrub)
    return result


def filled(kind: str, path: Path, layout: ModelLayout) -> StoredIdentity:
    """Fill a store and say whose it is."""
    fill(open_store(kind, path), layout, [prompt_of(1), prompt_of(2)])
    return StoredIdentity(TOY.digest(layout), description_of(layout))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_verify_finds_every_flaw_and_changes_nothing_and_scrub_removes_what_it_found(
    name: str, kind: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    kept = filled(kind, tmp_path / "store", layout)
    storage = open_existing(url_of(kind, tmp_path / "store"))
    found = sorted(listing(storage, kept.digest))
    flip(storage, found[0])
    replace(storage, found[1].label, b"of another length")
    replace(storage, Label(kept.digest, found[2].label.key, "unheard_of"), b"in a pool of nobody's")
    before = sorted(listing(storage, kept.digest))
    result = verified(storage, kept)
    flawed = {found[0].label, found[1].label, Label(kept.digest, found[2].label.key, "unheard_of")}
    assert result.findings.named.keys() == flawed
    assert result.findings.counts == {Answer.FLAWED: 3}
    assert result.read.objects_count == len(before) == result.sound_count + 3
    assert sorted(listing(storage, kept.digest)) == before
    result = verified(storage, kept, is_scrub=True)
    assert (set(result.findings.named), result.removed_count) == (flawed, 3)
    assert {known.label for known in listing(storage, kept.digest)} == {known.label for known in before} - flawed
    assert verified(storage, kept).findings.total == 0
    storage.close()


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_verify_goes_on_after_the_object_where_it_stopped(kind: str, tmp_path: Path) -> None:
    kept = filled(kind, tmp_path / "store", LAYOUTS["full_swa"])
    storage = open_store(kind, tmp_path / "store")
    count = len(list(listing(storage, kept.digest)))
    result = Verification()

    def stop(objects_count: int, object_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(listing_module, "BATCH_OBJECTS", 5)
        with pytest.raises(KeyboardInterrupt):
            verify(storage, kept, stop, result)
    rest = verified(storage, kept, after=result.last_name)
    assert (result.sound_count, rest.sound_count) == (5, count - 5)
    storage.close()


def test_of_flawed_objects_the_first_are_named_and_all_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(listing_module, "FINDINGS_MAX", 3)
    kept = filled("memory", tmp_path, LAYOUTS["full"])
    storage = open_store("memory", tmp_path)
    found = sorted(listing(storage, kept.digest))
    for each in found:
        flip(storage, each)
    findings = verified(storage, kept).findings
    assert (list(findings.named), findings.total) == ([each.label for each in found[:3]], len(found))


def test_an_identity_without_a_manifest_is_verified_by_its_seals(tmp_path: Path) -> None:
    layout = LAYOUTS["full"]
    kept = filled("memory", tmp_path, layout)
    storage = open_store("memory", tmp_path)
    flip(storage, min(listing(storage, kept.digest)))
    result = verified(storage, StoredIdentity(kept.digest, Undescribed("lost")))
    assert result.findings.counts == {Answer.FLAWED: 1}
    assert result.sound_count == result.read.objects_count - 1


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_gc_removes_what_fits_no_pool_and_what_stands_on_nothing(name: str, kind: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    kept = filled(kind, tmp_path / "store", layout)
    storage = open_store(kind, tmp_path / "store")
    everything = {known.label for known in listing(storage, kept.digest)}
    assert collect(storage, kept.digest, layout) == Garbage()
    key, other = prompt_of(1).keys[-1], prompt_of(2).keys[-1]
    full = [pool.name for pool in layout.components[0].pools if pool.page_bytes]
    storage.remove([Label(kept.digest, key, full[-1])])
    last = layout.components[-1].pools
    storage.remove([Label(kept.digest, other, last[0].name)])
    replace(storage, Label(kept.digest, key, "unheard_of"), b"in a pool of nobody's")
    present = {known.label for known in listing(storage, kept.digest)}
    garbage = collect(storage, kept.digest, layout)
    lost = {Label(kept.digest, key, full[-1]), Label(kept.digest, other, last[0].name)}
    useless = {label for label in everything if label.key == key} | {
        Label(kept.digest, other, pool.name) for pool in last if pool.page_bytes
    }
    assert (garbage.misfits_count, garbage.incomplete_count) == (1, len(useless - lost))
    assert present - {known.label for known in listing(storage, kept.digest)} == useless - lost | {
        Label(kept.digest, key, "unheard_of")
    }
    assert {known.label for known in listing(storage, kept.digest)} == everything - useless - lost
    storage.close()


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_clear_removes_one_identity_and_leaves_the_other(kind: str, tmp_path: Path) -> None:
    for name in ("full", "full_swa"):
        filled(kind, tmp_path / "store", LAYOUTS[name])
    storage = open_store(kind, tmp_path / "store")
    gone, left = (TOY.digest(LAYOUTS[name]) for name in ("full", "full_swa"))
    count = len(list(listing(storage, left)))
    assert clear(storage, gone, unwatched) == 2 * 12
    assert count_objects(storage, gone).counts == {}
    assert len(list(listing(storage, left))) == count
    storage.close()


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_a_store_names_its_identities_and_what_their_pages_are(kind: str, tmp_path: Path) -> None:
    for layout in LAYOUTS.values():
        filled(kind, tmp_path / "store", layout)
    storage = open_store(kind, tmp_path / "store")
    found = identities_of(storage)
    assert [kept.digest for kept in found] == sorted(TOY.digest(layout) for layout in LAYOUTS.values())
    for kept in found:
        description = kept.described()
        assert description.identity.digest(description.layout) == kept.digest
    assert choose(storage, "url", found[2].digest.hex()[:20]) == found[2]
    for wanted in (None, "", "zz"):
        with pytest.raises(ConfigError, match="identity"):
            choose(storage, "url", wanted)
    storage.close()


def test_a_manifest_that_is_missing_broken_or_of_another_identity_is_named(tmp_path: Path) -> None:
    names = ("full", "full_swa", "full_mamba")
    for name in names:
        filled("file", tmp_path, LAYOUTS[name])
    full, swa, mamba = (tmp_path / TOY.digest(LAYOUTS[name]).hex() / "manifest.json" for name in names)
    full.unlink()
    swa.write_text("{", encoding="utf-8")
    mamba.write_text(mamba.read_text(encoding="utf-8").replace("toy1", "toy9"), encoding="utf-8")
    storage = open_to_read(f"file:{tmp_path}")
    reasons = {kept.digest: kept.description for kept in identities_of(storage)}
    assert all(isinstance(reason, Undescribed) for reason in reasons.values())
    with pytest.raises(StorageError, match="must have that digest"):
        StoredIdentity(TOY.digest(LAYOUTS["full_mamba"]), reasons[TOY.digest(LAYOUTS["full_mamba"])]).described()
    storage.close()


def test_opening_a_store_that_is_not_there_makes_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "letter").write_text("dear", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    for name in ("nothing", "empty", "letter"):
        for scheme in ("file", "packed"):
            for opened in (open_to_read, open_existing):
                with pytest.raises(ConfigError, match=f"must be a {scheme} store, found"):
                    opened(f"{scheme}:{tmp_path / name}")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_manifest_comes_back_as_it_was_given_and_one_of_another_format_is_refused() -> None:
    identity = Identity("model", "revision", "bf16", NamedShard("heads 0-7"))
    for layout in LAYOUTS.values():
        manifest = manifest_of(identity, layout)
        found = described_by(manifest)
        assert found.identity == identity
        assert found.layout.transfer_order == layout.transfer_order
        assert manifest_of(found.identity, found.layout) == manifest
        assert [component.hit_policy for component in found.layout.components] == [
            component.hit_policy for component in layout.components
        ]
        newer = Manifest()
        newer.CopyFrom(manifest)
        newer.format_version += 1
        with pytest.raises(StorageError, match="format version"):
            described_by(newer)
        newer.CopyFrom(manifest)
        newer.ClearField("components")
        with pytest.raises(StorageError, match="must describe a model and its layout"):
            described_by(newer)


class StuckScan(ListedMemory):
    """Its scan stays where it is."""

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        return Scan([], "here")


@pytest.mark.parametrize("use", [lambda store, owner: list(listed(store, owner)), Store.clear])
def test_a_scan_that_does_not_advance_is_a_fault(use: Callable[[Store, bytes], object]) -> None:
    with pytest.raises(StorageError, match="must advance"):
        use(StuckScan(), bytes(32))


class UnorderedScan(ListedMemory):
    """Lists the last names first."""

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        return Scan(super().scan(identity, cursor).objects[::-1], "")


def test_nothing_is_collected_from_a_store_that_does_not_list_in_the_order_of_names(tmp_path: Path) -> None:
    layout, storage = LAYOUTS["full_swa"], UnorderedScan()
    kept = filled("memory", tmp_path, layout)
    for label, content in objects_of(open_store("memory", tmp_path), layout).items():
        replace(storage, label, content)
    before = sorted(listing(storage, kept.digest))
    with pytest.raises(StorageError, match="in the order of names"):
        collect(storage, kept.digest, layout)
    assert sorted(listing(storage, kept.digest)) == before


class EndlessIdentity(ListedMemory):
    """Lists the sidecars of so many pages, of which it has none, and keeps nothing of what it is asked."""

    def __init__(self, layout: ModelLayout, pages_count: int) -> None:
        super().__init__()
        self._sidecar = layout.transfer_order[1][1]
        self._digest = TOY.digest(layout)
        self._pages_count = pages_count
        self.named_max = 0

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        start = int(cursor[:64], 16) if cursor else 0
        end = min(start + NAMES_MAX, self._pages_count)
        labels = [Label(identity, number.to_bytes(32), self._sidecar.name) for number in range(start + 1, end + 1)]
        objects = [StoredObject(each, HEADER_BYTES + self._sidecar.page_bytes) for each in labels]
        return Scan(objects, labels[-1].page_name if end < self._pages_count else "")

    def remove(self, labels: Sequence[Label]) -> int:
        self.named_max = max(self.named_max, len(labels))
        return len(labels)


@pytest.mark.parametrize("work", ["verify", "collect", "copy", "shrink"])
def test_pages_in_hand_do_not_grow_with_a_store(work: str) -> None:
    layout = LAYOUTS["full_swa"]
    kept = StoredIdentity(TOY.digest(layout), description_of(layout))
    peaks: list[int] = []
    for pages_count in (3 * NAMES_MAX, 24 * NAMES_MAX):
        storage = EndlessIdentity(layout, pages_count)
        tracemalloc.start()
        match work:
            case "verify":
                assert verified(storage, kept).gone_count == pages_count
            case "collect":
                assert collect(storage, kept.digest, layout).incomplete_count == pages_count
            case "copy":
                assert copy_identity(storage, ListedMemory(), kept.described(), unwatched).gone_count == pages_count
            case _:
                shrink(storage, [kept], 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert storage.named_max <= NAMES_MAX
    assert peaks[1] < 1.25 * peaks[0]


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("1 2 3\n4 5", [[1, 2, 3, 4, 5]]),
        ("[1, 2,\n 3]", [[1, 2, 3]]),
        ("[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
        ("[1, 2]\n\n[3, 4]\n", [[1, 2], [3, 4]]),
    ],
)
def test_prompts_are_read_from_json_json_lines_and_plain_ids(
    text: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text, encoding="utf-8")
    namespace = Namespace(tenant="acme")
    found = read_prompts(path, 2, namespace)
    assert [prompt.keys for prompt in found] == [Prompt.of(tokens, 2, namespace).keys for tokens in prompts]


@pytest.mark.parametrize(
    "text", ["", "[]", "words", "[1, 2.5]", "[true]", '["1"]', "[[1], 2]", '{"ids": [1]}', "[1", "-1 2", "[" * 100_000]
)
def test_what_is_no_prompt_is_refused_with_the_name_of_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TokenError, match="tokens"):
        read_prompts(path, 2, Namespace())


def test_prompts_without_end_are_read_up_to_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "PROMPTS_BYTES_MAX", 1 << 10)
    with pytest.raises(ConfigError, match="at most 1024 bytes"):
        read_prompts(Path("/dev/zero"), 2, Namespace())


def test_a_store_that_tells_no_use_shrinks_by_whole_pages_and_by_superseded_generations_first() -> None:
    layout, storage = LAYOUTS["full_swa"], ListedMemory()
    sizes = {pool.name: HEADER_BYTES + pool.page_bytes for pool in layout.pools if pool.page_bytes}
    prompt = prompt_of(1)
    old, new = (replaced(TOY, generation=number) for number in (1, 2))
    for identity in (new, old):
        storage.register(manifest_of(identity, layout), {})
        digest = identity.digest(layout)
        pages = [sealed_page(Label(digest, key, name), size) for key in prompt.keys for name, size in sizes.items()]
        assert all(storage.put(pages, Level.CACHED))
    found = identities_of(storage)
    page_bytes, pages_count = sum(sizes.values()), prompt.pages_count
    shrink(storage, found, 2 * pages_count * page_bytes)
    assert total_of(count_objects(storage, kept.digest) for kept in found).object_bytes == 2 * pages_count * page_bytes
    for left_pages in (pages_count + 3, pages_count, pages_count - 2, 0):
        shrink(storage, found, (left_pages + 1) * page_bytes - 1)
        left = {kept: list(listing(storage, kept.digest(layout))) for kept in (old, new)}
        assert len(left[new]) == min(left_pages, pages_count) * len(sizes)
        assert len(left[old]) == max(left_pages - pages_count, 0) * len(sizes)
        assert {len(list(group)) for _, group in groupby(each.label.key for each in left[new])} <= {len(sizes)}
