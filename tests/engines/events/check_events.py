"""vLLM's and SGLang's own decoders read our events."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pytest

from tests.engines.sglang.install import installation
from tests.engines.vllm.installation import home as vllm_home
from tests.support.operations import engine, serve, started, tokens
from unified_cache.observe.events.config import EventsConfig
from unified_cache.observe.events.encoding import Consumer
from unified_cache.observe.events.publisher import EventPublisher
from unified_cache.storage_backends.memory import MemoryStorage

PROGRAM = Path(__file__).with_name("engine_program.py")
PAGES = 4


class PrintedEvent(TypedDict):
    """An event as the engine's program prints it."""

    type: str
    medium: str
    group_idx: int
    block_hashes: list[str | int]
    parent_block_hash: str | int | None
    token_ids: list[int]


@dataclass(frozen=True)
class InstalledEngine:
    """Interpreter that has an engine, and the module of its events."""

    python: Path
    module: str
    environment: dict[str, str]

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = [str(self.python), "-W", "ignore", str(PROGRAM), self.module, *arguments]
        program = subprocess.Popen(
            command,
            text=True,
            env=os.environ | self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            yield program
        finally:
            program.kill()
            program.communicate(timeout=30)


def engine_of(consumer: Consumer) -> InstalledEngine:
    """Return an engine where ``make e2e-vllm`` or ``make e2e-sglang`` installs it."""
    if consumer is Consumer.VLLM:
        found = InstalledEngine(vllm_home() / "venv/bin/python", "vllm.distributed.kv_events", {})
    else:
        sglang = installation()
        environment = {"SGLANG_WHEEL": str(sglang.wheel), "PYTHONPYCACHEPREFIX": str(sglang.root / "pyc")}
        found = InstalledEngine(sglang.python, "sglang.srt.disaggregation.kv_events", environment)
    if not found.python.exists():
        pytest.skip(f"{found.python} is not there: make e2e-{consumer.value} installs it")
    return found


def said(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, "the engine's program has died"
    return line


@pytest.mark.parametrize("consumer", Consumer)
def check_an_engines_own_decoder_reads_our_events(consumer: Consumer, tmp_path: Path) -> None:
    toy = engine(MemoryStorage())
    config = EventsConfig(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", consumer=consumer)
    with EventPublisher.open(toy.cache, config) as publisher:
        prompt = serve(toy, PAGES)
        publisher.publish()
        replay = publisher.replay_endpoint
        assert replay is not None
        with engine_of(consumer).running(publisher.endpoint, replay, "4") as program:
            assert int(said(program)) == 1, "the first batch by replay"
            started(toy.cache.backup(prompt))
            toy.cache.wait_all(10)
            publisher.publish()
            toy.cache.reset()
            publisher.publish()
            started(toy.cache.clear_storage())
            toy.cache.wait_all(10)
            publisher.publish()
            batches = [json.loads(said(program)) for _ in range(4)]
    assert [batch["seq"] for batch in batches] == [0, 1, 2, 3]
    is_vllm = consumer is Consumer.VLLM
    keys = [key.hex() if is_vllm else int.from_bytes(key[:8], "big", signed=True) for key in prompt.keys]
    first, backed_up, reset, cleared = (
        [event for event in batch["events"] if not event.get("group_idx")] for batch in batches
    )
    assert first[0]["type"] == "AllBlocksCleared"
    assert [(event["medium"], event["block_hashes"]) for event in joined(first[1:])] == [("GPU", keys)]
    assert [event["token_ids"] for event in joined(first[1:])] == [tokens(PAGES).tolist()]
    names = ["CPU", "STORAGE"] if is_vllm else ["CPU_PINNED", "DISK"]
    assert [(event["type"], event["medium"]) for event in joined(backed_up)] == [
        ("BlockStored", name) for name in names
    ]
    assert all(event["block_hashes"] == keys for event in joined(backed_up))
    assert {(event["type"], event["medium"]) for event in reset} == {
        ("BlockRemoved", "GPU"),
        ("BlockRemoved", names[0]),
    }
    assert [event["type"] for event in cleared] == ["AllBlocksCleared"]


def joined(events: list[PrintedEvent]) -> list[PrintedEvent]:
    """Join runs that continue each other, as nodes of the tree are told apart."""
    found: list[PrintedEvent] = []
    for event in events:
        last = found[-1] if found else None
        if (
            last is not None
            and last["medium"] == event["medium"]
            and event["parent_block_hash"] == last["block_hashes"][-1]
        ):
            last["block_hashes"] += event["block_hashes"]
            last["token_ids"] += event["token_ids"]
        else:
            found.append(event)
    return found
