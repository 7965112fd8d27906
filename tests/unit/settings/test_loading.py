"""Settings from a file, variables and flags: which wins, where each came from, and what is refused with its line."""

import tomllib
from pathlib import Path

import pytest

from unified_cache.core.config import EvictionPolicy, Retention, WritePolicy
from unified_cache.core.errors import ConfigError
from unified_cache.core.settings import toml
from unified_cache.core.settings.cache import EmbeddedSettings
from unified_cache.core.settings.loading import FILE_NAME, SettingSource, cache_settings, read_settings
from unified_cache.core.settings.names import FILE_VARIABLE, SECTIONS, variable_name
from unified_cache.core.settings.section import Settings
from unified_cache.core.settings.service import ServiceSettings

NONE: dict[str, str] = {}
"""An environment."""

FILE = """\
storage_bytes = "64GiB"
storage = "file:kv"

[guard]
deadline_s = 2

[serve]
storage_bytes = "1GiB"
sizes = [
]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path(FILE_NAME)
    path.write_text(FILE.replace("sizes = [\n]\n", ""), encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str, model: type[Settings] = ServiceSettings, **environment: str) -> str:
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_settings(model, path, environment=environment)
    assert "\n" not in str(refused.value)
    return str(refused.value).replace(str(path), "a.toml")


@pytest.mark.usefixtures("file")
def test_one_file_is_for_all_and_a_section_for_one_alone() -> None:
    assert read_settings(EmbeddedSettings, environment=NONE).settings.storage_bytes == 64 << 30
    assert read_settings(ServiceSettings, environment=NONE).settings.storage_bytes == 1 << 30
    for model in (EmbeddedSettings, ServiceSettings):
        settings = read_settings(model, environment=NONE).settings
        assert dict(settings)["storage"] == "file:kv"
    assert read_settings(EmbeddedSettings, environment=NONE).settings.guard.deadline_s == 2.0


@pytest.mark.usefixtures("file")
def test_flags_win_over_variables_and_those_over_the_file_and_each_is_named() -> None:
    variables = {
        "UNIFIED_CACHE_HOST_BYTES": "2GiB",
        "UNIFIED_CACHE_CACHE_OPERATIONS_MAX": "3",
        "UNIFIED_CACHE_STORAGE_WORKERS": "9",
    }
    flags, assigned = {"storage_workers": 7}, ("write=back",)
    loaded = read_settings(EmbeddedSettings, flags=flags, assignments=assigned, environment=variables)
    found = loaded.settings
    assert (found.host_bytes, found.operations_max, found.storage_workers) == (2 << 30, 3, 7)
    assert found.write is WritePolicy.BACK
    names = ("host_bytes", "operations_max", "storage_workers", "write", "storage", "device_pages")
    origins = {name: loaded.origin((name,)) for name in names}
    assert {name: origin.place for name, origin in origins.items()} == {
        "host_bytes": "UNIFIED_CACHE_HOST_BYTES",
        "operations_max": "UNIFIED_CACHE_CACHE_OPERATIONS_MAX",
        "storage_workers": "--storage-workers",
        "write": "--set write",
        "storage": "unified-cache.toml:2",
        "device_pages": "default",
    }
    assert origins["device_pages"].source is SettingSource.DEFAULT
    assert loaded.origin(("host_bytes",)).source is SettingSource.VARIABLE


def test_a_variable_of_a_section_wins_over_one_of_all() -> None:
    variables = {"UNIFIED_CACHE_SERVE_STORAGE_BYTES": "1GiB", "UNIFIED_CACHE_STORAGE_BYTES": "2GiB"}
    assert read_settings(ServiceSettings, environment=variables).settings.storage_bytes == 1 << 30
    assert read_settings(EmbeddedSettings, environment=variables).settings.storage_bytes == 2 << 30


def test_the_file_is_the_one_named_else_that_of_the_variable_else_that_of_the_directory(
    tmp_path: Path, file: Path
) -> None:
    other, named = tmp_path / "other.toml", tmp_path / "named.toml"
    other.write_text("operations_max = 1\n", encoding="utf-8")
    named.write_text("operations_max = 2\n", encoding="utf-8")
    variable = {FILE_VARIABLE: str(other)}
    assert read_settings(EmbeddedSettings, named, environment=variable).settings.operations_max == 2
    assert read_settings(EmbeddedSettings, environment=variable).settings.operations_max == 1
    assert read_settings(EmbeddedSettings, environment=NONE).file == file


def test_a_home_and_a_variable_in_a_path_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "a.toml"
    path.write_text("audit.file = '~/audit'\naccess.tokens = '$HOME/tokens'\n", encoding="utf-8")
    settings = read_settings(ServiceSettings, path, environment=NONE).settings
    assert (settings.audit.file, settings.access.tokens) == (tmp_path / "audit", tmp_path / "tokens")


@pytest.mark.parametrize("text", ['"1GiB"', "1073741824", '"1073741824"', '"1024 MiB"'])
@pytest.mark.parametrize("model", [EmbeddedSettings, ServiceSettings])
def test_a_size_is_written_alike_everywhere(text: str, model: type[Settings], tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"storage_bytes = {text}\n", encoding="utf-8")
    variable = {"UNIFIED_CACHE_STORAGE_BYTES": text.strip('"')}
    for settings in (
        read_settings(model, path, environment=NONE).settings,
        read_settings(model, environment=variable).settings,
        read_settings(model, flags={"storage_bytes": text.strip('"')}, environment=NONE).settings,
    ):
        assert dict(settings)["storage_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\nhsot_bytes = 1\n", "a.toml:2: there is no setting hsot_bytes; did you mean host_bytes"),
        ("[serve]\nlistn = 1\n", "a.toml:2: there is no setting serve.listn; did you mean serve.listen"),
        ("[serv]\nlisten = 'x'\n", "a.toml:2: there is no setting serv.listen; did you mean serve.listen"),
        ("[sevre]\n", "a.toml:1: there is no setting sevre; did you mean serve"),
        ("[cache]\nlisten = 'x'\n", "a.toml:2: there is no setting cache.listen"),
        ("[guard]\n\ndeadlines = 1\n", "a.toml:3: there is no setting guard.deadlines; did you mean guard.deadline_s"),
        ("serve = 3\n", "a.toml:1: serve must be a table, such as [serve], found 3"),
        ("[[serve]]\nreflection = true\n", "a.toml:1: serve must be a table"),
        ("[cache]\nquota = 3\n", "a.toml:2: there is no setting cache.quota"),
        ("[serve.limits]\ncalls_max = 'two'\n", "a.toml:2: limits.calls_max must be a valid integer, found 'two'"),
        ("\n\nlimits.calls_max = 0\n", "a.toml:3: limits.calls_max must be at least 1, found 0"),
        ("limits.calls_max = true\n", "a.toml:1: limits.calls_max must be a number, found True"),
        ("guard.deadline_s = -1\n", "a.toml:1: "),
        ("storage_bytes = 'much'\n", "a.toml:1: storage_bytes must be bytes as in 4096, 500MB or 4GiB, found 'much'"),
        ("storage_bytes = [1]\n", "a.toml:1: storage_bytes must be a valid integer, found [1]"),
        ("storage = 3\n", "a.toml:1: storage must be a valid string, found 3"),
        ("storage.url = 'x'\n", "a.toml:1: storage must be a valid string"),
        ("guard = 'x'\n", "a.toml:1: guard must be a table, found 'x'"),
        ("[serve.access]\nlocal_role = 'best'\n", "a.toml:2: access.local_role must be "),
        ("a = [1,\n 2,\n", "a.toml:3: expected TOML"),
        ("limit = 1\nlimit = 2\n", "a.toml:2: expected TOML"),
        ('limit = """\n', "a.toml:2: expected TOML"),
        (f"a = {'[' * 5_000}{']' * 5_000}\n", "more than 100 deep"),
        (f"{'a.' * 5_000}a = 1\n", "more than 100 deep"),
    ],
)
def test_what_makes_no_sense_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, text)


