"""The commands over stores: what they print, their exit statuses, and what they leave behind."""

import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from tests.support.offline import (
    LAYOUTS,
    PAGE_SIZE,
    PAGES,
    STORE_KINDS,
    TOY,
    fill,
    flip,
    objects_of,
    open_store,
    restored_pages,
    url_of,
)
from tests.support.running_service import running
from tests.support.terminal import TerminalCommand
from unified_cache.cli.main import run
from unified_cache.cli.progress import objects_watched, watched
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Identity
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.core.shards import NamedShard
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO
from unified_cache.testing.storage_contract import listing, sealed_page

COMMAND = (sys.executable, "-c", "from unified_cache.cli.main import main; main()")
TIMEOUT_S = 120

TOKENS = {number: np.random.default_rng(number).integers(0, 1000, PAGES * PAGE_SIZE).tolist() for number in (1, 2)}
TENANT = Namespace(tenant="acme")
PROMPTS = [Prompt.of(tokens, PAGE_SIZE, TENANT, whole=True) for tokens in TOKENS.values()]

Output = tuple[int, str, str]
Ask = Callable[..., Output]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command here; return its status, its output, and its standard error without progress."""

    def ask(*arguments: str | Path) -> Output:
        status = run(list(map(str, arguments)))
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        assert len(lines) == (status != 0), captured.err
        return status, captured.out, "".join(lines)

    return ask


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    return memory_path


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.jsonl"
    path.write_text("\n".join(map(json.dumps, TOKENS.values())), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_stat_backup_prefetch_and_verify_on_every_component_set(
    name: str, kind: str, ask: Ask, tokens_file: Path, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    source, copied, warmed = (tmp_path / place for place in ("source", "copied", "warmed"))
    fill(open_store(kind, source), layout, PROMPTS)
    storage = open_store(kind, source)
    count = len(objects_of(storage, layout))
    storage.close()

    status, out, _ = ask("storage", "stat", url_of(kind, source), "--json")
    found = json.loads(out)
    (identity,) = found["identities"]
    assert (status, found["objects"], identity["model"], identity["page_size"]) == (0, count, "toy", PAGE_SIZE)
    assert [component["name"] for component in identity["components"]] == [each.name for each in layout.components]
    assert sum(pool["objects"] for pool in identity["pools"].values()) == count
    for copied_count in (count, 0):
        status, out, _ = ask("backup", url_of(kind, source), url_of(kind, copied), "--json")
        (moved,) = json.loads(out)["identities"]
        assert (status, moved["copied_objects"], moved["skipped_objects"]) == (0, copied_count, count - copied_count)

    into = ("--into", url_of(kind, warmed), "--tokens", tokens_file, "--tenant", "acme")
    status, out, _ = ask("prefetch", url_of(kind, copied), *into, "--json")
    assert status == 0
    prompts = json.loads(out)["prompts"]
    assert [prompt["restorable_tokens"] for prompt in prompts] == [PAGES * PAGE_SIZE] * len(PROMPTS)
    assert ask("storage", "verify", url_of(kind, warmed))[0] == 0
    for place in (copied, warmed):
        for prompt in PROMPTS:
            assert restored_pages(open_store(kind, place), layout, prompt) == PAGES


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_a_flipped_bit_fails_verify_and_backup_is_named_by_both_and_removed_by_scrub(
    kind: str, ask: Ask, tmp_path: Path
) -> None:
    layout = LAYOUTS["full_swa"]
    url, target = url_of(kind, tmp_path / "source"), url_of(kind, tmp_path / "target")
    fill(open_store(kind, tmp_path / "source"), layout, PROMPTS)
    storage = open_store(kind, tmp_path / "source")
    flawed = min(listing(storage, TOY.digest(layout)))
    flip(storage, flawed)
    storage.close()
    for command in (("storage", "verify", url), ("backup", url, target)):
        status, out, _ = ask(*command, "--json")
        found = [finding["object"] for finding in json.loads(out)["identities"][0]["findings"]]
        assert (status, found) == (1, [flawed.label.object_name])
    assert ask("storage", "scrub", url)[0] == 0
    assert ask("storage", "verify", url)[0] == 0
    assert ask("backup", url, target)[0] == 0


def test_backup_of_a_prefix_copies_the_chain_of_its_namespace_alone(
    ask: Ask, tokens_file: Path, tmp_path: Path
) -> None:
    layout = LAYOUTS["full_mamba"]
    source, target = url_of("file", tmp_path / "source"), url_of("file", tmp_path / "target")
    fill(open_store("file", tmp_path / "source"), layout, PROMPTS)
    one = tmp_path / "one"
    one.write_text(" ".join(map(str, TOKENS[1])), encoding="utf-8")
    assert ask("backup", source, target, "--prefix", one)[0] == 1
    assert ask("backup", source, target, "--prefix", one, "--tenant", "acme")[0] == 0
    assert restored_pages(open_store("file", tmp_path / "target"), layout, PROMPTS[0]) == PAGES
    assert restored_pages(open_store("file", tmp_path / "target"), layout, PROMPTS[1]) == 0


def test_prompts_of_bigrams_are_found_only_as_such(ask: Ask, tmp_path: Path) -> None:
    layout = LAYOUTS["full"]
    source, target = url_of("file", tmp_path / "source"), url_of("file", tmp_path / "target")
    fill(open_store("file", tmp_path / "source"), layout, [Prompt.of(TOKENS[1], PAGE_SIZE, Namespace(bigrams=True))])
    one = tmp_path / "one"
    one.write_text(" ".join(map(str, TOKENS[1])), encoding="utf-8")
    for command in (("backup", source, target, "--prefix"), ("prefetch", source, "--into", target, "--tokens")):
        assert ask(*command, one)[0] == 1
        assert ask(*command, one, "--bigrams")[0] == 0


@pytest.mark.parametrize("kind", ["file", "packed"])
def test_gc_collects_and_evicts_down_to_a_cap_and_clear_empties(kind: str, ask: Ask, tmp_path: Path) -> None:
    layout = LAYOUTS["full_swa"]
    url = url_of(kind, tmp_path / "store")
    fill(open_store(kind, tmp_path / "store"), layout, PROMPTS)
    storage = open_store(kind, tmp_path / "store")
    storage.remove([Label(TOY.digest(layout), PROMPTS[0].keys[-1], "toy1")])
    before = sum(map(len, objects_of(storage, layout).values()))
    storage.close()
    (collected,) = json.loads(ask("storage", "gc", url, "--json")[1])["identities"]
    assert (collected["misfit_objects"], collected["incomplete_objects"]) == (0, 1)
    assert json.loads(ask("storage", "gc", url, "--bytes-max", str(before // 2), "--json")[1])["evicted_objects"]
    storage = open_store(kind, tmp_path / "store")
    assert 0 < sum(map(len, objects_of(storage, layout).values())) <= before // 2
    storage.close()
    identity = TOY.digest(layout).hex()[:8]
    for refused in ((), ("--all", "--identity", identity), ("--all",), ("--identity", identity)):
        assert ask("storage", "clear", url, *refused)[0] == 2
    assert ask("storage", "clear", url, "--identity", identity, "--yes")[0] == 0
    assert json.loads(ask("storage", "stat", url, "--json")[1])["objects"] == 0


def test_pages_go_from_a_file_store_to_a_packed_one_and_on_to_a_file_store(
    ask: Ask, tokens_file: Path, tmp_path: Path
) -> None:
    layout = LAYOUTS["deepseek_v4"]
    fill(open_store("file", tmp_path / "first"), layout, PROMPTS)
    first, packed, last = f"file:{tmp_path / 'first'}", f"packed:{tmp_path / 'packed'}", f"file:{tmp_path / 'last'}"
    assert ask("backup", first, packed)[0] == 0
    assert ask("prefetch", packed, "--into", last, "--tokens", tokens_file, "--tenant", "acme")[0] == 0
    for prompt in PROMPTS:
        assert restored_pages(open_store("packed", tmp_path / "packed"), layout, prompt) == PAGES
        assert restored_pages(open_store("file", tmp_path / "last"), layout, prompt) == PAGES


def test_a_packed_store_that_is_open_elsewhere_is_read_and_fails_what_would_change_it_in_one_line(
    ask: Ask, tokens_file: Path, tmp_path: Path
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
        status, out, err = ask(*command)
        assert (status, out) == (1, "")
        assert str(tmp_path / "store") in err
    for command in (
        *(("storage", verb, url) for verb in ("stat", "verify")),
        ("backup", url, url_of("file", tmp_path / "copy")),
        ("prefetch", url, "--into", other, "--tokens", tokens_file, "--tenant", "acme"),
    ):
        assert ask(*command)[0] == 0
    storage.close()
    assert ask("storage", "scrub", url)[0] == 0


@pytest.mark.threat("escapes on a terminal")
def test_names_in_a_manifest_do_not_reach_the_terminal_as_commands(ask: Ask, tmp_path: Path) -> None:
    layout = LAYOUTS["full"]
    hostile = Identity(
        "model\x1b[2J\x9b31m\u202eledom\nroot: all is well", "rev\x07", "dt\rype", NamedShard("sh\u2066ard")
    )
    storage = FileStorage.open(tmp_path / "store")
    storage.register(manifest_of(hostile, layout), {})
    storage.close()
    url = url_of("file", tmp_path / "store")
    for verb in ("stat", "verify", "scrub", "gc"):
        status, out, _ = ask("storage", verb, url)
        assert status == 0
        assert all(line.isprintable() for line in out.splitlines())
        assert "\nroot" not in out
    _, out, _ = ask("storage", "stat", url)
    assert r"model\x1b[2J\x9b31m\u202eledom\nroot: all is well" in out
    _, out, _ = ask("storage", "stat", url, "--json")
    assert json.loads(out)["identities"][0]["model"] == hostile.model
    status, _, err = ask("storage", "verify", url, "--identity", "ff\x1b[2J")
    assert status == 2
    assert err.isprintable()


def test_gc_of_a_store_that_does_not_shrink_is_a_failure(ask: Ask, tmp_path: Path) -> None:
    fill(open_store("memory", tmp_path), LAYOUTS["full"], PROMPTS)
    assert ask("storage", "gc", url_of("memory", tmp_path), "--bytes-max", "1KiB")[0] == 1


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")], ids=["absent", "damaged"])
def test_an_identity_without_a_manifest_is_shown_fails_verify_scrub_and_backup_and_its_engine_mends_it(
    damage: Callable[[Path], object], ask: Ask, tmp_path: Path
) -> None:
    layout = LAYOUTS["full"]
    url, target = url_of("file", tmp_path / "store"), tmp_path / "target"
    fill(open_store("file", tmp_path / "store"), layout, PROMPTS)
    damage(tmp_path / "store" / TOY.digest(layout).hex() / "manifest.json")
    (shown,) = json.loads(ask("storage", "stat", url, "--json")[1])["identities"]
    assert shown["manifest"] != "sound"
    for command in (("storage", "verify", url), ("storage", "scrub", url), ("backup", url, url_of("file", target))):
        assert ask(*command)[0] == 1
    assert not target.exists()
    assert ask("storage", "gc", url)[0] == 0
    fill(open_store("file", tmp_path / "store"), layout, PROMPTS)
    assert ask("storage", "scrub", url)[0] == ask("storage", "verify", url)[0] == 0


def test_an_interrupted_backup_says_so_leaves_whole_objects_and_goes_on(ask: Ask, tmp_path: Path) -> None:
    layout = LAYOUTS["full"]
    storage = FileStorage.open(tmp_path / "source")
    storage.register(manifest_of(TOY, layout), {})
    (pool,) = layout.pools
    count = 2000
    pages = [
        sealed_page(Label(TOY.digest(layout), number.to_bytes(32), pool.name), HEADER_BYTES + pool.page_bytes)
        for number in range(count)
    ]
    assert all(storage.put(pages, Level.CACHED))
    storage.close()
    source, target = url_of("file", tmp_path / "source"), url_of("file", tmp_path / "target")
    run = TerminalCommand("backup", f"tests.support.held_store:held:get,4:{tmp_path / 'source'}", target)
    run.until("backup .*[1-9][0-9]* of 2,000")
    run.interrupt()
    status, said = run.ended()
    assert (status, said.startswith("interrupted: backup had ")) == (130, True), said
    status, out, _ = ask("storage", "verify", target, "--json")
    done = json.loads(out)["identities"][0]["sound"]
    assert status == 0
    assert 0 < done < count
    status, out, _ = ask("backup", source, target, "--json")
    (copied,) = json.loads(out)["identities"]
    assert (status, copied["skipped_objects"], copied["copied_objects"]) == (0, done, count - done)


# ---- conformance ---------------------------------------------------------------------------------------------


def verdicts(out: str) -> dict[str, str]:
    return {promise["promise"]: promise["verdict"] for promise in json.loads(out)["promises"]}


KINDS = {"memory:": (), "file:{}": (), "packed:{}": (), "keys_only:": ("--keys-only",)}
"""Our stores that need nothing but this machine, each with its options."""
CAPS = ((), ("--bytes-max", "1048576"))


@pytest.mark.parametrize("bytes_max", CAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_our_backends_keep_every_promise(kind: str, bytes_max: tuple[str, ...], ask: Ask, tmp_path: Path) -> None:
    url, keys_only = kind.format(tmp_path / "store"), KINDS[kind]
    status, out, _ = ask("conformance", url, *bytes_max, *keys_only, "--json")
    assert status == 0, out
    found = verdicts(out)
    assert found
    assert set(found.values()) <= {"pass", "skip"}


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


def test_a_backend_that_breaks_promises_is_told_which_and_one_that_hangs_is_left_behind(ask: Ask) -> None:
    try:
        status, out, _ = ask("conformance", "tests.e2e.test_storage_commands:faulty", "--timeout-s", "0.2", "--json")
    finally:
        RELEASED.set()
    assert status == 1
    found = {promise["promise"]: promise for promise in json.loads(out)["promises"]}
    removes = found["remove makes a page a miss and tolerates absent pages"]
    assert removes["verdict"] == "FAIL"
    assert "AssertionError" in removes["reason"]
    threads = found["methods may be called from several threads at a time"]
    assert threads["reason"] == "it did not return within 0.2 s"
    assert found["an empty batch is no work"]["verdict"] == "pass"


@pytest.mark.parametrize("bytes_max", [(), ("--bytes-max", "1KiB")])
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_conformance_leaves_a_store_that_holds_pages_alone_unless_told_otherwise(
    kind: str, bytes_max: tuple[str, ...], ask: Ask, tmp_path: Path
) -> None:
    layout = LAYOUTS["full"]
    fill(open_store(kind, tmp_path / "store"), layout, PROMPTS)
    storage = open_store(kind, tmp_path / "store")
    before = objects_of(storage, layout)
    storage.close()
    url = url_of(kind, tmp_path / "store")
    assert ask("conformance", url, *bytes_max)[0] == 2
    storage = open_store(kind, tmp_path / "store")
    assert objects_of(storage, layout) == before
    storage.close()
    if not bytes_max and kind != "memory":  # that one stays open
        assert ask("conformance", url, "--not-empty")[0] == 0


def test_a_service_keeps_every_promise(ask: Ask, tmp_path: Path) -> None:
    with running(storage=f"file:{tmp_path}") as server:
        status, out, _ = ask("conformance", f"grpc://{server.address}", "--json")
    assert status == 0, out
    assert set(verdicts(out).values()) <= {"pass", "skip"}


class VastStorage(MemoryStorage):
    """Says that it has room for more than memory has."""

    def capability(self) -> Capability:
        return replaced(super().capability(), bytes_max=1 << 60)


def vast(rest: str, bytes_max: int | None) -> VastStorage:
    return VastStorage(bytes_max)


def test_a_backend_of_more_room_than_can_be_filled_is_tried_without_that(ask: Ask) -> None:
    status, out, _ = ask("conformance", "tests.e2e.test_storage_commands:vast", "--json")
    assert status == 0, out


# ---- progress ------------------------------------------------------------------------------------------------


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere() -> None:
    terminal, file = Terminal(), StringIO()
    for stream in (terminal, file):
        with objects_watched(stream, "backup", 1000) as watch:
            for _ in range(100):
                watch(10, 10 << 20)
        with watched(stream, "replay", 10, "requests") as on_progress:
            for served in range(1, 11):
                on_progress(served, "hit ratio 50.00%")
        with objects_watched(stream, "backup", 0) as watch:
            watch(1, 1)
    assert "backup" in terminal.getvalue()
    assert "1,000 of 1,000" in terminal.getvalue()
    assert file.getvalue() == ""
