"""Things that were taken out are gone: nothing names them but the table of errors, migrating.md and the changelog."""

import importlib
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest

import unified_cache
from tests.sources import ROOT, repository_files
from tests.support.operations import engine
from unified_cache.cli.commands import DEFERRED
from unified_cache.cli.main import run
from unified_cache.core.errors import ConfigError
from unified_cache.core.gone import GONE, MOVED, Gone, GoneModules, setting_instead
from unified_cache.core.settings.loading import read_settings
from unified_cache.core.settings.names import SECTIONS, variable_name

WORDS = (
    # Links and shared memory between a service and clients on its machine.
    *("memfd", "local_sockets", "LinkSocket", "LinkedRequest", "LinkedReply", "LinkRequest", "links_max"),
    *("regions_max", "region_bytes_max", "region_idle_s"),
    *("SharedSlice", "SharedRange", "SharedParts", "LentSlice", "RegionOffer", "RegionSharing", "CallLinks"),
    *("ShareRequest", "UnshareRequest", "REASON_SHARE", "placed_messages"),
    # The router's side of KV events.
    *("PrefixIndex", "EventSubscriber", "EngineTraits", "EngineScore", "HashKind", "PublisherFollower"),
    *("RouterClient", "RouterServer", "router.proto", "EventFormatError"),
    # Names of the store of an engine's adapter.
    *("ExternalStore", "ExternalConfig", "ExternalCounts", "ExternalPage", "ExternalTier", "put_missing"),
    # The live page in a terminal.
    *("TopCommand", "top_app", "UNIFIED_CACHE_LIVE_TOKEN"),
    # Pages of a prompt spread over the nodes of a Mooncake cluster.
    *("place=spread", "place=together"),
    # Mooncake's own log in our logger.
    *("own_log", "direct_own_log", "unified-cache-mooncake-log"),
    # Our tree in place of SGLang's.
    *("UnifiedCacheTree", "UnifiedCacheHostTree", "EngineSlotTree", "TieredSlotTree", "radix_cache_backend"),
    *("radix-cache-backend", "tree_plugin", "sglang.srt.plugins"),
    # Reading a prompt from its end while an engine computes the start.
    *("LandedTail", "TailBatches", "TailUnderWay", "HeadStart", "MeetingPlace"),
    # Memory of a service in front of its store, and leases of pages in it.
    *("HostTier", "host_tier", "TieredStore", "KeptTier", "FoundTier", "charged_bytes", "host_evictions"),
    *("lease_s", "leases_count", "leased_count", "leased_bytes", "ReleaseRequest", "PrefetchReply"),
    *("unified_cache_service_host_evictions", "unified_cache_service_host_evictions_total"),
    # What adaptive eviction expects of pages.
    *("LaneOutlook", "ForecastFigures", "ForecastRun", "LaneGuide", "NextVictim", "VictimReason", "CellOutlook"),
    *("looks_ahead", "peek_victim", "ReadableQueues"),
    # Explanations of the latest short hits on the live page.
    *("ShortHit", "ShortHits", "ShortLookups", "short_hits", "LOOKED_AT_EVERY_S"),
    # Mooncake clusters and storage nodes run by us.
    *("ClusterChoices", "NodeChoices", "ClusterDirectory", "ClusterPlan", "NodeSettings", "StartReport", "run_node"),
    *("UNIFIED_CACHE_CLUSTER_DIR", "unified-cache-node.service", "storage_node", "master_program"),
    # Fits of what transfers and prefills take.
    *("PrefillCurve", "LoadingStats", "LegStats", "MovedBytes", "LeftAloneReason", "RecentTimes", "FittedSeconds"),
    # The shadow of lru, and hints that a session has ended.
    *("ShadowLru", "LruComparison", "compared_with_lru", "regret_pages", "session_ended"),
    # Policies for comparisons, and the time to live.
    *("EvictionPolicy.LFU", "EvictionPolicy.SLRU", "EvictionPolicy.FIFO", "ttl_s", "slru_protected_share"),
    "lfu_half_life_touches",
    # Prefixes and regret of a replay, and sizes told from others beside them.
    *("MissedPrefix", "regret_tokens", "gained_tokens", "stored_at_most", "open_ratio", "ToldByReplays", "next_64gib"),
    # The journal of a file store.
    *("SharedQuota", "NoQuota", "JournalLine", "StoreListing", "unrecorded_count"),
    # Layouts of models that nobody serves; rates that the live page's server counted beside its points.
    *("rnj1", "plamo3", "pangu_pro_moe_v2", "iquest_loop_coder", "nemotron_h_puzzle", "last_minute", "LiveHistory"),
    # a store is guarded by one class; its least recently used page goes, whatever needs it
    *("DeadlineStorage", "RetryStorage", "BreakerStorage", "StuckCall", "WrappedCatalog", "CatalogPassage"),
    *("ClusterHealth", "LinkedPage", "touch_before", "PageContents", "keys_only_storage"),
)
"""Words of what is gone, beside those of ``GONE``; in this order a comment says of what."""

MAY_NAME_THEM = frozenset(
    {"unified_cache/core/gone.py", "docs/migrating.md", "CHANGELOG.md", "tests/unit/repository/test_gone.py"}
)
BINARY = (".gz", ".png", ".svg", ".ico", ".safetensors", ".json")
"""Files that are not read by people; results of benchmarks among them."""


def dead_names() -> set[str]:
    settings = {name for each in GONE for name in each.settings}
    imports = {name for each in GONE for name in each.imports}
    commands = {f"unified-cache {name}" for each in GONE for name in each.commands}
    methods = {name for each in GONE for name in each.methods}
    return {*WORDS, *settings, *imports, *commands, *methods}


