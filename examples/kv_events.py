"""Example 4: an engine tells what it holds, and a router asks how much of a prompt it could resume, and from where.

python examples/kv_events.py
python examples/kv_events.py --endpoint tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --stay
"""
# ruff: noqa: T201 - an example prints to standard output

import argparse
import time
from contextlib import suppress

from unified_cache import CacheConfig, Identity, UnifiedCache
from unified_cache.config import WritePolicy
from unified_cache.events.config import EventsConfig
from unified_cache.events.index import EngineScore, EngineTraits, HashKind, Knowledge, PrefixIndex
from unified_cache.events.publisher import EventPublisher
from unified_cache.events.subscriber import EventSource, EventSubscriber
from unified_cache.integrations.transformers import KeptState, PrefixCachedModel
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.testing.tiny_models import tiny_model

PROMPT = list(b"You are the clerk of a small library of machines. " * 4)
WAIT_S = 30.0


def score(router: EventSubscriber, device_pages: int) -> EngineScore:
    """Ask how much of the prompt the engine could resume, until the events have arrived that say so."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        (found,) = router.index.score(PROMPT)
        if found.knowledge is Knowledge.WHOLE and found.storage_pages and found.device_pages == device_pages:
            return found
        assert time.monotonic() < deadline_s, found
        time.sleep(0.01)


def main(endpoint: str, replay: str, *, stay: bool) -> None:
    """Serve a prompt, ask the router, reset the engine's memory, ask again."""
    model = tiny_model("tiny-llama")
    config = CacheConfig(device_pages=(64,), host_pages=(256,), write=WritePolicy.THROUGH)
    pages = KeptState.of(model, page_size=32).allocate(config.device_pages)
    with (
        UnifiedCache.open(
            pages.layout, config, pages.pools, identity=Identity("tiny-llama"), storage=MemoryStorage()
        ) as cache,
        EventPublisher.open(cache, EventsConfig(endpoint, replay)) as publisher,
        EventSubscriber.start(PrefixIndex()) as router,
    ):
        source = EventSource(publisher.endpoint, publisher.replay_endpoint)
        router.follow("engine", source, EngineTraits(HashKind.PAGE_KEYS))
        list(PrefixCachedModel(model, cache, pages).generate(PROMPT, tokens_max=8))
        cache.wait_all(WAIT_S)
        publisher.publish()
        print(score(router, device_pages=len(PROMPT) // 32))
        if stay:
            print(f"publishing at {publisher.endpoint}, replays at {publisher.replay_endpoint}", flush=True)
            with suppress(KeyboardInterrupt):
                while True:
                    cache.poll()
                    publisher.publish()
                    time.sleep(0.01)
        cache.reset()
        publisher.publish()
        print(score(router, device_pages=0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:0", help="where events are published")
    parser.add_argument("--replay", default="tcp://127.0.0.1:0", help="where past ones are sent again")
    parser.add_argument("--stay", action="store_true", help="publish until Ctrl-C")
    given = parser.parse_args()
    main(given.endpoint, given.replay, stay=given.stay)
