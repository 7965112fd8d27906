"""Without extras the commands over local stores work; whatever else is called or imported names the extra it needs."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.documents import program_of
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill, open_store
from unified_cache.core.page import Prompt

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
TIMEOUT_S = 240
TOKENS = range(PAGES * PAGE_SIZE)

Ended = tuple[int, str]
"""Exit status and standard error."""

REFUSED = "from tests.support.base_install import refuse_extras; refuse_extras({})"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}

STORE = "file:store"
REPLAY = ("replay", str(TRACE), "--limit", "20")
WORKING = {
    "layout": ("layout", "deepseek-v4-flash"),
    "storage stat": ("storage", "stat", STORE),
    "storage verify": ("storage", "verify", STORE),
    "storage gc": ("storage", "gc", STORE),
    "explain": ("explain", "--storage", STORE, "--tokens", "tokens"),
    "backup": ("backup", STORE, "packed:copy"),
    "conformance": ("conformance", "memory:"),
    "help": ("--help",),
}
"""In this order; later ones use what earlier ones have stored."""

MISSING = {
    "engine": (*REPLAY, "--no-bytes"),
    "demo": ("demo",),
    "faithful": ("faithful", "http://127.0.0.1:1"),
    "report": ("plan", str(TRACE), "--model", "llama-3.1-8b", "--report", "out"),
    "service": ("serve", "--storage", "memory:"),
    "service, for tokens": ("token", "list", "--tokens", "tokens"),
    "remote": ("ping", "grpc://127.0.0.1:1"),
    "remote, by the URL of a store": ("storage", "stat", "grpc://127.0.0.1:1"),
    "object, by the URL of a store": ("storage", "stat", "s3://bucket/kv"),
}
"""By the extra that each command line needs. Mooncake is imported in processes of its own, see ``test_native``."""

IMPORTS = {
    "from unified_cache import UnifiedCache": ("unified_cache.UnifiedCache", "engine"),
    "from unified_cache import open_storage; open_storage('grpc://127.0.0.1:1')": ("grpc:", "remote"),
    "import unified_cache.cache.cache": ("unified_cache.controller.memory", "engine"),
    "import unified_cache.forward": ("unified_cache.forward", "engine"),
    "import unified_cache.controller.ranks.gloo": ("unified_cache.controller.ranks.gloo", "engine"),
    "import unified_cache.storage_backends.wrappers.metered": ("MeteredStorage", "metrics"),
    "import unified_cache.sizing.demo.run": ("the demo", "demo"),
    "import unified_cache.integrations.transformers": ("unified_cache.integrations.transformers", "transformers"),
    "import unified_cache.testing.tiny_models": ("unified_cache.testing.tiny_models", "transformers"),
    "import unified_cache.observe.events.config": ("unified_cache.observe.events", "events"),
    "import unified_cache.observe.live.page": ("metrics and the live page", "metrics"),
    "import unified_cache.service.server": ("the service", "service"),
    "import unified_cache.storage_backends.remote.store": ("grpc:", "remote"),
    "import unified_cache.storage_backends.object.store": ("s3:, gs: or az:", "object"),
}
"""Line that fails without extras: what says so of itself, and the extra that it names."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Run all command lines in one process without extras."""
    lines = WORKING | MISSING
    directory = tmp_path_factory.mktemp("base")
    with closing(open_store("file", directory / "store")) as storage:
        fill(storage, LAYOUTS["full"], [Prompt.of(TOKENS, PAGE_SIZE)])
    (directory / "tokens").write_text(" ".join(map(str, TOKENS)), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.base_install"],
        check=True,
        cwd=directory,
        env=ENVIRONMENT,
        input=json.dumps(list(lines.values())),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    answers = [tuple(each) for each in json.loads(result.stdout)]
    return dict(zip(lines, answers, strict=True))


@pytest.mark.parametrize("name", WORKING)
def test_a_command_over_local_stores_works_without_extras(ended: dict[str, Ended], name: str) -> None:
    status, errors = ended[name]
    assert status == 0, errors


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_extra_is_named_in_one_line(ended: dict[str, Ended], name: str) -> None:
    status, errors = ended[name]
    assert status == 2
    assert f"pip install 'unified-cache[{name.partition(',')[0]}]'" in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("line", IMPORTS)
def test_an_import_names_the_extra_that_is_missing(line: str, imported: dict[str, str]) -> None:
    purpose, extra = IMPORTS[line]
    assert imported[line].startswith(f"MissingExtraError: {purpose} needs ")
    assert imported[line].endswith(f", which is not installed: pip install 'unified-cache[{extra}]'")


@pytest.fixture(scope="module")
def imported() -> dict[str, str]:
    """Try all lines in one process without extras; return what each raises."""
    program = f"""
import json
{REFUSED.format("")}
found = {{}}
for line in {list(IMPORTS)!r}:
    try:
        exec(line)
    except ImportError as error:
        found[line] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return dict(json.loads(done.stdout))


def run_to_the_end(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a directory; return how it ended."""
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, check=False, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_every_public_name_and_the_readmes_example_work_with_torch_alone(tmp_path: Path) -> None:
    example = program_of((ROOT / "README.md").read_text(encoding="utf-8"))
    program = (
        f"{REFUSED.format(repr('engine'))}\n"
        f"import unified_cache\n[getattr(unified_cache, name) for name in unified_cache.__all__]\n{example}"
    )
    for printed in ("none; computed: 4", "3 from storage; computed: 1"):  # cold, and in a second process
        result = run_to_the_end(program, tmp_path)
        assert result.returncode == 0, result.stderr
        assert printed in result.stdout


def test_the_packages_of_every_extra_are_refused_but_for_those_kept() -> None:
    wanted = {"grpc", "prometheus_client", "jinja2", "cryptography", "transformers"}
    assert wanted | {"torch"} <= refused_packages("")
    assert "torch" not in refused_packages("'engine'")
    assert wanted <= refused_packages("'engine'")


def refused_packages(kept: str) -> set[str]:
    program = REFUSED.format(kept).replace("; ", "; print(*") + ".packages)"
    found = subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, text=True)
    return set(found.stdout.split())
