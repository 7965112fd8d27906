"""Without extras the library and the commands over local stores work; other commands name the extra that they need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.unit.repository.test_documents import example_program

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
TIMEOUT_S = 240

Ended = tuple[int, str]
"""Exit status and standard error."""

REFUSED = "from tests.support.base_install import refuse_extras; refuse_extras()"

STORE = "file:store"
REPLAY = ("replay", str(TRACE), "--limit", "20")
WORKING = {
    "layout": ("layout", "deepseek-v4-flash"),
    "replay without bytes": (*REPLAY, "--no-bytes"),
    "replay over files": (*REPLAY, "--storage", STORE),
    "storage stat": ("storage", "stat", STORE),
    "storage verify": ("storage", "verify", STORE),
    "storage gc": ("storage", "gc", STORE),
    "backup": ("backup", STORE, "packed:copy"),
    "conformance": ("conformance", "memory:"),
    "help": ("--help",),
}
"""In this order; later ones use what earlier ones have stored."""

MISSING = {
    "report": (*REPLAY, "--no-bytes", "--report", "report"),
    "transformers": ("demo",),
    "service": ("serve", "--storage", "memory:"),
    "remote": ("ping", "grpc://127.0.0.1:1"),
    "remote, by the URL of a store": ("storage", "stat", "grpc://127.0.0.1:1"),
}
"""By the extra that each command line needs. Mooncake is imported in processes of its own, see ``test_native``."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Run all command lines in one process without extras."""
    lines = WORKING | MISSING
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.base_install"],
        check=True,
        cwd=tmp_path_factory.mktemp("base"),
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
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


def test_every_public_name_and_the_readmes_example_work_without_extras(tmp_path: Path) -> None:
    example = example_program((ROOT / "README.md").read_text(encoding="utf-8"))
    program = (
        f"{REFUSED}\nimport unified_cache\n[getattr(unified_cache, name) for name in unified_cache.__all__]\n{example}"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr
    assert "cache.slots(lock)=array([1, 2, 3, 4]" in result.stdout


def test_the_packages_of_every_extra_are_refused() -> None:
    program = f"{REFUSED.replace('refuse_extras()', 'print(*refuse_extras().packages)')}"
    found = subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, text=True)
    wanted = {"grpc", "prometheus_client", "jinja2", "matplotlib", "pydantic_settings", "cryptography", "transformers"}
    assert wanted <= set(found.stdout.split())
