"""Clear of embedded caches over the service: KV of old weights never comes back, wherever a server had it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.cache import IDENTITY, ToyEngine, toy_layout
from tests.support.operations import PAGE, serve, started, tokens
from tests.support.service import LoopbackServer
from unified_cache.controller import InlineWorkers, Operation, OperationState
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.url import open_storage

LAYOUT = toy_layout((SPAN_ALL,), PAGE)
OBJECT_BYTES = HEADER_BYTES + LAYOUT.components[0].pools[0].page_bytes
PROMPT_PAGES = 30
"""As many as make it certain that each of two servers has some of them."""


@contextmanager
def engine_over(*servers: LoopbackServer, generation: int = 0) -> Iterator[ToyEngine]:
    """Open a cache of its own, with nothing in memory, over ``grpc://`` to these servers."""
    storage = open_storage("grpc://" + ",".join(server.address for server in servers))
    room = (PROMPT_PAGES,)
    toy = ToyEngine(LAYOUT, room, room, storage, InlineWorkers(), replace(IDENTITY, generation=generation))
    yield toy
    toy.cache.check()
    assert toy.cache.close() == []


def back_up(toy: ToyEngine) -> None:
    operation = started(toy.cache.backup(serve(toy, PROMPT_PAGES)))
    toy.cache.wait_all(5)
    assert operation.state is OperationState.DONE


def clear(toy: ToyEngine) -> Operation:
    operation = started(toy.cache.clear_storage())
    toy.cache.wait_all(5)
    return operation


def restored_pages(toy: ToyEngine) -> int:
    """Prefetch the prompt; return how many of its pages the store brought back."""
    prompt = toy.cache.prompt(tokens(PROMPT_PAGES))
    toy.cache.prefetch(prompt)
    toy.cache.wait_all(5)
    return toy.cache.match(prompt).host_end


def test_pages_do_not_come_back_after_a_clear() -> None:
    server = LoopbackServer.start(MemoryStorage())
    with engine_over(server) as toy:
        back_up(toy)
        with engine_over(server) as another:
            assert restored_pages(another) == PROMPT_PAGES
        operation = clear(toy)
        assert (operation.state, operation.pages_count) == (OperationState.DONE, PROMPT_PAGES)
        toy.cache.reset()
        assert restored_pages(toy) == 0
    with engine_over(server) as another:
        assert restored_pages(another) == 0
        back_up(another)
        another.cache.reset()
        assert restored_pages(another) == PROMPT_PAGES, "what is computed afterwards is stored again"
    server.stop()


def test_a_clear_without_one_of_two_servers_fails_and_the_next_generation_finds_nothing_old(tmp_path: Path) -> None:
    def start(number: int, port: int = 0) -> LoopbackServer:
        return LoopbackServer.start(FileStorage.open(tmp_path / str(number)), port=port)

    servers = [start(0), start(1)]
    with engine_over(*servers) as toy:
        back_up(toy)
        servers[0].stop()
        operation = clear(toy)
        assert operation.state is OperationState.FAILED
        assert isinstance(operation.error, StorageError)
        assert "1 of 2 servers were not cleared" in str(operation.error)
        assert "clear again" in str(operation.error)
        assert "next generation" in str(operation.error)
    servers[0] = start(0, servers[0].port)
    with engine_over(*servers, generation=1) as renewed:
        assert restored_pages(renewed) == 0
    with engine_over(*servers) as toy:
        operation = clear(toy)
        assert operation.state is OperationState.DONE
        assert 0 < operation.pages_count < PROMPT_PAGES, "what the server that was away still had"
        assert clear(toy).pages_count == 0
        assert restored_pages(toy) == 0
    for server in servers:
        server.stop()
