"""The configuration of a server: what wins, what is refused, and that it is finite."""

from dataclasses import asdict

import pytest

from tests.support.service_settings import service_settings
from unified_cache.core.config import CacheConfig, GuardConfig
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.addresses import ListenAddress
from unified_cache.service.limits import Limits

TLS = {"certificate": "c.pem", "key": "k.pem"}


def test_settings_cannot_be_changed() -> None:
    settings = service_settings(None, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.listen = "0.0.0.0:1"
    with pytest.raises(ValueError, match="frozen"):
        settings.limits.calls_max = 1


def test_every_limit_is_finite_and_above_zero() -> None:
    assert all(0 < number < float("inf") for number in asdict(Limits()).values())


def test_the_store_of_a_service_is_guarded_as_that_of_a_cache() -> None:
    assert service_settings(None, {}).guard.config == CacheConfig((1,), (1,)).guard
    assert service_settings(None, {"guard": {"calls_max": 3}}).guard.config == GuardConfig(calls_max=3)


def test_a_server_has_the_limits_of_its_settings() -> None:
    assert Limits.of(service_settings(None, {}).limits) == Limits()
    named = {"calls_max": 1, "connections_max": 2, "shared_running_max": 3, "page_bytes_max": 4, "call_s_max": 5.0}
    limits = Limits.of(service_settings(None, {"limits": named}).limits)
    assert {name: asdict(limits)[name] for name in named} == named


@pytest.mark.threat("open by mistake")
@pytest.mark.parametrize(
    "flags",
    [
        {"listen": "0.0.0.0:1"},
        {"listen": "[::]:1"},
        {"listen": "cache.example:1"},
        {"listen": "10.0.0.1:1", "tls": TLS},
        {"metrics": {"listen": "0.0.0.0:1"}},
    ],
)
def test_an_address_that_others_reach_needs_client_certificates(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        service_settings(None, flags)
    assert service_settings(None, {**flags, "insecure": True}).insecure
    assert service_settings(None, {**flags, "tls": {**TLS, "client_ca": "ca.pem"}})


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("127.0.0.1:0", True),
        ("127.8.9.1:0", True),
        ("[::1]:5", True),
        ("localhost:5", True),
        ("unix:/run/uc", True),
        ("0.0.0.0:5", False),
        ("[::]:5", False),
        ("localhost.evil.example:5", False),
        ("127.0.0.1.evil.example:5", False),
        ("2130706433:5", False),
        ("10.0.0.1:5", False),
    ],
)
def test_only_this_machine_counts_as_local(text: str, local: bool) -> None:
    assert ListenAddress.of(text).is_local is local
