"""The blocks of the documents, run as they stand: each by what it names, and one that names nothing in a workshop.

What is replaced are places: directories, ports, amounts of memory, and names that are the reader's to fill in.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import pytest
from prometheus_client import REGISTRY

from tests.e2e.test_serve_command import serving
from tests.sources import ROOT
from tests.support.certificates import Authority
from tests.support.cluster import ask
from tests.support.document_shell import ENDPOINT, DocumentShell
from tests.support.documents import CodeBlock, blocks_run_by, code_blocks, command_lines, documents, program_of
from tests.support.live import plan_of_a_small_replay, trace_of
from tests.support.mooncake import LocalCluster, open_mooncake
from tests.support.mooncake_needed import needs_etcd, needs_mooncake
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, TOY, engine_on, fill, prompt_of
from tests.support.ports import free_ports
from tests.support.service import wait_for
from unified_cache.cli.main import run
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Identity
from unified_cache.observe.events.publisher import EventPublisher
from unified_cache.observe.live.page import LivePage
from unified_cache.sizing.replay.player import Player
from unified_cache.storage_backends.memory import KeysOnlyStorage, MemoryStorage
from unified_cache.storage_backends.offline.stores import identities_of
from unified_cache.storage_backends.protocol import Level
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import label, open_for_contract, sealed_page

TIMEOUT_S = 240
TOKENS = list(range(PAGES * PAGE_SIZE))
LAYOUT = LAYOUTS["full"]
MASTER = "10.0.0.1:50051"
"""Address of the documents' Mooncake master."""

ETC = "/etc/unified-cache"
TRACE = "traces/mooncake_conversation.jsonl.gz --limit 40"
"""What is the reader's to fill in, and how much of it is read."""

REQUESTS = 100
PYTHON = frozenset({"python"})


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def plain_scripts(document: str) -> list[str]:
    """Return the shell blocks of a document that say nothing, as a reader types them."""
    plain = (block for block in code_blocks(text_of(document)) if not (block.runner or block.skipped_because))
    typed = [re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE) for block in plain if block.is_shell]
    typed = [re.sub(r"--limit \d+", "--limit 40", text).replace("TRACE", TRACE) for text in typed]
    return [re.sub(r"(_1000\.jsonl\.gz)", r"\1 --limit 40", text) for text in typed]


# Blocks that say nothing

PROMISED: Mapping[str, tuple[str, ...]] = {
    "docs/is-it-working.md": (
        "3 pages of 8 can be resumed (16 tokens each; write policy on_call)",
        "missed: [3, 8) for full, in no tier",
        "memory has 3 pages of the same tokens under another cache_salt",
    ),
}
"""What a program prints, as its document says."""