def mentions(path: str, text: str, names: re.Pattern[str]) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for found in names.findall(line):
            yield f"{path}:{number}: found {found}, which is gone; expected nothing of it"


def pattern() -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(dead_names())))})(?!\w)")


def test_nothing_names_what_is_gone() -> None:
    names = pattern()
    findings = [
        finding
        for path in repository_files()
        if path not in MAY_NAME_THEM and not path.endswith(BINARY)
        for finding in mentions(path, (ROOT / path).read_text(encoding="utf-8", errors="replace"), names)
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_a_mention_of_what_is_gone_is_found() -> None:
    (found,) = mentions("a.md", "one\nset `memfd`\n", pattern())
    assert found.startswith("a.md:2: found memfd")


def test_the_document_on_moving_has_every_name_that_is_gone() -> None:
    text = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
    quoted = {name for each in re.findall(r"`([^`]+)`", text) for name in alternatives(each)}
    named = {name for each in GONE for name in (*each.settings, *each.commands, *each.imports)}
    named |= {f"[{name}]" for each in GONE for name in each.sections}
    assert {name for name in named if not any(fnmatchcase(name, each) for each in quoted if "*" in each)} <= quoted


def alternatives(quoted: str) -> list[str]:
    """Return the names that a quotation such as ``package.{one,two}`` stands for."""
    match = re.fullmatch(r"(.*)\{(.+)\}(.*)", quoted)
    return [f"{match[1]}{each}{match[3]}" for each in match[2].split(",")] if match else [quoted]


@pytest.mark.parametrize("name", [name for each in GONE for name in each.settings])
def test_a_setting_that_is_gone_is_refused_with_what_takes_its_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (instead,) = (each.instead for each in GONE if name in each.settings)
    section, _, rest = name.rpartition(".") if name.partition(".")[0] in SECTIONS else (None, "", name)
    variable = variable_name(tuple(rest.split(".")), section)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError) as refused:
        read_settings(SECTIONS["serve"])
    assert variable in str(refused.value)
    assert instead in str(refused.value)


def test_an_option_of_a_setting_that_is_gone_is_refused_with_what_takes_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["serve", "--host-bytes", "1GiB"]) == 2
    assert setting_instead("serve.host_bytes") in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for each in GONE for name in each.sections])
def test_a_section_that_is_gone_is_refused_with_what_takes_its_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (instead,) = (each.instead for each in GONE if name in each.sections)
    file = tmp_path / "unified-cache.toml"
    file.write_text(f"[{name}]\nany = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_settings(SECTIONS["serve"], file)
    assert f"there is no setting {name}.any" in str(refused.value)
    assert instead in str(refused.value)
    variable = variable_name(("any",), name)
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError) as refused:
        read_settings(SECTIONS["serve"])
    assert variable in str(refused.value)
    assert instead in str(refused.value)


@pytest.mark.parametrize("name", [name for each in GONE for name in each.commands])
def test_a_command_that_is_gone_is_refused_with_what_takes_its_place(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([name, "--any", "thing"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(each.instead in said for each in GONE if name in each.commands)
    assert not any(name in commands for commands in DEFERRED.values())


@pytest.mark.parametrize("value", [value for each in GONE for value in each.values])
def test_a_value_that_is_gone_is_refused_with_what_takes_its_place(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (instead,) = (each.instead for each in GONE if value in each.values)
    for arguments in (("--policy", value), ("--set", f"eviction.device={value}")):
        assert run(["replay", "nowhere.jsonl", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert instead in said


@pytest.mark.parametrize("name", [name for each in GONE for name in each.imports])
def test_an_import_of_what_is_gone_fails_with_what_takes_its_place(name: str) -> None:
    (instead,) = (each.instead for each in GONE if name in each.imports)
    with pytest.raises(ModuleNotFoundError, match=re.escape(instead)):
        importlib.import_module(name)


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in MOVED.items() for name in names])
def test_an_import_from_where_a_module_was_names_where_it_is(room: str, name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as refused:
        importlib.import_module(f"unified_cache.{name}")
    assert str(refused.value).endswith(f"it has moved to unified_cache.{room}.{name}")
    assert find_spec(f"unified_cache.{room}.{name}") is not None


@pytest.mark.parametrize("name", [name for each in GONE for name in each.methods])
def test_a_method_that_is_gone_is_refused_with_what_takes_its_place(name: str) -> None:
    (instead,) = (each.instead for each in GONE if name in each.methods)
    with pytest.raises(AttributeError, match=re.escape(f"{name!r}; it is gone: {instead}")):
        getattr(engine().cache, name)


@pytest.mark.parametrize("name", ["never_was"])
def test_a_method_that_never_was_is_refused_as_ever(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'$"):
        getattr(engine().cache, name)


def test_modules_that_never_were_fail_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Gone("use storage", imports=("unified_cache.former", "unified_cache.Former"))
    monkeypatch.setattr("unified_cache.core.gone.GONE", (row,))
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'unified_cache\.latter'$"):
        importlib.import_module("unified_cache.latter")
    with pytest.raises(ModuleNotFoundError, match=r"'unified_cache\.former'; it is gone: use storage"):
        importlib.import_module("unified_cache.former")
    with pytest.raises(AttributeError, match="Former'; it is gone: use storage"):
        unified_cache.Former  # noqa: B018
    assert GoneModules.find_spec("json") is None


def test_modules_of_other_packages_are_not_ours_to_name() -> None:
    assert GoneModules.find_spec("unified_cache_of_others.config") is None
    assert GoneModules.find_spec("others.unified_cache.config") is None
