"""``deploy`` holds: manifests fit the published schemas, units what systemd knows, and all run with few rights."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from scripts.release import LISTS
from tests.sources import ROOT
from tests.support.mooncake_needed import needs_etcd, needs_mooncake
from tests.support.service_settings import service_settings
from unified_cache.cli.main import run
from unified_cache.storage_backends.mooncake.native import usable_wheel

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
INSTALLED = "/opt/unified-cache/bin/"
PROGRAM = f"{INSTALLED}unified-cache"
EXPOSURE_MAX = 20
"""Tenths of systemd's scale from 0, nothing to lose, to 10; a unit without any setting has 9.6."""

PUBLISHED: dict[str, dict[str, object]] = json.loads((ROOT / "tests" / "fixtures" / "kubernetes.json").read_text())
"""Schemas of kinds of v1.31, the oldest that manifests must fit, from the package kubernetes-validate: strict, without
descriptions."""

Manifest = Mapping[str, object]


def manifests(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def flaws(manifest: Manifest) -> list[str]:
    """Say where a manifest does not fit the schema of its kind."""
    kind = f"{manifest['apiVersion']} {manifest['kind']}"
    if kind not in PUBLISHED["kinds"]:
        return [f"{kind} has no schema in tests/fixtures/kubernetes.json"]
    schema = {"$defs": PUBLISHED["$defs"], "allOf": [PUBLISHED["kinds"][kind]]}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(manifest)]


def found(value: object, name: str) -> Iterator[object]:
    """Yield what stands under a name, however deep."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key == name:
                yield each
            yield from found(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from found(each, name)


def pods() -> list[tuple[str, Manifest]]:
    """Return the specification of every pod of the manifests, by file and kind."""
    named: list[tuple[str, Manifest]] = []
    for path in MANIFESTS:
        for manifest in manifests(path):
            for template in found(manifest, "template"):
                assert isinstance(template, Mapping)
                named.append((f"{path.stem}: {manifest['kind']}", template["spec"]))
    return named


def containers_of(pod: Manifest) -> Iterator[Mapping[str, object]]:
    (containers,) = found(pod, "containers")
    assert isinstance(containers, list)
    yield from containers


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_the_published_schemas(path: Path) -> None:
    assert [flaw for manifest in manifests(path) for flaw in flaws(manifest)] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("runAsNonRoot: true", "runAsNonRot: true"),
        ("replicas: 3", "replicas: three"),
        ("      containers:", "      containres:"),
        ("kind: StatefulSet", "kind: StatefulSett"),
        ("fieldPath: status.podIP", "fieldPaths: status.podIP"),
    ],
)
def test_a_flaw_in_a_manifest_is_found(old: str, new: str) -> None:
    text = "---\n".join(path.read_text(encoding="utf-8") for path in MANIFESTS)
    assert old in text
    changed = yaml.safe_load_all(text.replace(old, new, 1))
    assert [flaw for manifest in changed for flaw in flaws(manifest)]


@pytest.mark.threat("takeover of the process")
@pytest.mark.parametrize(("name", "pod"), pods(), ids=lambda each: each if isinstance(each, str) else "")
def test_a_pod_has_no_more_rights_than_it_needs(name: str, pod: Manifest) -> None:
    account = pod["securityContext"]
    assert isinstance(account, Mapping)
    assert account["runAsNonRoot"] is True
    assert account["runAsUser"] == account["runAsGroup"] == 65532
    assert account["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in containers_of(pod):
        rights = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == rights
        assert [each for limits in found(container, "limits") for each in found(limits, "memory")]
        assert container["readinessProbe"]
        assert not str(container["image"]).endswith(":latest")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_every_namespace_admits_restricted_pods_alone_and_has_a_policy_of_its_network(path: Path) -> None:
    made = manifests(path)
    (namespace,) = (each for each in made if each["kind"] == "Namespace")
    assert list(found(namespace, "pod-security.kubernetes.io/enforce")) == ["restricted"]
    assert {next(found(each, "namespace")) for each in made if each is not namespace} == set(found(namespace, "name"))
    assert "NetworkPolicy" in {each["kind"] for each in made}


def test_settings_are_those_of_the_service_and_alike_in_file_and_manifest() -> None:
    text = (DEPLOY / "service.toml").read_text(encoding="utf-8")
    (embedded,) = (each for path in MANIFESTS for made in manifests(path) for each in found(made, "service.toml"))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "\n".join(lines).partition("\n[audit]")[0].strip() == str(embedded).strip()
    settings = service_settings(DEPLOY / "service.toml", {})
    assert settings.tls is not None
    assert settings.tls.client_ca is not None
    assert settings.metrics.client_ca is not None
    assert settings.storage_bytes is not None
    assert not settings.insecure


def commands() -> Iterator[list[str]]:
    """Yield the arguments of every command of ours in units, manifests and the image."""
    for path in UNITS:
        for line in re.findall(rf"^ExecStart={PROGRAM} (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield shlex.split(line)
    for _, pod in pods():
        for container in containers_of(pod):
            arguments = container["args"]
            assert isinstance(arguments, list)
            if "command" not in container:
                yield arguments
    (default,) = re.findall(r"^CMD (.*)$", (DEPLOY / "Containerfile").read_text(encoding="utf-8"), re.MULTILINE)
    yield json.loads(default)


@pytest.mark.parametrize("arguments", list(commands()), ids=" ".join)
def test_a_command_parses(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*arguments, "--help"]) == 0, capsys.readouterr().err


def mooncake_commands() -> Iterator[list[str]]:
    """Yield every command of Mooncake's in units, manifests and the document on clusters."""
    units = [*UNITS, ROOT / "docs" / "cluster.md"]
    for path in units:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(rf"^(?:ExecStart={INSTALLED}|\$ (?:for .* do )?)(mooncake_\w+ .*)$", text, re.MULTILINE):
            yield line.split()
    yield from (command for command in commands_in_pods() if command[0] != "etcd")