@pytest.fixture(scope="module")
def filled_workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the traces and a store that a replay has filled; each guide has a copy."""
    directory = tmp_path_factory.mktemp("workshop")
    (directory / "traces").symlink_to(ROOT / "traces")
    trace, store = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz", f"file:{directory / 'kv-store'}"
    assert ask("replay", trace, "--limit", "20", "--storage", store).status == 0
    return directory


@pytest.fixture
def workshop(filled_workshop: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled_workshop, tmp_path, symlinks=True, dirs_exist_ok=True)


@pytest.mark.parametrize("document", [document for document in documents() if plain_scripts(document)])
def test_the_commands_of_a_document_run(document: str, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    for typed in plain_scripts(document):
        commands = list(command_lines(CodeBlock("console", typed)))
        if all(words[0] == "unified-cache" for words in commands) and not re.search(r"[|<>;&]", typed):
            for _, *arguments in commands:
                result = ask(*arguments)
                assert result.status == 0, f"{arguments}\n{result.out}{result.err}"
        else:
            ran(workshop, f"set -eu\n{typed}")


@pytest.mark.parametrize("document", [document for document in documents() if program_of(text_of(document))])
def test_the_program_of_a_document_runs_in_one_namespace(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program_of(text_of(document)), document, "exec"), {})
    said = capsys.readouterr().out
    assert [words for words in PROMISED.get(document, ()) if words not in said] == []


# Programs that need an engine, or its user


def test_the_blocks_on_embedding_run(monkeypatch: pytest.MonkeyPatch) -> None:
    collectors: list[object] = []
    monkeypatch.setattr(REGISTRY, "register", collectors.append)
    toy = engine_on(MemoryStorage(), LAYOUT)
    names: dict[str, object] = {"cache": toy.cache}
    for block in blocks_run_by("embedding", PYTHON):
        exec(compile(block.text, "docs/embedding.md", "exec"), names)
    assert len(collectors) == 1
    assert names["identity"] == Identity("model", revision="r2", generation=1)
    toy.cache.close()


def test_the_engine_of_the_document_on_events_publishes() -> None:
    toy = engine_on(MemoryStorage(), LAYOUT)
    (block,) = blocks_run_by("events", PYTHON)
    ports = iter(free_ports(2))
    program = re.sub(r"10\.0\.0\.1:\d+", lambda _: f"127.0.0.1:{next(ports)}", block.text)
    assert "\n...\n" in program
    names: dict[str, object] = {"cache": toy.cache, "serve": lambda: toy.serve(prompt_of(3, 7))}
    exec(compile(program.replace("\n...\n", "\nserve()\n"), "docs/events.md", "exec"), names)
    publisher = names["publisher"]
    assert isinstance(publisher, EventPublisher)
    assert publisher.counts().pages > 0
    toy.cache.close()


def test_the_program_on_the_live_page_serves_one(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = blocks_run_by("live", PYTHON)
    names: dict[str, object] = {}
    exec(compile(program.text, "docs/live.md", "exec"), names)
    page = names["page"]
    assert isinstance(page, LivePage)
    with page:
        assert page.url in capsys.readouterr().out
        with urllib.request.urlopen(f"{page.url}metrics", timeout=TIMEOUT_S) as answer:
            assert 'tier="device"} 64.0' in answer.read().decode()


def test_the_program_on_traces_records_what_its_commands_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = blocks_run_by("traces", PYTHON)
    before, found, after = program.text.partition("# ... the engine serves requests ...")
    assert found
    plan = plan_of_a_small_replay()
    with Player.open(plan, KeysOnlyStorage(plan.storage_bytes, plan.objects())) as player:
        names: dict[str, object] = {"cache": player.cache}
        exec(compile(before, "docs/traces.md", "exec"), names)
        for request in trace_of(REQUESTS):
            player.serve(request)
        player.wait_all()
        exec(compile(after, "docs/traces.md", "exec"), names)
    assert f"{REQUESTS} requests written, 0 dropped, 0 not written" in capsys.readouterr().out
    for block in blocks_run_by("traces"):
        for _, *arguments in command_lines(block):
            said = ask(*arguments)
            assert said.status == 0, (arguments, said.err)
    assert {each.name for each in tmp_path.iterdir()} == {"trace.jsonl"}


# A service


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DocumentShell]:
    """A directory with prompts, and a shell in it that has the places of the documents there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(TOKENS), encoding="utf-8")
    places = {
        "/var/cache/kv": str(tmp_path / "kv"),
        "/mnt/backup": str(tmp_path / "backup"),
        ETC: str(tmp_path),
        "NAME": TOY.model,
        **dict.fromkeys(("1GiB", "16GiB", "64GiB"), "64MiB"),
    }
    with DocumentShell(tmp_path, places) as made:
        yield made


def fill_service(shell: DocumentShell) -> str:
    """Have an engine store a prompt in the running service; return the digest of its identity."""
    url = f"grpc://{shell.places[ENDPOINT]}"
    fill(open_storage(url), LAYOUT, [Prompt.of(TOKENS, PAGE_SIZE, whole=True)])
    with closing(open_storage(url)) as storage:
        (kept,) = identities_of(storage)
    return kept.digest.hex()


def write_certificates(directory: Path) -> None:
    """Write what the document's settings name."""
    authority = Authority()
    certificate, key = authority.issue("kv").write(directory, "server")
    assert (certificate.name, key.name) == ("server.pem", "server.key")
    (directory / "clients.pem").write_bytes(authority.pem)
    (directory / "clients.crl").write_bytes(authority.revoked())


def revoke_what_was_made(shell: DocumentShell, block: CodeBlock) -> None:
    """Run the commands over tokens in their order, with the ID of the token that was made for the document's."""
    listing_words = next(words for words in command_lines(block) if words[2] == "list")
    for words in command_lines(block):
        if words[2] == "revoke":
            shell.places[words[-1]] = shell.call(listing_words).split()[0]
        shell.call(words)
    assert not shell.call(listing_words)


