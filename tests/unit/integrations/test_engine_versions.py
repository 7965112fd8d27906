"""Versions of engines that we do not run under are refused in one line; what only some of them have is asked for."""

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest

from unified_cache.core.errors import ConfigError
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
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 or 0\.33, found vLLM 0\.30\.0: .*vllm"):
        import_module(f"unified_cache.integrations.vllm.{name}")


@pytest.mark.parametrize(
    ("name", "supported"),
    [("UnifiedCacheHiCache", r"0\.5\.19 to 0\.5\.23"), ("UnifiedCacheExternalLinker", r"0\.5\.23")],
)
def test_another_sglang_is_refused_with_our_versions_and_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, supported: str
) -> None:
    install(monkeypatch, ["sglang", "sglang.version"], "0.5.18")
    with pytest.raises(ConfigError, match=rf"{name} needs SGLang {supported}, found SGLang 0\.5\.18: .*sglang"):
        vars(import_module("unified_cache.integrations.sglang"))["__getattr__"](name)


def test_what_an_older_sglang_does_not_say_is_what_it_does_not_have() -> None:
    assert decode_context_size(SimpleNamespace()) == 1
    assert decode_context_size(SimpleNamespace(dcp_size=2)) == 2
    assert not shares_memory(SimpleNamespace())
    assert not shares_memory(SimpleNamespace(shared_allocation_domain=None))
    assert shares_memory(SimpleNamespace(shared_allocation_domain="domain"))
