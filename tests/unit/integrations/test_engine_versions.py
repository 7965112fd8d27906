"""Versions of engines that we do not run under are refused in one line; what only some of them have is asked for."""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.integrations.ranges import VersionRange
from unified_cache.integrations.sglang.versions import decode_context_size, shares_memory


def install(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], version: str) -> None:
    """Make modules of an engine importable that have nothing but a version, until the test ends."""
    for name in names:
        module = ModuleType(name)
        vars(module)["__version__"] = version
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", ["tier", "connector"])
def test_another_vllm_is_refused_with_our_versions_and_its_own(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, ["vllm", "vllm.version"], "0.30.0")
    line = r"checked with vLLM 0\.31 to 0\.33, see docs/vllm\.md#versions; found vLLM 0\.30\.0, which lacks .*vllm"
    with pytest.raises(ConfigError, match=line):
        import_module(f"unified_cache.integrations.vllm.{name}")


@pytest.mark.parametrize(
    ("name", "supported"),
    [("UnifiedCacheHiCache", r"0\.5\.21 to 0\.5\.23"), ("UnifiedCacheExternalLinker", r"0\.5\.23")],
)
def test_another_sglang_is_refused_with_our_versions_and_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, supported: str
) -> None:
    install(monkeypatch, ["sglang", "sglang.version"], "0.5.18")
    line = rf"{name} is checked with SGLang {supported}, see .*; found SGLang 0\.5\.18, which lacks .*sglang"
    with pytest.raises(ConfigError, match=line):
        vars(import_module("unified_cache.integrations.sglang"))["__getattr__"](name)


@pytest.mark.parametrize(
    ("found", "warned"),
    [("0.30.2", True), ("0.31.0", False), ("0.33.1rc2+cpu", False), ("0.34.0", True), ("1.0", True), ("dev", True)],
)
def test_a_version_outside_the_range_gets_one_line(caplog: pytest.LogCaptureFixture, found: str, warned: bool) -> None:
    checked = VersionRange("Tier", "vLLM", "0.31", "0.33", "docs/vllm.md")
    with caplog.at_level(logging.WARNING):
        checked.warn(found)
    assert caplog.messages == [checked.line(found)] * warned


def test_what_an_older_sglang_does_not_say_is_what_it_does_not_have() -> None:
    assert decode_context_size(SimpleNamespace()) == 1
    assert decode_context_size(SimpleNamespace(dcp_size=2)) == 2
    assert not shares_memory(SimpleNamespace())
    assert not shares_memory(SimpleNamespace(shared_allocation_domain=None))
    assert shares_memory(SimpleNamespace(shared_allocation_domain="domain"))
