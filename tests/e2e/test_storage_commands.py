"""Commands over stores, and how they leave them; outputs and exit statuses are in ``tests/golden``."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster import ask
from tests.support.offline import (
    LAYOUTS,
    PAGE_SIZE,
    PAGES,
    STORE_KINDS,
    fill,
    objects_of,
    open_store,
    url_of,
)
from tests.support.store_calls import ScriptedStorage
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Identity
from unified_cache.core.seal import Label
from unified_cache.core.shards import NamedShard
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.offline import listing, upkeep
from unified_cache.storage_backends.offline.listing import ReadObject
from unified_cache.storage_backends.protocol import Answer, PageIO, Store

TOKENS = {number: np.random.default_rng(number).integers(0, 1000, PAGES * PAGE_SIZE).tolist() for number in (1, 2)}
TENANT = Namespace(tenant="acme")
PROMPTS = [Prompt.of(tokens, PAGE_SIZE, TENANT, whole=True) for tokens in TOKENS.values()]


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    return memory_path


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.jsonl"
    path.write_text("\n".join(map(json.dumps, TOKENS.values())), encoding="utf-8")
    return path


def test_prompts_of_bigrams_are_found_only_as_such(tmp_path: Path) -> None:
    layout = LAYOUTS["full"]
    source, target = url_of("file", tmp_path / "source"), url_of("file", tmp_path / "target")
    fill(open_store("file", tmp_path / "source"), layout, [Prompt.of(TOKENS[1], PAGE_SIZE, Namespace(bigrams=True))])
    one = tmp_path / "one"
    one.write_text(" ".join(map(str, TOKENS[1])), encoding="utf-8")
    for command in (("backup", source, target, "--prefix"), ("prefetch", source, "--into", target, "--tokens")):
        assert ask(*command, one).status == 1
        assert ask(*command, one, "--namespace", "bigrams=yes").status == 0


@pytest.mark.parametrize(
    "target", ["file:./store", "packed:link", "file:store/copy", "file:.", "file:store?free=0#compress=lossless"]
)
def test_a_store_is_not_copied_into_itself_nor_into_a_directory_within(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(open_store("file", Path("store")), LAYOUTS["full"], PROMPTS)
    Path("link").symlink_to("store")
    before = sorted(tmp_path.rglob("*"))
    for command in (("backup", "file:store", target), ("prefetch", "file:store", "--into", target, "--tokens", "none")):
        said = ask(*command)
        assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
        assert "must be two stores" in said.error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_packed_store_that_is_open_elsewhere_is_read_and_fails_what_would_change_it_in_one_line(
    tokens_file: Path, tmp_path: Path
) -> None:
    url, other = url_of("packed", tmp_path / "store"), url_of("file", tmp_path / "other")
    fill(open_store("packed", tmp_path / "store"), LAYOUTS["full"], PROMPTS)
    fill(open_store("file", tmp_path / "other"), LAYOUTS["full"], PROMPTS)
    storage = open_store("packed", tmp_path / "store")
    for command in (
        *(("storage", verb, url) for verb in ("scrub", "gc")),
        ("storage", "clear", url, "--all", "--yes"),
        ("backup", other, url),
        ("prefetch", other, "--into", url, "--tokens", tokens_file),
    ):
        said = ask(*command)
        assert (said.status, said.out, said.err.count("\n")) == (1, "", 1)
        assert str(tmp_path / "store") in said.err
    for command in (
        *(("storage", verb, url) for verb in ("stat", "verify")),
        ("backup", url, url_of("file", tmp_path / "copy")),
        ("prefetch", url, "--into", other, "--tokens", tokens_file, "--namespace", "tenant=acme"),
    ):
        assert ask(*command).status == 0
    storage.close()
    assert ask("storage", "scrub", url).status == 0


@pytest.mark.threat("escapes on a terminal")
def test_names_in_a_manifest_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    layout = LAYOUTS["full"]
    hostile = Identity("model\x1b[2J\x9b31m\u202eledom\nroot: all is well", "rev\x07", shard=NamedShard("sh\u2066ard"))
    odd = manifest_of(Identity("odd"), layout)
    odd.dtype = "dt\rype\nroot"
    for name, manifest in (("store", manifest_of(hostile, layout)), ("odd", odd)):
        storage = FileStorage.open(tmp_path / name)
        storage.register(manifest, {})
        storage.close()
        for verb in ("stat", "verify", "scrub", "gc"):
            said = ask("storage", verb, url_of("file", tmp_path / name))
            assert said.status == (name == "odd" and verb in {"verify", "scrub"})
            assert all(line.isprintable() for line in (said.out + said.err).split("\n"))
            assert "\nroot" not in said.out + said.err
    url = url_of("file", tmp_path / "store")
    assert r"model\x1b[2J\x9b31m\u202eledom\nroot: all is well" in ask("storage", "stat", url).out
    assert json.loads(ask("storage", "stat", url, "--json").out)["identities"][0]["model"] == hostile.model
    refused = ask("storage", "verify", url, "--identity", "ff\x1b[2J")
    assert (refused.status, refused.error.isprintable()) == (2, True)


@pytest.mark.parametrize("kind", ["file", "packed"])
def test_what_stands_in_the_place_of_a_directory_of_pages_is_named(kind: str, tmp_path: Path) -> None:
    fill(open_store(kind, tmp_path / "store"), LAYOUTS["full"], PROMPTS)
    foreign = tmp_path / "store" / ("ab" * 32)
    foreign.symlink_to(tmp_path)
    for verb in ("stat", "verify"):
        said = ask("storage", verb, url_of(kind, tmp_path / "store"))
        assert said.status == 1
        assert str(foreign) in said.err
    foreign.unlink()
    assert ask("storage", "verify", url_of(kind, tmp_path / "store")).status == 0


def test_a_directory_that_is_no_store_is_asked_for_what_cannot_be() -> None:
    for kind in ("file", "packed"):
        said = ask("storage", "stat", url_of(kind, Path("/proc")))
        assert (said.status, "store.json" in said.err) == (2, True)


def test_gc_of_a_store_that_does_not_shrink_is_a_failure(tmp_path: Path) -> None:
    fill(open_store("memory", tmp_path), LAYOUTS["full"], PROMPTS)
    assert ask("storage", "gc", url_of("memory", tmp_path), "--bytes-max", "1KiB").status == 1


@pytest.mark.parametrize("verb", ["verify", "scrub"])
def test_an_interrupted_command_that_reads_all_names_what_it_goes_on_with(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(open_store("file", tmp_path / "store"), LAYOUTS["full"], PROMPTS)
    url = url_of("file", tmp_path / "store")
    monkeypatch.setattr(listing, "BATCH_OBJECTS", 7)
    first = min((tmp_path / "store").glob("*/?/*"), key=lambda path: path.name)
    first.write_bytes(first.read_bytes()[::-1])
    read_verified, reads = listing.read_verified, iter((True, False))

    def read_once(storage: Store, pages: Sequence[PageIO]) -> list[ReadObject]:
        if not next(reads, True):
            raise KeyboardInterrupt
        return read_verified(storage, pages)

    monkeypatch.setattr(upkeep, "read_verified", read_once)
    said = ask("storage", verb, url)
    assert (said.status, first.name in said.out) == (130, True)
    assert "1 of them flawed" in said.err
    rest = ask("storage", verb, url, "--json", *said.err.split()[-2:])
    assert [each["sound"] for each in json.loads(rest.out)["identities"]] == [2 * PAGES - 7]
    assert ask("storage", verb, url, "--after", "a/b").status == 2


# ---- conformance ---------------------------------------------------------------------------------------------


RELEASED = threading.Event()


class ForgetfulStorage(MemoryStorage):
    """Forgets to remove, and never comes back from a scan of what it stored."""

    def remove(self, labels: Sequence[Label]) -> int:
        return len(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        if len(pages) > 2:
            RELEASED.wait()
        return super().get(pages)


def faulty(rest: str, bytes_max: int | None) -> ForgetfulStorage:
    return ForgetfulStorage(bytes_max)


@pytest.mark.parametrize("options", [(), ("--keys-only",)])
def test_of_a_backend_of_four_methods_what_it_does_not_list_is_not_tried_and_a_run_does_not_hinder_the_next(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    url = f"tests.contract.own_store:SqliteStore:{tmp_path / 'pages.db'}"
    assert ask("conformance", url, *options).status == 0
    said = ask("conformance", url, *options, "--json")
    verdicts = {promise["promise"]: promise["verdict"] for promise in json.loads(said.out)["promises"]}
    assert [promise for promise, verdict in verdicts.items() if verdict == "skip"] == [
        "a scan lists every object of one identity and of no other",
        "after close every method that a store has of its own raises closed error and close twice is close once",
        "clear makes every page of one identity a miss and no page of another",
    ]
    assert "FAIL" not in verdicts.values()


def test_a_backend_that_breaks_promises_is_told_which_and_one_that_hangs_is_left_behind() -> None:
    try:
        said = ask("conformance", "tests.e2e.test_storage_commands:faulty", "--timeout-s", "0.2", "--json")
    finally:
        RELEASED.set()
    assert said.status == 1
    found = {promise["promise"]: promise for promise in json.loads(said.out)["promises"]}
    removes = found["remove makes a page a miss and tolerates absent pages"]
    assert removes["verdict"] == "FAIL"
    assert "AssertionError" in removes["reason"]
    threads = found["methods may be called from several threads at a time"]
    assert threads["reason"] == "it did not return within 0.2 s"
    assert found["an empty batch is no work"]["verdict"] == "pass"


@pytest.mark.parametrize("bytes_max", [(), ("--bytes-max", "1KiB")])
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_conformance_leaves_a_store_that_holds_pages_alone_unless_told_otherwise(
    kind: str, bytes_max: tuple[str, ...], tmp_path: Path
) -> None:
    layout = LAYOUTS["full"]
    fill(open_store(kind, tmp_path / "store"), layout, PROMPTS)
    storage = open_store(kind, tmp_path / "store")
    before = objects_of(storage, layout)
    storage.close()
    url = url_of(kind, tmp_path / "store")
    assert ask("conformance", url, *bytes_max).status == 2
    storage = open_store(kind, tmp_path / "store")
    assert objects_of(storage, layout) == before
    storage.close()
    if not bytes_max and kind != "memory":  # that one stays open
        assert ask("conformance", url, "--not-empty").status == 0


def vast(rest: str, bytes_max: int | None) -> ScriptedStorage:
    """Open a store that says that it has room for more than memory has."""
    store = ScriptedStorage(MemoryStorage(bytes_max))
    store.claims["bytes_max"] = 1 << 60
    return store


def test_a_backend_of_more_room_than_can_be_filled_is_tried_without_that() -> None:
    said = ask("conformance", "tests.e2e.test_storage_commands:vast", "--json")
    assert said.status == 0, said.out
