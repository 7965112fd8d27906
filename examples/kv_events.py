"""An engine publishes the pages that its tiers hold, and a consumer reads them, as a router does.

python examples/kv_events.py
"""
# ruff: noqa: T201 - an example prints to standard output

import time

from unified_cache import CacheConfig, Identity, UnifiedCache
from unified_cache.core.config import WritePolicy
from unified_cache.core.extras import needs_extra
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel
from unified_cache.observe.events.config import EventsConfig
from unified_cache.observe.events.publisher import EventPublisher
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.testing.tiny_models import tiny_model

with needs_extra("events", "the example"):
    import msgspec
    import zmq

PROMPT = list(b"You are the clerk of a small library of machines. " * 4)
WAIT_S = 30.0
TIMEOUT_MS = 30_000
END = (-1).to_bytes(8, "big", signed=True)


def pages_reported(publisher: EventPublisher, replay: "zmq.Socket[bytes]", batches: int) -> str:
    """Ask for every batch once there are so many, and return how many pages each tier holds by them."""
    while publisher.counts().batches < batches:
        time.sleep(0.01)
    replay.send_multipart((b"", (0).to_bytes(8, "big")))
    held: dict[str, set[bytes]] = {}
    while True:
        _, _topic, number, payload = replay.recv_multipart()
        if number == END:
            return ", ".join(f"{medium}: {len(pages)} pages" for medium, pages in held.items() if pages)
        _seconds, events, *_rank = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                held.clear()
            elif event["type"] == "BlockStored":
                held.setdefault(event["medium"], set()).update(event["block_hashes"])
            else:
                held[event["medium"]].difference_update(event["block_hashes"])


def main() -> None:
    """Serve a prompt, read what was published, reset the engine's memory, read again."""
    model = tiny_model("tiny-llama")
    config = CacheConfig(device_pages=(64,), host_pages=(256,), write=WritePolicy.THROUGH)
    pages = KeptState.of(model, page_size=32).allocate(config.device_pages)
    with (
        UnifiedCache.open(
            pages.layout, config, pages.pools, identity=Identity("tiny-llama"), storage=MemoryStorage()
        ) as cache,
        EventPublisher.open(cache, EventsConfig("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")) as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as replay,
    ):
        replay.set(zmq.RCVTIMEO, TIMEOUT_MS)
        replay.connect(str(publisher.replay_endpoint))
        list(PrefixCachedModel(model, cache, pages).generate(PROMPT, tokens_max=8))
        cache.wait_all(WAIT_S)
        publisher.publish()
        print(pages_reported(publisher, replay, 1))
        cache.reset()
        publisher.publish()
        print(pages_reported(publisher, replay, 2))


if __name__ == "__main__":
    main()
