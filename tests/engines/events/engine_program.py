"""An engine's own side of KV events, run by the interpreter that has the engine, and by nothing else of ours.

python engine_program.py MODULE ENDPOINT REPLAY_ENDPOINT COUNT
    subscribes, asks for a replay from 0, decodes with the engine's own class, prints COUNT batches as JSON lines
"""

import json
import os
import sys
from importlib import import_module
from types import ModuleType

import msgspec
import zmq

# ruff: noqa: T201 - a program prints to standard output

__all__: list[str] = []

TIMEOUT_MS = 120_000
SEQ_END = (-1).to_bytes(8, "big", signed=True)


def plain(value: object) -> object:
    """Return what JSON can say of a field."""
    if isinstance(value, bytes):
        return value.hex()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def consume(engine: ModuleType, endpoint: str, replay_endpoint: str, count: int) -> None:
    """Read as the engine's consumers do: what was published before by replay, the rest as it comes."""
    decoder = msgspec.msgpack.Decoder(type=engine.KVEventBatch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    for each in (sub, replay):
        each.set(zmq.RCVTIMEO, TIMEOUT_MS)
    sub.connect(endpoint)
    sub.setsockopt_string(zmq.SUBSCRIBE, "")
    replay.connect(replay_endpoint)
    replay.send_multipart((b"", (0).to_bytes(8, "big")))
    batches: dict[int, bytes] = {}
    while True:
        frames = replay.recv_multipart()
        if frames[-2] == SEQ_END:
            break
        batches[int.from_bytes(frames[-2], "big")] = frames[-1]
    print(len(batches), flush=True)
    while len(batches) < count:
        _, seq, payload = sub.recv_multipart()
        batches[int.from_bytes(seq, "big")] = payload
    for number in sorted(batches):
        batch = decoder.decode(batches[number])
        events = [
            {
                "type": type(event).__name__,
                **{name: plain(value) for name, value in msgspec.structs.asdict(event).items()},
            }
            for event in batch.events
        ]
        print(json.dumps({"seq": number, "ts": batch.ts, "events": events}), flush=True)


def events_of(module: str) -> ModuleType:
    """Import an engine's events; of a wheel that is only unpacked, nothing else of it.

    The packages around them would bring kernels and tokenizers that a CPU lacks.
    """
    wheel = os.environ.get("SGLANG_WHEEL")
    if module.startswith("sglang") and wheel is not None:
        for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
            package = ModuleType(name)
            package.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
            sys.modules[name] = package
    return import_module(module)


if __name__ == "__main__":
    name, endpoint, replay_endpoint, count = sys.argv[1:]
    consume(events_of(name), endpoint, replay_endpoint, int(count))
