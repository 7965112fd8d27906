"""Every block of code of the documents is run, and where; what cannot be run here is listed with the reason."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.documents import code_blocks

OPERATING = "tests/e2e/test_operating_documents.py"
GUIDES = "tests/e2e/test_documents_run.py::test_the_commands_of_a_guide_run"
SGLANG = "tests/engines/sglang/document.py::execute"
VLLM = "tests/engines/vllm/check_serve.py"
SERVICE = f"{OPERATING}::test_the_commands_and_settings_of_the_document_on_the_service_work"
OPERATE = f"{OPERATING}::test_an_operator_can_do_what_the_guide_says"
CLUSTER = f"{OPERATING}::test_the_commands_of_the_document_on_clusters_work"
BUCKET = "tests/e2e/test_object_commands.py::test_the_commands_of_the_document_on_a_bucket_work"
DEMOS = f"{OPERATING}::test_the_demos_of_the_documents_run"
LAYOUTS = (
    "tests/unit/components/test_layout_document.py::"
    "test_the_blocks_of_the_document_on_layouts_run_in_order_in_one_namespace"
)
RELEASE = "scripts/release.py::try_out"
"""``make release`` runs the commands of README.md over what was built, but for those that it lists as left out."""

RUN: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "README.md": {
        "tests/unit/repository/test_documents.py::test_the_examples_of_the_readme_run_in_order_in_one_namespace": (
            "import torch",
        ),
        RELEASE: (
            "unified-cache replay",
            "unified-cache layout",
            "unified-cache storage",
            "unified-cache backup",
            "unified-cache conformance",
        ),
        f"{OPERATING}::test_two_engines_share_a_cluster_through_a_service_as_the_readme_says": (
            "mooncake_master --rpc",
        ),
    },
    "docs/cluster.md": {
        CLUSTER: ("$ mooncake_master", "$ unified-cache replay"),
    },
    "docs/configuration.md": {"tests/unit/settings/test_description.py::test_the_blocks_of_the_document_run": ("",)},
    "docs/deploy.md": {
        f"{OPERATING}::test_the_first_service_of_the_document_on_deployment_answers": (
            "unified-cache serve --storage packed:",
        ),
        "tests/e2e/test_deploy_document.py": ("openssl req", "unified-cache ping 'grpcs://"),
        CLUSTER: ("unified-cache serve --config service.toml --storage mooncake:",),
        BUCKET: ("unified-cache conformance s3:", "unified-cache storage gc s3:"),
    },
    "docs/embedding.md": {
        DEMOS: ("unified-cache demo",),
        f"{OPERATING}::test_the_blocks_of_the_document_on_embedding_run": (
            "from prometheus_client",
            "from unified_cache import Extent",
            "identity = ",
        ),
    },
    "docs/events.md": {
        f"{OPERATING}::test_the_engine_of_the_document_on_events_publishes": ("from unified_cache.observe.events",),
        "tests/e2e/test_examples.py::test_kv_events_show_the_pages_of_each_tier": ("$ python examples/kv_events.py\n",),
    },
    "docs/is-it-working.md": {
        "tests/e2e/test_documents_run.py::test_the_programs_of_the_page_on_whether_it_works_say_what_it_promises": (
            "import torch",
            "from unified_cache import Namespace",
        ),
        "tests/e2e/test_faithful.py::test_the_line_of_the_document_writes_a_file_for_a_bug": (
            "unified-cache faithful",
        ),
        GUIDES: ("seq 1024",),
    },
    "docs/layouts.md": {LAYOUTS: ("",)},
    "docs/from-another-cache.md": {GUIDES: ("",)},
    "docs/live.md": {"tests/e2e/test_live_document.py": ("",)},
    "docs/traces.md": {"tests/e2e/test_traces_document.py": ("",)},
    "docs/planning.md": {GUIDES: ("",)},
    "docs/policies.md": {
        GUIDES: ("$ unified-cache replay",),
        "tests/unit/core/test_transfer_policy.py::test_the_blocks_of_the_document_on_policies_run": (
            "from unified_cache import CacheConfig",
            "operation = cache.prefetch",
        ),
    },
    "docs/operate.md": {
        OPERATE: (
            "unified-cache ping",
            "unified-cache storage stat grpc://127.0.0.1:50051 --json",
            "unified-cache storage gc",
            "unified-cache storage clear grpc://127.0.0.1:50051 --identity",
            "unified-cache serve --config service.toml --print-config",
            "unified-cache drain",
            "unified-cache serve --config service.toml\n",
            "unified-cache backup grpc:",
            "unified-cache backup file:",
            "unified-cache token",
            "unified-cache storage scrub",
            "unified-cache storage clear grpc://127.0.0.1:50051 --all",
        ),
        CLUSTER: ("unified-cache storage stat mooncake:",),
    },
    "docs/retention.md": {GUIDES: ("",)},
    "docs/service.md": {
        SERVICE: (
            "unified-cache serve --storage",
            "# service.toml",
            "unified-cache serve --config",
            "unified-cache token",
            "unified-cache ping",
        ),
    },
    "docs/sglang.md": {SGLANG: ("",)},
    "docs/sizing.md": {GUIDES: ("",)},
    "docs/troubleshooting.md": {GUIDES: ("",)},
    "docs/vllm.md": {VLLM: ("",)},
}
"""By document: who runs a block, and how the block begins; all of them where it says nothing."""

NOT_RUN: Mapping[str, Mapping[str, str]] = {
    "README.md": {
        "pip install": "asks the package index, which has no such package; make release installs from the wheel",
        "make run": "the project's own entry points, which hold this test",
    },
    "CONTRIBUTING.md": {"$ make quick": "the project's own entry points, which hold this test"},
    "docs/cluster.md": {
        "$ apt-get install": "changes the machine; make test has scripts/system_libraries.py do it, where it may",
        "# /etc/systemd/system/mooncake-master": "needs systemd as the first process; test_deploy.py checks units",
    },
    "docs/deploy.md": {
        "python3 -m venv /opt": "writes to /opt and asks the package index; make release does it elsewhere",
        "install -m 0644": "changes the machine, and needs systemd as the first process",
        "make release": "builds for minutes, and then needs podman",
        "kubectl": "needs a cluster; test_deploy.py holds the manifests against the published schemas",
        "aws s3api": "needs an account; the test of the other commands reads its rule",
        "/opt/unified-cache/bin/pip": "changes the machine, and needs systemd as the first process",
    },
}
"""By document: how a block begins that cannot be run here, and why."""


def blocks(path: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return [block.text for block in code_blocks(text) if block.language != "mermaid"]


def documents_with_blocks() -> list[str]:
    paths = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    return sorted(name for path in paths if blocks(name := str(path.relative_to(ROOT))))


def beginnings(document: str) -> Iterator[str]:
    for found in RUN.get(document, {}).values():
        yield from found
    yield from NOT_RUN.get(document, ())


@pytest.mark.parametrize("document", documents_with_blocks())
def test_every_block_is_run_by_somebody_or_listed_with_a_reason(document: str) -> None:
    known = list(beginnings(document))
    for block in blocks(document):
        assert [each for each in known if block.startswith(each)], f"{document}: who runs this?\n{block}"
    for each in filter(None, known):
        found = [block for block in blocks(document) if block.startswith(each)]
        assert len(found) == 1, f"{document}: {each!r} must begin one block, found {len(found)}"


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("document", sorted({*RUN} & {*documents_with_blocks()}))
def test_who_runs_a_block_is_there(document: str) -> None:
    for runner in RUN[document]:
        path, _, name = runner.partition("::")
        assert functions(ROOT / path) >= ({name} if name else set()), runner
