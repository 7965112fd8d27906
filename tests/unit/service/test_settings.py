"""The configuration of a server: what wins, what is refused, and that it is finite."""

from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.support.service_settings import service_settings
from unified_cache.core.config import CacheConfig, GuardConfig
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.addresses import ListenAddress
from unified_cache.core.settings.section import PREFIX
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.core.settings.toml import as_toml

TLS = {"certificate": "c.pem", "key": "k.pem"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISTEN", "LIMITS__CALLS_MAX"):
        monkeypatch.delenv(f"{PREFIX}{name}", raising=False)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "service.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, 'listen = "127.0.0.1:1"\n[limits]\ncalls_max = 1\npages_max = 1\n[drain]\ngrace_s = 1\n')
    monkeypatch.setenv(f"{PREFIX}LISTEN", "127.0.0.1:2")
    monkeypatch.setenv(f"{PREFIX}LIMITS__CALLS_MAX", "2")
    settings = service_settings(file, {"listen": "127.0.0.1:3"})
    assert settings.listen == "127.0.0.1:3"
    assert (settings.limits.calls_max, settings.limits.pages_max, settings.drain.grace_s) == (2, 1, 1.0)


def test_what_is_printed_gives_the_same_settings_again(tmp_path: Path) -> None:
    text = (
        'storage = "file:/a \\"b\\" \\\\c"\nstorage_bytes = "1GiB"\n[quota.tenants."a.b"]\nstored_bytes_max = "5MB"\n'
    )
    settings = service_settings(written(tmp_path, text), {"tls": TLS})
    assert settings.storage_bytes == 1 << 30
    assert service_settings(written(tmp_path, as_toml(settings)), {}) == settings


def test_a_tenant_without_a_quota_of_its_own_has_that_of_all() -> None:
    settings = service_settings(None, {"quota": {"stored_bytes_max": 7, "tenants": {"acme": {"stored_bytes_max": 9}}}})
    assert settings.quota.of("acme").stored_bytes_max == 9
    assert settings.quota.of("other").stored_bytes_max == 7


def test_settings_cannot_be_changed() -> None:
    settings = service_settings(None, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.listen = "0.0.0.0:1"
    with pytest.raises(ValueError, match="frozen"):
        settings.limits.calls_max = 1


def test_every_limit_is_finite_and_above_zero() -> None:
    def numbers(values: BaseModel) -> list[float]:
        found: list[float] = []
        for name in type(values).model_fields:
            value = dict(values)[name]
            if isinstance(value, BaseModel):
                found += numbers(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found.append(value)
        return found

    settings = service_settings(None, {})
    parts = (settings.limits, settings.quota, settings.drain)
    found = [number for part in parts for number in numbers(part)] + list(asdict(settings.guard).values())
    assert all(0 < number < float("inf") for number in found)


def test_the_store_of_a_service_is_guarded_as_that_of_a_cache(tmp_path: Path) -> None:
    assert service_settings(None, {}).guard == CacheConfig((1,), (1,)).guard
    settings = service_settings(written(tmp_path, "[guard]\ndeadline_s = 2\n"), {"guard": {"calls_max": 3}})
    assert settings.guard == GuardConfig(deadline_s=2.0, calls_max=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limitz = 3\n", "there is no setting limitz"),
        ("[limits]\ncall_max = 3\n", "there is no setting limits.call_max"),
        ("[limits]\ncalls_max = -1\n", "limits.calls_max"),
        ("[limits]\ncalls_max = 0\n", "limits.calls_max"),
        ("[limits]\ncall_s_max = inf\n", "limits.call_s_max"),
        ("[limits]\ncall_s_max = nan\n", "limits.call_s_max"),
        ('[limits]\npage_bytes_max = "-4MiB"\n', "limits.page_bytes_max"),
        ('[limits]\npart_bytes = "8MiB"\n', "limits.part_bytes"),
        ('storage_bytes = "much"\n', "storage_bytes"),
        ('listen = "localhost"\n', "an address is HOST:PORT"),
        ('listen = "localhost:70000"\n', "an address is HOST:PORT"),
        ('listen = "::1:50051"\n', "brackets"),
        ('[metrics]\nlisten = "unix:/tmp/m"\n', "metrics.listen must be HOST:PORT"),
        ('[tls]\nkey = "k.pem"\n', "tls.certificate"),
        ('[access]\nlocal_role = "king"\n', "access.local_role"),
        ('[access]\nlocal_tenant = "../x"\n', "access.local_tenant"),
        ('[quota.tenants."A/B"]\n', "quota.tenants"),
        ("[guard]\ndeadline = 3\n", "there is no setting guard.deadline"),
        ("[guard]\ndeadline_s = inf\n", "deadline_s must be positive"),
        ("[guard]\ncalls_max = 0\n", "calls_max must be positive"),
        ("[guard]\nretry_rounds_max = 11\n", "retry_rounds_max must be at most 10"),
        ("[guard]\nbreaker_pause_s = 9\n", "breaker_pause_s must be at most breaker_pause_s_max"),
        ("listen = \n", "service.toml:1: expected TOML"),
        ("listen = 3\n", "listen"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        service_settings(written(tmp_path, text), {})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


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


def test_the_defaults_are_a_file_store_on_loopback() -> None:
    settings = service_settings(None, {})
    assert isinstance(settings, ServiceSettings)
    assert settings.address.is_local
    assert settings.storage.startswith("file:")
    assert settings.metrics_address is not None
    assert settings.metrics_address.is_local
