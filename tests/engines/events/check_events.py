"""vLLM's and SGLang's own decoders read of our events what the structs of ``tests.support.events`` read."""

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.engines.sglang.install import installation
from tests.engines.vllm.installation import home as vllm_home
from tests.support.events import SglangBatch, VllmBatch
from tests.unit.events.test_encoding import encoded
from unified_cache.observe.events.encoding import Consumer

PROGRAM = """
import importlib, json, os, sys, types
import msgspec

module, wheel = sys.argv[1], os.environ.get("SGLANG_WHEEL")
if wheel is not None:
    # The packages around it would bring kernels and tokenizers that a CPU lacks.
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
batch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=importlib.import_module(module).KVEventBatch)
events = [{"type": type(each).__name__, **msgspec.structs.asdict(each)} for each in batch.events]
print(json.dumps([batch.ts, events], default=bytes.hex))
"""
"""Decodes a batch with the class of an engine's module, in the interpreter that has the engine."""


def decoded_by_engine(consumer: Consumer, payload: bytes) -> tuple[float, list[dict[str, object]]]:
    """Have an engine decode a batch where ``make e2e-vllm`` or ``make e2e-sglang`` installs it."""
    if consumer is Consumer.VLLM:
        python, module, variables = vllm_home() / "venv/bin/python", "vllm.distributed.kv_events", {}
    else:
        found = installation()
        python, module = found.python, "sglang.srt.disaggregation.kv_events"
        variables = {"SGLANG_WHEEL": str(found.wheel), "PYTHONPYCACHEPREFIX": str(found.root / "pyc")}
    if not Path(python).exists():
        pytest.skip(f"{python} is not there: make e2e-{consumer.value} installs it")
    command = [str(python), "-W", "ignore", "-c", PROGRAM, module]
    ended = subprocess.run(command, input=payload, check=True, env=os.environ | variables, stdout=-1, timeout=300)
    at_s, events = json.loads(ended.stdout.splitlines()[-1])
    return at_s, events


@pytest.mark.parametrize(("consumer", "batch"), [(Consumer.VLLM, VllmBatch), (Consumer.SGLANG, SglangBatch)])
def check_an_engines_own_decoder_reads_our_events(consumer: Consumer, batch: type[VllmBatch | SglangBatch]) -> None:
    payload = encoded(consumer)
    at_s, events = decoded_by_engine(consumer, payload)
    expected = msgspec.msgpack.decode(payload, type=batch)
    assert (at_s, len(events)) == (expected.ts, len(expected.events))
    for found, ours in zip(events, expected.events, strict=True):
        fields = {"type": ours.__struct_config__.tag, **msgspec.structs.asdict(ours)}
        plain = json.loads(json.dumps(fields, default=bytes.hex))
        assert found == {name: plain[name] for name in found}