def test_a_variable_of_lists_within_lists_without_end_is_text_that_is_no_value(tmp_path: Path) -> None:
    said = refusal(tmp_path, "", UNIFIED_CACHE_STORAGE_BYTES="[" * 5_000)
    assert said.startswith(
        "UNIFIED_CACHE_STORAGE_BYTES: storage_bytes must be bytes as in 4096, 500MB or 4GiB, found '[[[["
    )
    assert len(said) < 300


def test_the_line_is_right_after_values_of_several_lines(tmp_path: Path) -> None:
    text = 'device_pages = [\n  1,  # [serve]\n]\nlisten = """\nlimit = 3\n"""\n\n[serve.limits]\n# calls_max = 1\n'
    assert "a.toml:10: limits.calls_max must be at least 1" in refusal(tmp_path, f"{text}calls_max = 0\n")


def test_a_list_of_many_lines_is_parsed_once_for_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def loads(text: str) -> dict[str, object]:
        parsed.append(text)
        return tomllib.loads(text)

    monkeypatch.setattr(toml, "loads", loads)
    assert "a.toml:2003: " in refusal(tmp_path, "device_pages = [\n" + "1,\n" * 2000 + "]\nengins = 2\n")
    assert len(parsed) < 5


def test_several_flaws_are_all_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, "hots = 1\nengins = 2\n")
    assert "a.toml:1: " in said
    assert "a.toml:2: " in said


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("", "expected a file of TOML, found a directory"),
        ("none.toml", "expected a file of settings, found none; unified-cache config init"),
        ("latin.toml", "expected TOML in UTF-8, found byte 0xe9"),
        ("/dev/zero", "must have at most 1048576 bytes, found more"),
    ],
)
def test_what_is_no_file_of_toml_is_refused(place: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match=said):
        read_settings(ServiceSettings, tmp_path / place, environment=NONE)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("UNIFIED_CACHE_HSOT_BYTES", "UNIFIED_CACHE_HOST_BYTES"),
        ("UNIFIED_CACHE_SERVE_LISTN", "UNIFIED_CACHE_SERVE_LISTEN"),
        ("UNIFIED_CACHE_GUARD__DEADLINE", "UNIFIED_CACHE_GUARD__DEADLINE_S"),
    ],
)
def test_a_variable_that_names_nothing_is_refused_whoever_reads(variable: str, meant: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, "", EmbeddedSettings, **{variable: "1"})
    assert said.startswith(f"{variable}: there is no setting of this name; did you mean ")
    assert meant in said