def test_the_commands_and_settings_of_a_service_work(shell: DocumentShell, tmp_path: Path) -> None:
    start, configured, tokens, asked = blocks_run_by("service")
    shell.run(start)
    fill_service(shell)
    said = shell.run(asked)
    assert f"{PAGES} pages of {PAGES} can be resumed" in said[1], "the whole prompt can be restored"
    shell.wait_stopped()  # the last command has told it to end

    write_certificates(tmp_path)
    (settings,) = blocks_run_by("service", frozenset({"toml"}))
    (tmp_path / "service.toml").write_text(shell.placed(settings.text), encoding="utf-8")
    shown, _ = shell.run(configured)
    assert "cluster.example" in shown

    revoke_what_was_made(shell, tokens)


def test_an_operator_can_do_what_the_guide_says(shell: DocumentShell, tmp_path: Path) -> None:
    (tmp_path / "service.toml").write_text(f'storage = "file:{tmp_path / "kv"}"\n', encoding="utf-8")
    (tmp_path / "tokens").touch(mode=0o600)
    shell.call(["unified-cache", "serve", "--config", "service.toml"])
    shell.places["3f2a"] = fill_service(shell)
    for block in blocks_run_by("operate"):
        if "token revoke" in block.text:
            list_, new, revoke = block.text.splitlines()
            revoke_what_was_made(shell, CodeBlock("console", f"{new}\n{list_}\n{revoke}"))
        else:
            shell.run(block)
            if "drain" in block.text:
                shell.wait_stopped()
        if "clear" in block.text and "--all" not in block.text:
            fill_service(shell)  # as engines do, so that what follows has something to do
    said = json.loads(shell.call(["unified-cache", "ping", f"grpc://{ENDPOINT}", "--json"]))
    assert said["servers"][0]["stored_bytes"] == 0, "the last command has cleared everything"


def test_the_offline_commands_of_the_readme_work(shell: DocumentShell, tmp_path: Path) -> None:
    kept, copied = blocks_run_by("offline")
    prompt = Prompt.of(TOKENS, PAGE_SIZE, Namespace(tenant="acme"), whole=True)
    fill(open_storage(f"file:{tmp_path / 'kv-store'}"), LAYOUT, [prompt])
    shell.places["3f2a"] = TOY.digest(LAYOUT).hex()
    shell.run(copied)
    shell.run(kept)


