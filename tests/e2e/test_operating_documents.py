"""The blocks of service.md, operate.md, deploy.md, cluster.md, events.md and embedding.md, run as they stand.

What is replaced are places: directories, ports, amounts of memory, and names that are the reader's to fill in.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from prometheus_client import REGISTRY

from tests.sources import ROOT
from tests.support.certificates import Authority
from tests.support.document_shell import ENDPOINT, DocumentShell
from tests.support.documents import CodeBlock, code_blocks, command_lines
from tests.support.mooncake_needed import needs_mooncake
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, TOY, engine_on, fill, prompt_of
from tests.support.ports import free_ports
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity
from unified_cache.observe.events.publisher import EventPublisher
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.offline.stores import identities_of
from unified_cache.storage_backends.url import open_storage

TIMEOUT_S = 240
TOKENS = list(range(PAGES * PAGE_SIZE))
LAYOUT = LAYOUTS["full"]
MASTER = "10.0.0.1:50051"
"""Address of the documents' Mooncake master."""


def blocks_of(document: str, language: str) -> list[CodeBlock]:
    text = (ROOT / "docs" / f"{document}.md").read_text(encoding="utf-8")
    found = [block for block in code_blocks(text) if block.language == language]
    assert found
    return found


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DocumentShell]:
    """A directory with prompts, and a shell in it that has the places of the documents there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(TOKENS), encoding="utf-8")
    places = {
        "/var/cache/kv": str(tmp_path / "kv"),
        "/mnt/backup": str(tmp_path / "backup"),
        "/etc/unified-cache": str(tmp_path),
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


def test_the_commands_and_settings_of_the_document_on_the_service_work(shell: DocumentShell, tmp_path: Path) -> None:
    start, configured, tokens, asked = blocks_of("service", "console")
    shell.run(start)
    fill_service(shell)
    said = shell.run(asked)
    assert f"{PAGES} pages of {PAGES} can be resumed" in said[1], "the whole prompt can be restored"
    shell.wait_stopped()  # the last command has told it to end

    write_certificates(tmp_path)
    (settings,) = blocks_of("service", "toml")
    (tmp_path / "service.toml").write_text(shell.placed(settings.text), encoding="utf-8")
    shown, _ = shell.run(configured)
    assert 'trust_domain = "cluster.example"' in shown

    revoke_what_was_made(shell, tokens)


def test_an_operator_can_do_what_the_guide_says(shell: DocumentShell, tmp_path: Path) -> None:
    (tmp_path / "service.toml").write_text(f'storage = "file:{tmp_path / "kv"}"\n', encoding="utf-8")
    (tmp_path / "tokens").touch(mode=0o600)
    shell.call(["unified-cache", "serve", "--config", "service.toml"])
    shell.places["3f2a"] = fill_service(shell)
    for block in blocks_of("operate", "console"):
        if "token revoke" in block.text:
            list_, new, revoke = block.text.splitlines()
            revoke_what_was_made(shell, CodeBlock("console", f"{new}\n{list_}\n{revoke}"))
        elif "mooncake://" not in block.text:
            shell.run(block)
            if "drain" in block.text:
                shell.wait_stopped()
        if "clear" in block.text and "--all" not in block.text:
            fill_service(shell)  # as engines do, so that what follows has something to do
    said = json.loads(shell.call(["unified-cache", "ping", f"grpc://{ENDPOINT}", "--json"]))
    assert said["servers"][0]["stored_bytes"] == 0, "the last command has cleared everything"


def test_the_first_service_of_the_document_on_deployment_answers(shell: DocumentShell) -> None:
    first, *_ = blocks_of("deploy", "console")
    assert "default" in shell.run(first)[1]


def test_the_blocks_of_the_document_on_embedding_run(monkeypatch: pytest.MonkeyPatch) -> None:
    collectors: list[object] = []
    monkeypatch.setattr(REGISTRY, "register", collectors.append)
    toy = engine_on(MemoryStorage(), LAYOUT)
    names: dict[str, object] = {"cache": toy.cache}
    for block in blocks_of("embedding", "python"):
        exec(compile(block.text, "docs/embedding.md", "exec"), names)
    assert len(collectors) == 1
    assert names["identity"] == Identity("model", revision="r2", generation=1)
    toy.cache.close()


def test_the_engine_of_the_document_on_events_publishes() -> None:
    toy = engine_on(MemoryStorage(), LAYOUT)
    (block,) = blocks_of("events", "python")
    ports = iter(free_ports(2))
    program = re.sub(r"10\.0\.0\.1:\d+", lambda _: f"127.0.0.1:{next(ports)}", block.text)
    assert "\n...\n" in program
    names: dict[str, object] = {"cache": toy.cache, "serve": lambda: toy.serve(prompt_of(3, 7))}
    exec(compile(program.replace("\n...\n", "\nserve()\n"), "docs/events.md", "exec"), names)
    publisher = names["publisher"]
    assert isinstance(publisher, EventPublisher)
    assert publisher.counts().pages > 0
    toy.cache.close()


@needs_mooncake
@pytest.mark.long
def test_the_commands_of_the_document_on_clusters_work(shell: DocumentShell, tmp_path: Path) -> None:
    _, local, replayed, _ = blocks_of("cluster", "console")
    rpc, admin = free_ports(2)
    url = f"mooncake://127.0.0.1:{rpc}?admin=127.0.0.1:{admin}"
    *programs, last = (line.removeprefix("$ ") for line in local.text.splitlines())
    with cluster_running(programs, rpc, admin, tmp_path):
        shell.places |= {f"mooncake://{MASTER}": url, f"mooncake://{ENDPOINT}": url}
        shell.places["traces/"] = f"{ROOT / 'traces'}/"
        shell.call(shlex.split(last))
        (replay,) = command_lines(replayed)
        shell.call([*replay, "--limit", "20", "--page-bytes", "512"])
        (stat,) = (block for block in blocks_of("operate", "console") if "mooncake://" in block.text)
        shell.run(stat)
        *_, served = blocks_of("deploy", "console")
        Path("service.toml").touch()
        shell.run(served)
        shell.stop()


def demos() -> list[list[str]]:
    text = (ROOT / "docs/embedding.md").read_text(encoding="utf-8")
    blocks = (block for block in code_blocks(text) if block.text.startswith("unified-cache demo"))
    return [words for block in blocks for words in command_lines(block)]


@pytest.mark.long
@pytest.mark.parametrize("words", demos(), ids=" ".join)
def test_the_demos_of_the_documents_run(words: list[str], shell: DocumentShell) -> None:
    assert "0 words differ" in shell.call(words)


@needs_mooncake
@pytest.mark.long
def test_two_engines_share_a_cluster_through_a_service_as_the_readme_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = (block for block in code_blocks(text) if "two_engines.py" in block.text)
    port, metrics, rpc, admin, node = free_ports(5)
    script = (
        block.text.replace(":50051", f":{port}")
        .replace("serve --storage", f"serve --listen 127.0.0.1:{port} --storage")
        .replace("examples/", f"{ROOT / 'examples'}/")
        .replace("--metrics_host=127.0.0.1 &", f"--metrics_host=127.0.0.1 --metrics_port={admin} &")
        .replace("--global_segment_size=256MB &", f"--global_segment_size=64MB --port={node} &\n{joined(admin)}")
        .replace("mooncake://127.0.0.1:50061", f"'mooncake://127.0.0.1:50061?admin=127.0.0.1:{admin}'")
        .replace("50061", str(rpc))
        .replace(
            "python examples", f"until unified-cache ping grpc://127.0.0.1:{port}; do sleep 0.2; done\npython examples"
        )
    )
    said = ran(tmp_path, script, {"UNIFIED_CACHE_SERVE_METRICS__LISTEN": f"127.0.0.1:{metrics}"})
    assert "engine 2: 240 tokens from storage" in said


def joined(admin: int) -> str:
    """Return the line of a script that waits until a master counts on a node."""
    return f"until curl --silent http://127.0.0.1:{admin}/get_all_segments | grep .; do sleep 0.1; done"


@contextmanager
def cluster_running(commands: Sequence[str], rpc: int, admin: int, directory: Path) -> Iterator[None]:
    """Run the document's master and node at ports of this test, until both are there; then end them."""
    (node,) = free_ports(1)
    master_command, node_command = commands
    script = (
        master_command.replace("mooncake_master", f"mooncake_master --rpc_port={rpc} --metrics_port={admin}"),
        node_command.replace(ENDPOINT, f"127.0.0.1:{rpc}").replace("1GB", f"64MB --port={node}"),
        f"{joined(admin)} && read -r",
        "kill %1 %2",
    )
    with subprocess.Popen(
        ["bash", "-mc", "\n".join(script)], cwd=directory, env=with_programs(directory), stdin=-1, stdout=-1, text=True
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline().startswith("127.0.0.1:")
        yield
        running.communicate("\n", timeout=TIMEOUT_S)


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
