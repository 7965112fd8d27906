"""The blocks of docs/layouts.md, run in order: what they assert holds."""

from tests.sources import ROOT
from tests.unit.repository.test_documents import example_program

DOCUMENT = "docs/layouts.md"


def test_the_blocks_of_the_document_on_layouts_run_in_order_in_one_namespace() -> None:
    program = example_program((ROOT / DOCUMENT).read_text(encoding="utf-8"))
    namespace: dict[str, object] = {}
    exec(compile(program, DOCUMENT, "exec"), namespace)
    assert "lock" in namespace