def test_the_first_service_answers(shell: DocumentShell) -> None:
    (first,) = blocks_run_by("first-service")
    assert "default" in shell.run(first)[1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_certificates_of_the_recipe_let_its_tenant_in_and_nobody_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, pinged = blocks_run_by("certificates")
    tls = tmp_path / "tls"
    tls.mkdir()
    subprocess.run(["bash", "-euc", recipe.text], check=True, cwd=tls, capture_output=True, timeout=60)
    settings = text_of("deploy/service.toml").replace(ETC, str(tmp_path))
    (tmp_path / "service.toml").write_text(settings, encoding="utf-8")
    with serving(tmp_path, "--config", str(tmp_path / "service.toml")) as server:
        port = server.address.rpartition(":")[2]
        monkeypatch.chdir(tls)
        (ping,) = command_lines(pinged)
        assert run([*ping[1:-1], ping[-1].replace("kv.example:50051", f"localhost:{port}")]) == 0
        assert "acme" in capsys.readouterr().out
        assert run(["ping", f"grpcs://localhost:{port}?ca_file=ca.crt"]) == 1
        assert (tls / "server.key").stat().st_mode & 0o077 == 0


@pytest.mark.long
@pytest.mark.parametrize("words", list(command_lines(*blocks_run_by("demo"))), ids=" ".join)
def test_the_demos_of_the_documents_run(words: list[str], shell: DocumentShell) -> None:
    assert "0 words differ" in shell.call(words)


# Mooncake


@needs_mooncake
@pytest.mark.long
def test_the_commands_on_clusters_work(shell: DocumentShell) -> None:
    """Those of ours; the flags of Mooncake's are looked at by ``test_deploy``."""
    local, replayed, served, stat = blocks_run_by("cluster")
    with LocalCluster.running() as cluster:
        shell.places |= {f"mooncake://{MASTER}": cluster.url, f"mooncake://{ENDPOINT}": cluster.url}
        shell.places["traces/"] = f"{ROOT / 'traces'}/"
        *_, conformance = command_lines(local)
        shell.call(conformance)
        (replay,) = command_lines(replayed)
        shell.call([*replay, "--limit", "20"])
        shell.run(stat)
        Path("service.toml").touch()
        shell.run(served)
        shell.stop()


@needs_mooncake
@pytest.mark.long
def test_two_engines_share_a_cluster_through_a_service(tmp_path: Path) -> None:
    (block,) = blocks_run_by("two-engines")
    port, metrics, rpc, admin, node = free_ports(5)
    joined = f"until curl --silent http://127.0.0.1:{admin}/get_all_segments | grep .; do sleep 0.1; done"
    script = (
        block.text.replace(":50051", f":{port}")
        .replace("serve --storage", f"serve --listen 127.0.0.1:{port} --storage")
        .replace("examples/", f"{ROOT / 'examples'}/")
        .replace("--metrics_host=127.0.0.1 &", f"--metrics_host=127.0.0.1 --metrics_port={admin} &")
        .replace("--global_segment_size=256MB &", f"--global_segment_size=64MB --port={node} &\n{joined}")
        .replace("mooncake://127.0.0.1:50061", f"'mooncake://127.0.0.1:50061?admin=127.0.0.1:{admin}'")
        .replace("50061", str(rpc))
        .replace(
            "python examples", f"until unified-cache ping grpc://127.0.0.1:{port}; do sleep 0.2; done\npython examples"
        )
    )
    said = ran(tmp_path, script, {"UNIFIED_CACHE_SERVE_METRICS__LISTEN": f"127.0.0.1:{metrics}"})
    assert "engine 2: 240 tokens from storage" in said


@needs_mooncake
@needs_etcd
@pytest.mark.long
def test_a_cluster_set_up_as_told_serves_on_after_a_node_and_the_first_master_are_killed(tmp_path: Path) -> None:
    (block,) = blocks_run_by("leaders")
    rpc, admin = free_ports(2)
    script = "\n".join(line.removeprefix("$ ") for line in block.text.splitlines())
    members, peers, nodes = (str(port // 10) for port in free_ports(3))
    for old, new in (("217", members), ("218", peers), ("5006", nodes)):
        script = re.sub(rf"(?<=[:=]){old}(?=[$123])", new, script)
    script = script.replace("50051", str(rpc)).replace("9003", str(admin)).replace("?rep", f"?admin={admin}&rep")
    kill = "for job in $(jobs -p | sed -n '{}p'); do kill -9 -- -$job; done"
    stat = script.splitlines()[-1].replace("conformance", "storage stat")
    dies = f"{kill.format('4p;6')}; until {stat}; do sleep 1; done"
    # The programs go with the script, and with the pipe that they write to.
    ran(tmp_path, f"{{\nset -e\n{script}\nset +e\n{dies}\n}} >said; code=$?; {kill.format('1,$')}; exit $code")


@needs_mooncake
@pytest.mark.long
def test_a_node_that_is_drained_as_told_leaves_no_page_behind() -> None:
    (block,) = blocks_run_by("drain")
    create, query = command_lines(block)
    with LocalCluster.running(nodes=3) as cluster, closing(open_mooncake(cluster)) as storage:
        open_for_contract(storage)
        labels = [label(number) for number in range(20)]
        assert all(storage.put([sealed_page(each) for each in labels], Level.CACHED))

        def told(words: list[str], **values: str) -> dict[str, object]:
            text = "\0".join(words).replace(":9003", f":{cluster.address.admin_port}")
            for name, value in values.items():
                text = text.replace(name, value)
            said = subprocess.run(text.split("\0"), check=True, capture_output=True, timeout=TIMEOUT_S).stdout
            return dict(json.loads(said))

        def is_over(said: dict[str, object]) -> bool:
            return said["status_name"] != "RUNNING" or (said["active_units"] == 0 and said["blocked_units"] == 1)

        for _ in range(2):  # all but one
            segment, other, *_ = sorted(cluster.admin.segments())
            job = told(create, SEGMENT=segment, OTHER=other)["job_id"]
            wait_for(lambda: is_over(told(query, JOB=str(job))), TIMEOUT_S)  # noqa: B023
        assert all(storage.exists(labels))


def with_programs(directory: Path) -> dict[str, str]:
    """Return an environment in which ``python``, ``unified-cache`` and Mooncake's programs are those of the tests."""
    programs = directory / "programs"
    programs.mkdir(exist_ok=True)
    main = "from unified_cache.cli.main import main; main()"
    words = {"unified-cache": f" -c '{main}'", "python": ""}
    for module, name in (("cli", "mooncake_master"), ("cli_client", "mooncake_client")):
        words[name] = f" -m mooncake.{module}"
    for name, arguments in words.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{arguments} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def ran(directory: Path, script: str, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """Run a script of a document; return what it prints."""
    done = subprocess.run(
        ["bash", "-mc", script],
        check=False,
        cwd=directory,
        env={**with_programs(directory), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout
