"""Each command's output, in words, as JSON and where it refuses, is that of its file in ``tests/golden``.

A file is what a terminal shows: lines that begin with ``$``, each with its output and any exit status but 0. They
run in one directory, in their order; ``| grep TEXT`` and ``| head -N`` keep some lines of an output. What differs from
run to run is masked by ``MASKS``. To add a line, write the command alone; to write all outputs anew:

    WRITE_GOLDEN=1 python -m pytest tests/e2e/test_golden.py
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from pprint import pformat
from shutil import copytree

import pytest

from tests.e2e.test_help import commands
from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, TOY, fill, flip, open_store
from tests.support.running_service import running
from tests.support.toy_completions import toy_server
from unified_cache.core.page import Namespace, Prompt
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec
from unified_cache.core.window import SPAN_ALL, SPAN_UNKNOWN
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import listing

GOLDEN = ROOT / "tests" / "golden"
WRITES = "WRITE_GOLDEN" in os.environ
DOCUMENT = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
SHOWN_ELSEWHERE = "demo"
"""The file of the command that runs for long: test_demo.py runs it."""
SERVICE = "grpc://SERVICE"
COMPLETIONS = "http://SERVICE"
TOKENS = {name: list(range(first, first + PAGES * PAGE_SIZE)) for name, first in (("one", 0), ("two", 5000))}
REQUEST = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'

SEVERAL_LAYOUT = ModelLayout(
    PAGE_SIZE,
    (
        Component("full", SPAN_ALL, (PoolSpec("kv", 96),)),
        Component("swa", SPAN_UNKNOWN, (PoolSpec("swa", 40),)),
        Component("state", 1, (PoolSpec("state", 8),), page_size=2),
    ),
)
SEVERAL = (
    Identity("/models/a", facts=(("hash", "sha256"), ("weights", "77"))),
    Identity("another", "2", "float8_e4m3", facts=(("hash", "sha256"), ("weights", "77"))),
    Identity("/models/b", facts=(("weights", "77"),)),
)
"""Identities of one store; each is told from the most similar one before it."""

FILES: Mapping[str, str] = {
    "prompts.jsonl": "\n".join(map(json.dumps, TOKENS.values())),
    "one.txt": " ".join(map(str, TOKENS["one"])),
    "longer.json": json.dumps([*TOKENS["one"], *range(9000, 9000 + 2 * PAGE_SIZE)]),
    "words.txt": "four furlongs",
    "bad.jsonl": f"{REQUEST}\n{REQUEST.replace('[1, 2]', '[1]')}\n",
    "explained.toml": 'host_bytes = "64GiB"\ndevice_bytes = "8GiB"\n\n[eviction]\n'
    "device = 'priority'\n\n[quota.tenants.acme]\ncalls_max = 4\n\n[quota.tenants.beta]\n\n[serve]\ninsecure = true\n",
    "misspelt.toml": "\nlistn = 3\n[guard]\ndeadline_s = 'x'\n",
    "sound.toml": 'device_bytes = "1GiB"\nhost_bytes = "2GiB"\nstorage = "memory:"\nstorage_bytes = "4GiB"\n',
    "elsewhere.toml": 'storage = "redis://h"\n',
    "no-host.toml": 'storage = "file:kv"\ndevice_pages = 9\n',
    "no-key.toml": '[tls]\ncertificate = "none.crt"\nkey = "none.key"\n',
    "quiet.toml": "metrics.listen = '127.0.0.1:0'\n",
    "tenants.toml": "[quota.tenants.a]\n",
    "unknown.json": '{"model_type": "qwen33", "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64,'
    ' "torch_dtype": "bfloat16", "architectures": ["Qwen33ForCausalLM"]}',
}
"""Files that the commands read."""

MASKS = (
    (re.compile(r"in [0-9.]+ s(: [0-9,]+ requests/s)?"), "in SECONDS"),
    (re.compile(r"requests per s .*"), "requests per s …"),
    (re.compile(r"(?<=  )[0-9]+\.[0-9]+$", re.MULTILINE), "…"),
    (re.compile(r"UNAVAILABLE: .*"), "UNAVAILABLE: …"),
    (re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]+Z"), "DATE"),
    (re.compile(r"\.[0-9]+\.part"), ".PID.part"),
    (re.compile(r"uc1_[0-9a-f]+_[0-9a-f]+"), "SECRET"),
    (re.compile(r"(?<![.0-9a-f])[0-9a-f]{16}\b"), "ID"),
    (re.compile(r"the tiers need .*"), "the tiers need …"),
    (re.compile(r"the core ran .*\n"), ""),
)
"""What differs from run to run or from machine to machine, and what stands in its place."""

MASKED_FIELDS = frozenset({"seconds", "requests_per_s", "environment"})
ENTRIES_MAX = 2
"""Objects of a list that are shown of JSON."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with stores, a trace and ``FILES``; each golden file has a copy."""
    path = tmp_path_factory.mktemp("golden")
    prompts = [Prompt.of(tokens, PAGE_SIZE, whole=True) for tokens in TOKENS.values()]
    tenants = [Prompt.of(TOKENS["one"], PAGE_SIZE, Namespace(tenant="acme"), whole=True)]
    for kind, name, layout in (
        *(("file", name, "full_swa") for name in ("store", "flawed", "unnamed", "incomplete")),
        *(("file", "mixed", layout) for layout in ("full", "full_swa")),
        ("packed", "packed", "full_swa"),
    ):
        fill(open_store(kind, path / name), LAYOUTS[layout], prompts)
    fill(open_store("file", path / "tenants"), LAYOUTS["full"], tenants)
    digest = TOY.digest(LAYOUTS["full_swa"])
    with closing(open_store("file", path / "flawed")) as storage:
        flip(storage, min(listing(storage, digest)))
    with closing(open_store("file", path / "incomplete")) as storage:
        last = prompts[0].keys[-1]
        storage.remove([each.label for each in listing(storage, digest) if each.label[1:] == (last, "toy1")])
    with closing(open_store("file", path / "several")) as storage:
        for identity in SEVERAL:
            storage.register(manifest_of(identity, SEVERAL_LAYOUT), {})
    (path / "unnamed" / digest.hex() / "manifest.json").unlink()
    (path / "trace.jsonl.gz").symlink_to(ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz")
    for name, text in FILES.items():
        (path / name).write_text(text, encoding="utf-8")
    return path


@contextmanager
def service() -> Iterator[str]:
    """Run a service that holds a prompt; yield its address."""
    with running(access={"local_role": "admin"}) as server:
        prompts = [Prompt.of(TOKENS["one"], PAGE_SIZE, whole=True)]
        fill(open_storage(f"grpc://{server.address}"), LAYOUTS["full"], prompts)
        yield server.address


@contextmanager
def completions() -> Iterator[str]:
    """Run a server of completions; yield its address."""
    with toy_server() as url:
        yield url.removeprefix("http://")


def shortened(value: object) -> object:
    """Return JSON without what differs from run to run, and with the first objects of each list."""
    if isinstance(value, list):
        some = value[:ENTRIES_MAX] if value and isinstance(value[0], dict) else value
        return [*map(shortened, some), *(["…"] if len(some) < len(value) else [])]
    if isinstance(value, dict):
        return {name: "…" if name in MASKED_FIELDS else shortened(each) for name, each in value.items()}
    return value


def shown(line: str, address: str) -> str:
    """Run a line; return what a terminal shows, masked."""
    command, _, pipe = line.partition(" | ")
    words = [word.replace("SERVICE", address) for word in shlex.split(command)[2:]]
    said = ask(*words)
    text = said.out
    if "--json" in words and text:
        found = json.loads(text)
        check_fields(found)
        text = pformat(shortened(found), width=120, compact=True, sort_dicts=False) + "\n"
    text += said.err + (f"[status {said.status}]" if said.status else "")
    lines = text.splitlines()
    if pipe.startswith("grep"):
        lines = [each for each in lines if pipe.removeprefix("grep ") in each]
    elif pipe:
        lines = lines[: int(pipe.removeprefix("head -"))]
    text = "".join(f"{each.rstrip()}\n" for each in lines).replace(address or "SERVICE", "SERVICE")
    masked = text
    for pattern, instead in MASKS:
        masked = pattern.sub(instead, masked)
    # Columns are as wide as what is masked by dots.
    return masked if masked.count("…") == text.count("…") else re.sub("─+", "─", re.sub("(?<=[^ ]) {2,}", "  ", masked))


def check_fields(found: Mapping[str, object]) -> None:
    """See that docs/json.md names every field that a command's JSON has, and those of the entries of its lists."""
    assert (list(found)[:2], found["format"]) == (["command", "format"], 1)
    command = str(found["command"])
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("|") and f"`{command}`" in line.split("|")[1]]
    if command == "prefetch":
        rows += [line for line in DOCUMENT.splitlines() if line.startswith("| `backup`")]
    lists = [] if command in ("replay", "plan") else [each for each in found.values() if isinstance(each, list)]
    fields = {*found, *(field for each in lists for entry in each if isinstance(entry, dict) for field in entry)}
    assert [field for field in fields - {"command", "format"} if f"`{field}`" not in " ".join(rows)] == []


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt") if path.stem != SHOWN_ELSEWHERE))
def test_a_command_says_what_its_golden_file_has(name: str, stores: Path, tmp_path: Path) -> None:
    golden = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    lines = [line for line in golden.splitlines() if line.startswith("$ ")]
    servers = {SERVICE: service, COMPLETIONS: completions}
    server = next((serve for url, serve in servers.items() if url in golden), lambda: nullcontext(""))
    with pytest.MonkeyPatch.context() as patch, server() as address:
        patch.chdir(copytree(stores, tmp_path / "at", symlinks=True))
        patch.setenv("COLUMNS", "100")
        found = "".join(f"{line}\n{shown(line, address)}" for line in lines)
    assert not (tmp_path / "at" / "none").exists(), "what is refused makes no target"
    check_golden(name, found)


def check_golden(name: str, found: str) -> None:
    """See that an output, masked, is that of its file, or write the file anew."""
    file = GOLDEN / f"{name}.txt"
    if WRITES:
        file.write_text(found, encoding="utf-8")
    else:
        assert found == file.read_text(encoding="utf-8")


def test_every_command_has_a_golden_file() -> None:
    named = {path.stem.replace("-", " ") for path in GOLDEN.glob("*.txt")}
    assert set(commands()) == named - {"usage"}
