"""An engine's own side of KV events, run by the interpreter that has the engine, and by nothing else of ours.

python engine_program.py consume MODULE ENDPOINT REPLAY_ENDPOINT COUNT
    subscribes, asks for a replay from 0, decodes with the engine's own class, prints COUNT batches as JSON lines

python engine_program.py publish MODULE ENDPOINT REPLAY_ENDPOINT
    publishes two batches of the engine's own events by the engine's own publisher; ends when standard input does
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


def publish(engine: ModuleType, endpoint: str, replay_endpoint: str) -> None:
    """Tell of four pages on the device and two of them in memory; then that the last one has gone."""
    publisher = engine.ZmqEventPublisher(0, endpoint=endpoint, replay_endpoint=replay_endpoint)
    hashes = [10, 11, 12, 13]
    tokens = list(range(16))
    common = {"block_size": 4, "lora_id": None}
    if engine.__name__.startswith("vllm"):
        common["lora_name"] = None
    host = "CPU" if engine.__name__.startswith("vllm") else "CPU_PINNED"
    stored, removed = engine.BlockStored, engine.BlockRemoved
    events = [
        engine.AllBlocksCleared(),
        stored(block_hashes=hashes, parent_block_hash=None, token_ids=tokens, medium="GPU", **common),
        stored(block_hashes=hashes[:2], parent_block_hash=None, token_ids=tokens[:8], medium=host, **common),
    ]
    publisher.publish(engine.KVEventBatch(ts=1.0, events=events))
    publisher.publish(engine.KVEventBatch(ts=2.0, events=[removed(block_hashes=hashes[3:], medium="GPU")]))
    print("published", flush=True)
    sys.stdin.read()
    publisher.shutdown()


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
    verb, module, *rest = sys.argv[1:]
    if verb == "consume":
        consume(events_of(module), rest[0], rest[1], int(rest[2]))
    else:
        publish(events_of(module), rest[0], rest[1])
