"""``unified-cache samples``: what the documents name is there for whoever installed the package alone."""

import gzip
import tomllib
from pathlib import Path

import pytest

from tests.sources import ROOT
from unified_cache.cli.demo import DEFAULT_DOCUMENT
from unified_cache.cli.main import run
from unified_cache.cli.samples import SAMPLES

TRACES = ROOT / "traces"
REQUESTS = 1000


def test_the_short_trace_is_the_beginning_of_the_whole_one() -> None:
    with gzip.open(TRACES / "mooncake_conversation.jsonl.gz") as whole:
        lines = [next(whole) for _ in range(REQUESTS)]
    assert gzip.decompress((TRACES / "mooncake_conversation_1000.jsonl.gz").read_bytes()) == b"".join(lines)


def test_samples_are_copied_whole_and_nothing_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["samples", str(tmp_path / "new" / "place")]) == 0
    copied = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(copied) > 5
    for file in copied:
        assert file.read_bytes() == (ROOT / file.relative_to(tmp_path / "new" / "place")).read_bytes()
    copied[0].write_text("mine")
    for file in copied[1:]:
        file.unlink()
    assert run(["samples", str(tmp_path / "new" / "place")]) == 2
    assert str(copied[0]) in capsys.readouterr().err
    assert copied[0].read_text() == "mine"
    assert not copied[1].exists()


def test_the_wheel_has_every_sample() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    included: dict[str, str] = hatch["build"]["targets"]["wheel"]["force-include"]
    assert included == {name: f"unified_cache/samples/{name}" for name in (*SAMPLES, DEFAULT_DOCUMENT)}
