"""KV events of vLLM with our tier: what the store takes is told as stored, and what it lets go as removed."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.engines.vllm.engine import VllmEngine, prompt_of, running_engine
from tests.support.events import Cleared, VllmBatch, VllmRemoved, VllmStored

RECEIVE_MS = 5_000

STORE_BYTES = 1_500_000
"""Room for a prompt of 25 chunks of one block, 48 KiB each, and for a part of another."""

Event = VllmStored | VllmRemoved | Cleared
Page = tuple[int, object]
"""Group and hash of a page."""


@contextmanager
def listening(endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    """Subscribe to an engine that will publish there."""
    with zmq.Context() as context, closing(context.socket(zmq.SUB)) as socket:
        socket.setsockopt(zmq.RCVTIMEO, RECEIVE_MS)
        socket.subscribe(b"")
        socket.connect(endpoint)
        yield socket


def heard(socket: "zmq.Socket[bytes]") -> Iterator[Event]:
    """Yield what has been published, until nothing comes any more."""
    while socket.poll(RECEIVE_MS):
        _topic, _number, payload = socket.recv_multipart()
        yield from msgspec.msgpack.decode(payload, type=VllmBatch).events


def chunk_files(store: Path) -> set[Page]:
    """Return what a ``file:`` store holds, by the names of its files; events have the end of a hash as a number."""
    found = [path for path in store.rglob("*.g*") if path.is_file()]
    return {(int(path.suffix.removeprefix(".g")), int(path.stem[-16:], 16)) for path in found}


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def check_events_of_the_store_add_up_to_what_it_holds(
    blocks_per_chunk: int, model_path: Callable[[str], Path], log_path: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    settings: dict[str, object] = {
        "on_reset": "keep",
        "bytes_max": STORE_BYTES * blocks_per_chunk,
        "blocks_per_chunk": blocks_per_chunk,
        "self_describing_kv_events": True,
    }
    endpoint = f"ipc://{tmp_path}/events"
    options = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}}
    with listening(endpoint) as socket:
        url, log = f"file:{store}", log_path("engine")
        with running_engine(model_path("llama"), "llama", url, log, settings=settings, options=options) as engine:
            events = compute(engine, socket)
            left = engine.close()
            assert not left.threads
    there: set[Page] = set()
    removed: set[Page] = set()
    for event in events:
        if isinstance(event, VllmStored) and event.medium == "STORAGE":
            assert len(event.block_hashes) == blocks_per_chunk
            assert len(event.token_ids) == 32 * blocks_per_chunk
            there |= {(event.group_idx or 0, page) for page in event.block_hashes}
        elif isinstance(event, VllmRemoved) and event.medium == "STORAGE":
            gone = {(event.group_idx or 0, page) for page in event.block_hashes}
            removed |= gone & there
            there -= gone
    assert removed
    held = chunk_files(store)
    assert held <= there
    assert len(there) == len(held) * blocks_per_chunk


def compute(engine: VllmEngine, socket: "zmq.Socket[bytes]") -> list[Event]:
    """Have an engine store more than the store has room for; return what it has told."""
    for seed in range(4):
        engine.completion(prompt_of(803, 30 + seed))
        engine.settle()
    # Told with the next step.
    engine.completion(prompt_of(5, 40))
    return list(heard(socket))
