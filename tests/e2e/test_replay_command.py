"""A replay as a command: JSON and page say the same. What it prints and refuses is in ``tests/golden``."""

import json
from pathlib import Path

from tests.sources import ROOT
from tests.support.cluster import ask

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
MEDIUM = ("--device-pages", "200", "--host-pages", "4000")


def test_the_json_and_the_page_tell_of_one_run(tmp_path: Path) -> None:
    report = tmp_path / "deep" / "report"
    result = ask(
        *("replay", TRACE, "--limit", "400", *MEDIUM, "--storage", f"file:{tmp_path}/store"),
        *("--report", report, "--json"),
    )
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert found["requests"] == 400
    assert set(found["hit_blocks"]) == {"device", "host", "storage"}
    assert min(found["hit_blocks"].values()) > 0
    assert found["block_hit_ratio"] == sum(found["hit_blocks"].values()) / found["blocks"]
    assert found["pages_verified"] == sum(found["hit_blocks"].values())
    assert (found["wrong_pages"], found["leaked_slots"]) == (0, 0)
    assert found["token_hit_ratio"] == sum(found["hit_tokens"].values()) / found["tokens"]
    assert found["missed"]["tokens"] > 0, "a report explains"
    assert [path.name for path in report.iterdir()] == ["index.html"]
    page = (report / "index.html").read_text(encoding="utf-8")
    assert f"<td>{found['hit_tokens']['storage']:,}</td>" in page
    assert f"{found['block_hit_ratio']:.2%} of {found['blocks']:,}" in page
    assert f"<h1>{found['token_hit_ratio']:.2%} of the tokens asked for were handed back" in page
    assert "%" not in result.err, "no progress where nobody watches"


def test_pages_are_blocks_of_the_trace_and_a_block_is_seen_behind_its_own_prefix_alone(tmp_path: Path) -> None:
    prompts = ([1, 2, 3], [2, 3], [1, 2, 3, 4], [2, 3])
    lines = [
        {"chat_id": number, "parent_chat_id": -1, "timestamp": number / 2, "input_length": 16 * len(ids)}
        | {"output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    trace = tmp_path / "bailian.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    replayed = ask("replay", trace, "--no-bytes", "--json")
    assert replayed.status == 0, replayed.err
    found = json.loads(replayed.out)
    assert found["settings"]["page_size"] == 16
    assert sum(found["hit_tokens"].values()) == found["seen_tokens"] == 16 * 5
