"""``unified-cache faithful`` against vLLM and a model whose answers are words: what a connector mixes up is found.

The device and host memory hold some hundred tokens each, so that what is asked again comes from the tier.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.engines.vllm.engine import connected, tiered
from tests.engines.vllm.faults import LogPath
from tests.engines.vllm.installation import engine_python
from tests.engines.vllm.real_model import OPTIONS, real_model, real_variables
from tests.engines.vllm.server import running_server
from tests.support.cluster import ask
from unified_cache.cli.main import run

LIES = ("stale", "others", "swapped", "zeros", "short")
BLOCK_TOKENS = 32
DEVICE_BLOCKS = 22
"""More than the cold answers to a document fill."""
HOST_BYTES = 16 * 1_500_000
"""Of blocks in float32."""
SKIPPED = ("branches", "concurrent", "salts", "device", "host")
ASKED = ("--documents", "1", "--facts", "5", "--host-tokens", "640")

IN_DEVICE = ("device", "branches", "concurrent", "salts")
BEYOND = ("host", "storage")
"""Phases in which a server without any tier has no hits."""
RESTARTING = 'while "$@"; do :; done'
"""Starts a command again when it has ended as it was asked to."""


def server_command(transfer: Mapping[str, object] | None) -> Sequence[str]:
    """Return the command of a server with this ``--kv-transfer-config``."""
    options = [option for option in OPTIONS if "max-model-len" not in option]
    return [
        *(str(engine_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(real_model())),
        *(*options, "--max-model-len=512"),
        *(f"--block-size={BLOCK_TOKENS}", f"--num-gpu-blocks-override={DEVICE_BLOCKS}"),
        *(() if transfer is None else ("--kv-transfer-config", json.dumps(transfer))),
    ]


def lying_tier(store: Path) -> Mapping[str, object] | None:
    """Configure vLLM with a tier that may lie."""
    tier = {
        "type": "LyingTier",
        "module_path": "tests.engines.vllm.lying_tier",
        "url": f"file:{store}",
        "revision": "r",
    }
    return tiered([tier], HOST_BYTES)


def check_blocks_that_a_connector_mixes_up_are_found_and_a_sound_one_is_faithful(
    log_path: LogPath, tmp_path: Path
) -> None:
    lying = tmp_path / "lying"
    lying.write_text("")
    variables = {**real_variables(), "LYING_FILE": str(lying)}
    found: dict[str, int] = {}
    with running_server(server_command(lying_tier(tmp_path / "store")), variables, log_path("server")) as server:
        skipped = [word for name in SKIPPED for word in ("--skip", name)]
        for lie in ("", *LIES, ""):
            lying.write_text(lie)
            found[lie] = run(["faithful", server.url, *ASKED, *skipped])
    assert found == {"": 0, **dict.fromkeys(LIES, 1)}


@pytest.mark.parametrize("has_tier", [False, True])
def check_a_sound_server_is_never_called_unfaithful(has_tier: bool, log_path: LogPath, tmp_path: Path) -> None:
    settings = {"on_reset": "keep", "cpu_bytes_to_use": HOST_BYTES}
    transfer = connected(settings, f"file:{tmp_path / 'store'}") if has_tier else None
    command = ["bash", "-c", RESTARTING, "restarting", *server_command(transfer)]
    beyond = "faithful" if has_tier else "cannot tell"
    expected = dict.fromkeys(IN_DEVICE, "faithful") | dict.fromkeys(BEYOND, beyond)
    with running_server(command, real_variables(), log_path("server")) as server:
        restart = f"bash -c 'child=$(pgrep -P {server.pid}) && kill $child && tail --pid=$child -f /dev/null'"
        for options in ((), ("--restart-command", restart)) if has_tier else ((),):
            said = ask("faithful", server.url, *ASKED, *options, "--json")
            found = {phase["name"]: phase["verdict"] for phase in json.loads(said.out)["phases"]}
            assert {"restart": "faithful", **found} == expected | {"restart": "faithful"}
