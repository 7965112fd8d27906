"""``unified-cache faithful`` against vLLM and a model whose answers are words: what a connector mixes up is found.

The device and host memory hold a thousand tokens each, so that what is asked again comes from the tier.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engines.vllm.engine import tiered
from tests.engines.vllm.faults import LogPath
from tests.engines.vllm.installation import engine_python
from tests.engines.vllm.real_model import OPTIONS, real_model, real_variables
from tests.engines.vllm.server import running_server
from tests.sources import ROOT
from unified_cache.cli.main import run

LIES = ("stale", "others", "swapped", "zeros", "short")
DEVICE_BLOCKS = 9
HOST_BYTES = 8 * 6_000_000
"""Of blocks of 128 tokens in float32."""
SKIPPED = ("branches", "aligned", "concurrent", "salts", "device", "host")
ASKED = ("--documents", "1", "--facts", "20", "--answer-tokens", "6", "--host-tokens", "2300")


def server_command(store: Path) -> Sequence[str]:
    """Return the command of a server over a tier that may lie."""
    tier = {
        "type": "LyingTier",
        "module_path": "tests.engines.vllm.lying_tier",
        "url": f"file:{store}",
        "revision": "r",
    }
    options = [option for option in OPTIONS if "max-model-len" not in option]
    return [
        *(str(engine_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(real_model())),
        *(*options, "--max-model-len=768", f"--num-gpu-blocks-override={DEVICE_BLOCKS}"),
        *("--kv-transfer-config", json.dumps(tiered([tier], HOST_BYTES))),
    ]


def check_blocks_that_a_connector_mixes_up_are_found_and_a_sound_one_is_faithful(
    log_path: LogPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lying = tmp_path / "lying"
    lying.write_text("")
    variables = {**real_variables(), "LYING_FILE": str(lying)}
    with running_server(server_command(tmp_path / "store"), variables, ROOT, log_path("server")) as server:
        skipped = [word for name in SKIPPED for word in ("--skip", name)]
        found = {}
        for lie in ("", *LIES, ""):
            lying.write_text(lie)
            found[lie] = run(["faithful", server.url, *ASKED, *skipped])
    with capsys.disabled():
        print(found)  # noqa: T201 - for who compares
    assert found == {"": 0, **dict.fromkeys(LIES, 1)}
