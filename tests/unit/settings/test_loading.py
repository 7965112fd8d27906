"""Settings from a file, variables and options: which wins, where each came from, and what is refused."""

import os
from pathlib import Path

import pytest

from unified_cache.core.config import EvictionPolicy, WritePolicy
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.loading import (
    FILE_NAME,
    FILE_VARIABLE,
    PREFIX,
    SECTIONS,
    cache_settings,
    read_settings,
)
from unified_cache.core.settings.section import Settings
from unified_cache.core.settings.service import ServiceSettings

FILE = """\
storage_bytes = "64GiB"
storage = "file:kv"
[guard]
deadline_s = 2
[serve]
storage_bytes = "1GiB"
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith(PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path(FILE_NAME)
    path.write_text(FILE, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str, model: type[Settings] = ServiceSettings) -> str:
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_settings(model, path)
    assert "\n" not in str(refused.value)
    return str(refused.value).replace(str(path), "a.toml")


@pytest.mark.usefixtures("file")
def test_one_file_is_for_all_and_a_section_for_one_alone() -> None:
    cache, service = read_settings(EmbeddedSettings).settings, read_settings(ServiceSettings).settings
    assert (cache.storage_bytes, service.storage_bytes) == (64 << 30, 1 << 30)
    assert (cache.storage, service.storage) == ("file:kv", "file:kv")
    assert (cache.guard.deadline_s, service.guard.deadline_s, service.guard.calls_max) == (2.0, 2.0, 16)
    assert cache_settings() == cache


@pytest.mark.usefixtures("file")
def test_options_win_over_variables_those_over_the_file_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_CACHE_HOST_BYTES", "1GiB")
    monkeypatch.setenv("UNIFIED_CACHE_STORAGE_BYTES", "2GiB")
    monkeypatch.setenv("UNIFIED_CACHE_CACHE_STORAGE_BYTES", "3GiB")
    monkeypatch.setenv("UNIFIED_CACHE_GUARD__CALLS_MAX", "7")
    loaded = read_settings(EmbeddedSettings, options={"write": "back", "host_bytes": 5})
    found = loaded.settings
    assert (found.host_bytes, found.storage_bytes, found.write) == (5, 3 << 30, WritePolicy.BACK)
    assert (found.guard.calls_max, found.guard.deadline_s) == (7, 2.0)
    assert [
        loaded.place(name.split("."))
        for name in ("host_bytes", "storage_bytes", "guard.calls_max", "storage", "device_pages")
    ] == [
        "--host-bytes",
        "UNIFIED_CACHE_CACHE_STORAGE_BYTES",
        "UNIFIED_CACHE_GUARD__CALLS_MAX",
        "unified-cache.toml",
        "default",
    ]


def test_the_file_is_the_one_named_else_that_of_the_variable_else_that_of_the_directory(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, named = tmp_path / "other.toml", tmp_path / "named.toml"
    other.write_text("host_bytes = 1\n", encoding="utf-8")
    named.write_text("host_bytes = 2\n", encoding="utf-8")
    assert read_settings(EmbeddedSettings).file == file
    monkeypatch.setenv(FILE_VARIABLE, str(other))
    assert read_settings(EmbeddedSettings, named).settings.host_bytes == 2
    assert read_settings(EmbeddedSettings).settings.host_bytes == 1


def test_a_home_and_a_variable_in_a_path_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "a.toml"
    # With the mark of its encoding, as editors on other systems write it.
    path.write_text("audit.file = '~/audit'\naccess.tokens = '$HOME/tokens'\n", encoding="utf-8-sig")
    settings = read_settings(ServiceSettings, path).settings
    assert (settings.audit.file, settings.access.tokens) == (tmp_path / "audit", tmp_path / "tokens")


@pytest.mark.parametrize("text", ['"1GiB"', "1073741824", '"1073741824"', '"1024 MiB"'])
@pytest.mark.parametrize("model", [EmbeddedSettings, ServiceSettings])
def test_a_size_is_written_alike_everywhere(
    text: str, model: type[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"storage_bytes = {text}\n", encoding="utf-8")
    found = [read_settings(model, path).settings]
    found.append(read_settings(model, options={"storage_bytes": text.strip('"')}).settings)
    monkeypatch.setenv("UNIFIED_CACHE_STORAGE_BYTES", text.strip('"'))
    found.append(read_settings(model).settings)
    assert [dict(settings)["storage_bytes"] for settings in found] == [1 << 30] * 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hsot_bytes = 1\n", "a.toml: there is no setting hsot_bytes; did you mean host_bytes"),
        ("[serve]\nlistn = 1\n", "a.toml: there is no setting listn; did you mean listen"),
        ("[sevre]\n", "a.toml: there is no setting sevre; did you mean serve"),
        ("[guard]\ndeadlines = 1\n", "a.toml: there is no setting guard.deadlines; did you mean guard.deadline_s"),
        ("serve = 3\n", "a.toml: serve must be a table, such as [serve], found 3"),
        ("[[serve]]\nreflection = true\n", "a.toml: serve must be a table"),
        ("[serve]\nhost_bytes = 3\n", "a.toml: there is no setting host_bytes"),
        ("[serve.limits]\ncalls_max = 'two'\n", "a.toml: limits.calls_max must be a number, found 'two'"),
        ("limits.calls_max = 0\n", "a.toml: limits.calls_max must be greater than 0, found 0"),
        ("limits.calls_max = true\n", "a.toml: limits.calls_max must be a number, found True"),
        ("guard.calls_max = '12'\n", "a.toml: guard.calls_max must be a number, found '12'"),
        ("guard.deadline_s = '2'\n", "a.toml: guard.deadline_s must be a number, found '2'"),
        ("insecure = 'yes'\n", "a.toml: insecure must be true or false, found 'yes'"),
        ("reflection = 1\n", "a.toml: reflection must be true or false, found 1"),
        ("limits.call_s_max = inf\n", "a.toml: limits.call_s_max must be "),
        ("limits.call_s_max = nan\n", "a.toml: limits.call_s_max must be "),
        ("storage_bytes = 'much'\n", "a.toml: storage_bytes must be bytes as in 4096, 500MB or 4GiB, found 'much'"),
        ("storage_bytes = 1e30\n", "a.toml: storage_bytes must be a smaller number, found 1e+30"),
        ("storage_bytes = '200kB'\n", "a.toml: storage_bytes must be greater than or equal to 1MiB, found '200kB'"),
        (
            "[quota.tenants.'A B']\n",
            "a.toml: quota.tenants.A B must be at most 64 of a-z, 0-9 and, not first, . _ -, found 'A B'",
        ),
        (
            "access.local_tenant = 'Acme'\n",
            "a.toml: access.local_tenant must be at most 64 of a-z, 0-9 and, not first, . _ -, found",
        ),
        ("storage_bytes = [1]\n", "a.toml: storage_bytes must be a valid integer, found [1]"),
        ("storage = 3\n", "a.toml: storage must be a valid string, found 3"),
        ("storage.url = 'x'\n", "a.toml: storage must be a valid string"),
        ("guard = 'x'\n", "a.toml: guard must be a table, found 'x'"),
        ("[serve.access]\nlocal_role = 'best'\n", "a.toml: access.local_role must be "),
        ("access.local_tenant = '../x'\n", "a.toml: access.local_tenant "),
        ("listen = 'localhost'\n", "a.toml: listen: an address is HOST:PORT"),
        ("listen = 'localhost:70000'\n", "a.toml: listen: an address is HOST:PORT"),
        ("listen = '::1:50051'\n", "brackets"),
        ("metrics.listen = 'unix:/tmp/m'\n", "a.toml: metrics.listen must be HOST:PORT"),
        ("tls.key = 'k.pem'\n", "a.toml: tls.certificate must be set"),
        ("tls = {key = 'k', certificate = 'c', client_crl = 'x'}\n", "a.toml: tls: client_crl must be of the"),
        ("[quota.tenants.'A/B']\n", "a.toml: quota.tenants"),
        ("a = [1,\n 2,\n", "a.toml: expected TOML"),
        ("limit = 1\nlimit = 2\n", "line 2"),
        ("listen = \n", "line 1"),
        (f"a = {'[' * 5_000}{']' * 5_000}\n", "a.toml: expected TOML in UTF-8, "),
        (f"{'a.' * 5_000}a = 1\n", "a.toml: there is no setting a"),
        (f"limits.calls_max.{'a.' * 5_000}a = 1\n", "a.toml: limits.calls_max must be a valid integer"),
    ],
)
def test_what_makes_no_sense_is_named_with_its_file(text: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, text)


def test_several_flaws_are_all_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, "hots = 1\nengins = 2\n")
    assert "setting hots" in said
    assert "setting engins" in said


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "must be a file that can be read: Is a directory"),
        ("none.toml", "must be a file that can be read: No such file"),
        ("latin.toml", "expected TOML in UTF-8"),
        ("/dev/zero", "must be a regular file"),
    ],
)
def test_what_is_no_file_of_toml_is_refused(place: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match=said):
        read_settings(ServiceSettings, tmp_path / place)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("UNIFIED_CACHE_HSOT_BYTES", "1", "of this name; did you mean UNIFIED_CACHE_HOST_BYTES"),
        ("UNIFIED_CACHE_SERVE_LISTN", "1", "of this name; did you mean UNIFIED_CACHE_SERVE_LISTEN"),
        ("UNIFIED_CACHE_GUARD_DEADLINE_S", "1", "of this name; did you mean UNIFIED_CACHE_GUARD__DEADLINE_S"),
        ("UNIFIED_CACHE_SERVE_ACCESS_TOKENS", "x", "of this name; did you mean UNIFIED_CACHE_SERVE_ACCESS__TOKENS"),
        ("UNIFIED_CACHE_GUARD__DEADLINE", "1", "there is no setting guard.deadline; did you mean guard.deadline_s"),
        ("UNIFIED_CACHE_STORAGE_BYTES", "[" * 5_000, "must be bytes as in 4096, 500MB or 4GiB, found '[[[["),
        ("UNIFIED_CACHE_DEVICE_PAGES", "[" * 5_000, "found '[[[["),
        ("UNIFIED_CACHE_GUARD", "x", "guard must be a table, found 'x'"),
        (
            "UNIFIED_CACHE_STORAGE__BYTES",
            "1GiB",
            "there is no setting of this name; did you mean UNIFIED_CACHE_STORAGE",
        ),
        ("unified_cache_serve_listn", "1", "there is no setting of this name"),
    ],
)
def test_a_variable_that_makes_no_sense_is_refused(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as refused:
        read_settings(EmbeddedSettings)
    assert str(refused.value).startswith(variable)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 300


def test_metrics_are_switched_off_by_a_file_and_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.toml"
    path.write_text("metrics.listen = 'none'\n", encoding="utf-8")
    assert read_settings(ServiceSettings, path).settings.metrics_address is None
    monkeypatch.setenv(f"{PREFIX}SERVE_METRICS__LISTEN", "none")
    assert read_settings(ServiceSettings).settings.metrics_address is None


def test_variables_of_others_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    of_kubernetes = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_50051_TCP_ADDR")
    for name in (*of_kubernetes, "CONFIG", "TEST_LONG", "VLLM_HOME"):
        monkeypatch.setenv(f"{PREFIX}{name}", "")
    assert read_settings(ServiceSettings).settings == ServiceSettings()


def test_a_variable_may_hold_a_list_or_a_table_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("DEVICE_PAGES", "[1, 2]"),
        ("HOST_PAGES", "3,4"),
        ("RETENTION", '{"tail_tokens": 3}'),
        ("EVICTION__HOST", '["lru", "priority"]'),
        ("EVICTION__DEVICE", "priority"),
        ("QUOTA__TENANTS__A", '{"calls_max": 5}'),
        ("LISTEN", "[::1]:5"),
    ):
        monkeypatch.setenv(f"{PREFIX}{name}", text)
    found, service = read_settings(EmbeddedSettings).settings, read_settings(ServiceSettings).settings
    assert (found.device_pages, found.host_pages, found.retention.tail_tokens) == ((1, 2), (3, 4), 3)
    assert found.eviction.host == (EvictionPolicy.LRU, EvictionPolicy.PRIORITY)
    assert found.eviction.device == (EvictionPolicy.PRIORITY,)
    assert (service.quota.of("a").calls_max, service.listen) == (5, "[::1]:5")


def test_no_section_has_a_setting_whose_variable_would_be_that_of_another() -> None:
    fields = [(section, name) for section, model in SECTIONS.items() for name in model.model_fields]
    assert not {name for _, name in fields} & {f"{section}_{name}" for section, name in fields}


@pytest.mark.threat("leaked credentials")
@pytest.mark.parametrize(
    "line", ['storage = ["{url}"]', 'storage_bytes = "{url}"', 'guard = "{url}"', 'tls = ["{url}"]']
)
@pytest.mark.parametrize("url", ["s3a://AKIA:hunter2@bucket", "grpc://host:1?token=hunter2", "file:kv#keys=hunter2"])
def test_no_error_has_what_is_secret_in_the_url_of_a_store_where_another_kind_is_expected(
    line: str, url: str, tmp_path: Path
) -> None:
    assert "hunter2" not in refusal(tmp_path, line.format(url=url))
