"""A server that takes connections and never answers: the client fails over, and the guard gives it the time to."""

import socket
from collections.abc import Iterator

import pytest

from tests.support.cache import ToyEngine, WholePromptCache, toy_layout
from tests.support.operations import PAGE, serve, started, tokens
from tests.support.service import LoopbackServer
from unified_cache.controller import InlineWorkers, OperationState
from unified_cache.core.config import CacheConfig, GuardConfig, WritePolicy
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.remote.store import RemoteStorage
from unified_cache.storage_backends.remote.url import RemoteOptions
from unified_cache.storage_backends.wrappers import StorageGuard

TIMEOUT_S = 1.0
"""Of the client."""
GUARD = GuardConfig(deadline_s=TIMEOUT_S / 2)
"""In the proportion of the defaults: the guard's patience is half of the client's."""


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    """Two servers: one is silent, the other serves a store."""
    running = LoopbackServer.start(MemoryStorage())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}", running.address
    running.stop()


def test_the_defaults_are_in_that_proportion() -> None:
    assert GuardConfig().deadline_s == RemoteOptions(("a:1",)).timeout_s / 2
    assert CacheConfig((1,), (1,)).guard == GuardConfig()


@pytest.mark.parametrize("silent_first", [True, False])
def test_a_cache_opens_over_two_servers_of_which_one_is_silent(addresses: tuple[str, str], silent_first: bool) -> None:
    servers = addresses if silent_first else addresses[::-1]
    toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (12,), (12,), None, InlineWorkers())
    config = CacheConfig((12,), (12,), write=WritePolicy.ON_CALL, guard=GUARD)
    storage = RemoteStorage.open(RemoteOptions(servers, timeout_s=TIMEOUT_S))
    pools = list(toy.pools.values())
    toy.cache = WholePromptCache.open(toy.layout, config, pools, identity=toy.cache.identity, storage=storage)
    backup = started(toy.cache.backup(serve(toy, 4)))
    toy.cache.wait_all(20 * TIMEOUT_S)
    assert backup.state is OperationState.DONE
    toy.cache.reset()
    prefetch = started(toy.cache.prefetch(toy.cache.prompt(tokens(4))))
    toy.cache.wait_all(20 * TIMEOUT_S)
    assert prefetch.pages_count == 4
    assert toy.cache.close() == []


def test_the_guard_waits_as_long_as_the_client_says_that_a_call_may_take(addresses: tuple[str, str]) -> None:
    storage = RemoteStorage.open(RemoteOptions(addresses, timeout_s=TIMEOUT_S, retries=0))
    capability = storage.capability()
    assert capability.call_s_max == 2 * TIMEOUT_S
    guard = StorageGuard(storage, capability, GUARD)
    assert guard.deadline_s == 2 * TIMEOUT_S
    guard.close()