def test_variables_of_others_are_no_settings() -> None:
    others = (
        "UNIFIED_CACHE_CONFIG "
        "UNIFIED_CACHE_TEST_LONG UNIFIED_CACHE_VLLM_HOME UNIFIED_CACHE_SERVICE_HOST UNIFIED_CACHE_SERVICE_PORT "
        "UNIFIED_CACHE_SERVICE_PORT_GRPC UNIFIED_CACHE_PORT UNIFIED_CACHE_PORT_50051_TCP "
        "UNIFIED_CACHE_PORT_50051_TCP_ADDR UNIFIED_CACHE_PORT_50051_TCP_PROTO"
    )
    settings = read_settings(ServiceSettings, environment=dict.fromkeys(others.split(), "")).settings
    assert settings == ServiceSettings()


def test_a_variable_may_hold_a_list_or_a_table_as_json() -> None:
    variables = {"UNIFIED_CACHE_DEVICE_PAGES": "[1, 2]", "UNIFIED_CACHE_RETENTION": '{"tail_tokens": 3}'}
    found = read_settings(EmbeddedSettings, environment=variables).settings
    assert (found.device_pages, found.retention) == ((1, 2), Retention(3))
    ipv6 = read_settings(ServiceSettings, environment={"UNIFIED_CACHE_LISTEN": "[::1]:5"}).settings
    assert ipv6.listen == "[::1]:5"


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("listen", "--set listen: must be NAME=VALUE"),
        ("listn=1", "--set listn=1: there is no setting listn; did you mean serve.listen"),
        ("limits.calls_max=0", "--set limits.calls_max must be at least 1, found '0'"),
    ],
)
def test_an_assignment_that_makes_no_sense_is_refused(assignment: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings(ServiceSettings, assignments=(assignment,), environment=NONE)
    assert said in str(refused.value)


def test_an_assignment_in_a_table_goes_over_one_of_the_table() -> None:
    assigned = ('guard={"deadline_s": 3, "calls_max": 5}', "guard.calls_max=7")
    guard = read_settings(EmbeddedSettings, assignments=assigned, environment=NONE).settings.guard
    assert (guard.deadline_s, guard.calls_max) == (3.0, 7)


def test_a_list_in_a_table_may_be_json_in_a_variable() -> None:
    variables = {
        "UNIFIED_CACHE_EVICTION__HOST": '["lru", "priority"]',
        "UNIFIED_CACHE_QUOTA__TENANTS__A": '{"calls_max": 5}',
    }
    eviction = read_settings(EmbeddedSettings, environment=variables).settings.eviction
    assert eviction.host == (EvictionPolicy.LRU, EvictionPolicy.PRIORITY)
    assert read_settings(ServiceSettings, environment=variables).settings.quota.of("a").calls_max == 5


def test_a_policy_is_one_for_all_components_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[eviction]\ndevice = "priority"\nhost = ["priority", "lru"]\n', encoding="utf-8")
    eviction = read_settings(EmbeddedSettings, path, environment=NONE).settings.eviction
    assert eviction.device == (EvictionPolicy.PRIORITY,)
    assert eviction.host == (EvictionPolicy.PRIORITY, EvictionPolicy.LRU)


def test_the_settings_of_an_engine_are_those_of_the_directory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    assert file.exists()
    assert cache_settings().store == "file:kv"


def test_no_section_has_a_setting_whose_variable_would_be_that_of_another() -> None:
    of_all = {variable_name((name,)) for model in SECTIONS.values() for name in model.model_fields}
    of_one = [variable_name((name,), section) for section, model in SECTIONS.items() for name in model.model_fields]
    assert len({*of_all, *of_one}) == len(of_all) + len(of_one)


@pytest.mark.threat("leaked credentials")
@pytest.mark.parametrize(
    "line", ['storage = ["{url}"]', 'storage_bytes = "{url}"', 'guard = "{url}"', 'tls = ["{url}"]']
)
@pytest.mark.parametrize("url", ["s3a://AKIA:hunter2@bucket", "grpc://host:1?token=hunter2", "file:kv#keys=hunter2"])
def test_no_error_has_what_is_secret_in_the_url_of_a_store_where_another_kind_is_expected(
    line: str, url: str, tmp_path: Path
) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(line.format(url=url), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_settings(ServiceSettings, path, NONE)
    assert "hunter2" not in str(refused.value)