def commands_in_pods() -> Iterator[list[str]]:
    """Yield every command of a container that names its program."""
    for _, pod in pods():
        for container in containers_of(pod):
            command, arguments = container.get("command", ()), container["args"]
            assert isinstance(command, list | tuple)
            assert isinstance(arguments, list)
            if command:
                yield [*command, *arguments]


@needs_etcd
def test_etcd_has_the_flags_that_it_is_given() -> None:
    (command,) = (each for each in commands_in_pods() if each[0] == "etcd")
    told = subprocess.run(["etcd", "--help"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert {word.partition("=")[0] for word in command[1:]} <= set(re.findall(r"^ +(--[\w-]+)", told, re.MULTILINE))


@needs_mooncake
@pytest.mark.parametrize("command", list(mooncake_commands()), ids=" ".join)
def test_a_program_of_mooncakes_has_the_flags_that_it_is_given(command: list[str]) -> None:
    program = usable_wheel().locate_file(f"mooncake/{command[0]}")
    told = subprocess.run([str(program), "--help"], check=False, capture_output=True, text=True, timeout=60)
    known = set(re.findall(r"^ +-(\w+) \(", told.stdout + told.stderr, re.MULTILINE))
    given = {word[2:].partition("=")[0] for word in command if word.startswith("--")}
    assert given
    assert given - known == set()
    sizes = [word.partition("=")[2] for word in command if word.startswith("--global_segment_size=")]
    assert not any(size.endswith("iB") for size in sizes), "Mooncake takes such a size for none"


@pytest.mark.threat("takeover of the process")
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_a_unit_and_finds_it_confined(path: Path, tmp_path: Path) -> None:
    unit = tmp_path / path.name
    unit.write_text(re.sub(rf"={INSTALLED}\w\S*", "=/bin/true", path.read_text(encoding="utf-8")), encoding="utf-8")
    for words in (("verify",), ("security", "--offline=true", f"--threshold={EXPOSURE_MAX}")):
        command = ["systemd-analyze", "--no-pager", *words, str(unit)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert unit.name not in done.stderr


@pytest.mark.threat("takeover of the process")
def test_the_image_runs_as_nobody_and_takes_what_a_release_writes() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    last = text.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\S+)$", last, re.MULTILINE) == ["65532:65532"]
    assert "--require-hashes" in text
    assert set(re.findall(r"LIST=(\w+)", text)) == set(LISTS)
    assert ":latest" not in text
