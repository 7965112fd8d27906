"""Generated code demands nothing of whoever loads it."""

from tests.sources import ROOT


def test_generated_code_asks_for_no_version_of_its_runtime() -> None:
    generated = sorted((ROOT / "unified_cache" / "proto").glob("*_pb2.py"))
    assert len(generated) == len(list((ROOT / "proto").rglob("*.proto")))
    for path in generated:
        assert "runtime_version" not in path.read_text(), path.name
