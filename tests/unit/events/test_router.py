"""The gRPC service that answers routers, its client, and its commands."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc
import pytest

from tests.sources import ROOT
from unified_cache.cli.main import run
from unified_cache.cli.router import parse_engine
from unified_cache.errors import ConfigError, InputError, StateError
from unified_cache.events.index import EngineScore, EngineTraits, HashKind, Knowledge, PrefixIndex
from unified_cache.events.router_calls import ROUTER, RouterCall
from unified_cache.events.router_client import RouterClient
from unified_cache.events.router_server import RouterServer, RouterSettings
from unified_cache.events.subscriber import EventSource, EventSubscriber
from unified_cache.events.values import Medium, StoredEvent
from unified_cache.page import Namespace, Prompt
from unified_cache.proto import router_pb2 as pb

PAGE = 4
TOKENS = list(range(6 * PAGE))
SALTED = Namespace(cache_salt="pepper", lora_id="style")
TIMEOUT_S = 60
PROGRAM = "from unified_cache.cli.main import main; main()"


def stored(pages: int, medium: Medium, namespace: Namespace = Namespace()) -> StoredEvent:
    prompt = Prompt.of(TOKENS, PAGE, namespace)
    return StoredEvent(medium, 0, prompt.keys[:pages], None, tuple(TOKENS[: pages * PAGE]), PAGE)


@pytest.fixture
def server() -> Iterator[RouterServer]:
    """Serve what two engines have told: one knows the prompt, the other one of another namespace."""
    index = PrefixIndex()
    for name, namespace in (("a", Namespace()), ("b", SALTED)):
        index.add_engine(name, EngineTraits(HashKind.PAGE_KEYS))
        index.set_knowledge(name, Knowledge.WHOLE)
        index.apply(name, [stored(2, Medium.DEVICE, namespace), stored(5, Medium.STORAGE, namespace)])
    index.add_engine("silent")
    with EventSubscriber.start(index) as subscriber:
        made = RouterServer.open(subscriber, RouterSettings("127.0.0.1:0", tokens_max=100))
        yield made
        assert made.close()


@pytest.fixture
def client(server: RouterServer) -> Iterator[RouterClient]:
    made = RouterClient(f"127.0.0.1:{server.port}")
    yield made
    made.close()


def test_a_client_gets_every_engines_score(client: RouterClient) -> None:
    assert client.score(TOKENS) == [
        EngineScore("a", Knowledge.WHOLE, PAGE, 2, 2, 5),
        EngineScore("b", Knowledge.WHOLE, PAGE, 0, 0, 0),
        EngineScore("silent", Knowledge.NONE, 0, 0, 0, 0),
    ]
    assert client.score(TOKENS, SALTED)[1] == EngineScore("b", Knowledge.WHOLE, PAGE, 2, 2, 5)


def test_a_client_learns_which_engines_are_followed(client: RouterClient) -> None:
    reports = client.engines()
    assert [(report.engine, report.knowledge, report.pages) for report in reports] == [
        ("a", Knowledge.WHOLE, 7),
        ("b", Knowledge.WHOLE, 7),
        ("silent", Knowledge.NONE, 0),
    ]


@pytest.mark.parametrize("tokens", [[1 << 31], [0] * 101])
def test_tokens_that_cannot_be_are_refused(client: RouterClient, tokens: list[int]) -> None:
    with pytest.raises(InputError):
        client.score(tokens)
    with pytest.raises(InputError):
        client.score([-1])


def test_bytes_that_are_no_request_are_refused(server: RouterServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(RouterCall.SCORE.path)
        with pytest.raises(grpc.RpcError) as refused:
            ask(b"\xff\xff", timeout=TIMEOUT_S)
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_server_that_is_not_there_is_an_error_in_time() -> None:
    client = RouterClient("127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(StateError):
        client.score(TOKENS)
    client.close()


UNKNOWN = cast("pb.Knowledge", 99)


@pytest.mark.parametrize(
    ("scores", "engines"),
    [
        (b"\xff\xff", b"\xff\xff"),
        (
            pb.ScoreReply(engines=[pb.EngineScore(knowledge=UNKNOWN)]).SerializeToString(),
            pb.EnginesReply(engines=[pb.FollowedEngine(knowledge=UNKNOWN)]).SerializeToString(),
        ),
    ],
    ids=["no message", "unknown knowledge"],
)
def test_an_answer_that_makes_no_sense_is_a_state_error(scores: bytes, engines: bytes) -> None:
    answers = {RouterCall.SCORE: scores, RouterCall.ENGINES: engines}
    strange = grpc.server(ThreadPoolExecutor(1))
    strange.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(
                ROUTER,
                {
                    call.value: grpc.unary_unary_rpc_method_handler(lambda request, context, said=said: said)
                    for call, said in answers.items()
                },
            )
        ]
    )
    port = strange.add_insecure_port("127.0.0.1:0")
    strange.start()
    client = RouterClient(f"127.0.0.1:{port}")
    with pytest.raises(StateError):
        client.score(TOKENS)
    with pytest.raises(StateError):
        client.engines()
    client.close()
    strange.stop(None).wait()


def test_a_server_listens_on_this_machine_unless_told_otherwise(server: RouterServer) -> None:
    with pytest.raises(ConfigError):
        RouterSettings("0.0.0.0:0")
    RouterSettings("0.0.0.0:0", insecure=True)
    RouterSettings("unix:/tmp/router")
    with pytest.raises(ConfigError):
        RouterSettings(threads=0)
    with EventSubscriber.start(PrefixIndex()) as subscriber, pytest.raises(ConfigError):
        RouterServer.open(subscriber, RouterSettings(f"127.0.0.1:{server.port}"))


def test_an_engine_is_read_with_what_is_known_of_it() -> None:
    name, source, traits = parse_engine("a=tcp://h:1,replay=tcp://h:2,hashes=page_keys,storage=l3,topic=kv@")
    assert (name, source) == ("a", EventSource("tcp://h:1", "tcp://h:2", "kv@"))
    assert traits == EngineTraits(HashKind.PAGE_KEYS, "l3")
    for wrong in ("a", "=tcp://h:1", "a=", "a=tcp://h:1,replay", "a=tcp://h:1,colour=red", "a=tcp://h:1,hashes=odd"):
        with pytest.raises(ConfigError):
            parse_engine(wrong)


def test_the_commands_show_what_a_server_answers(
    server: RouterServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, prompts = f"127.0.0.1:{server.port}", tmp_path / "prompts.json"
    prompts.write_text(json.dumps(TOKENS))
    assert run(["router", "score", address, "--tokens", str(prompts), "--json"]) == 0
    (prompt,) = json.loads(capsys.readouterr().out)["prompts"]
    assert prompt["engines"][0] == {
        "engine": "a",
        "knowledge": "whole",
        "page_size": PAGE,
        "device_pages": 2,
        "host_pages": 2,
        "storage_pages": 5,
    }
    assert (
        run(["router", "score", address, "--tokens", str(prompts), "--cache-salt", "pepper", "--lora-id", "style"]) == 0
    )
    assert re.search(r"b +whole +24 +8 +8 +20", capsys.readouterr().out)
    assert run(["router", "engines", address]) == 0
    assert re.search(r"a +whole +7", capsys.readouterr().out)
    assert run(["router", "engines", address, "--json"]) == 0
    assert [report["engine"] for report in json.loads(capsys.readouterr().out)["engines"]] == ["a", "b", "silent"]


def test_the_server_command_answers_until_it_is_told_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "router", "serve"]
    options = ["--engine", f"a=ipc://{tmp_path}/pub,replay=ipc://{tmp_path}/replay", "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, *options], cwd=ROOT, text=True, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        port = re.search(r"port (\d+), for a$", program.stdout.readline().strip())
        assert port is not None
        client = RouterClient(f"127.0.0.1:{port[1]}")
        assert [report.engine for report in client.engines()] == ["a"]
        client.close()
        program.send_signal(signal.SIGTERM)
        assert program.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--engine", "nonsense"],
        ["--engine", "a=tcp://127.0.0.1:1", "--engine", "a=tcp://127.0.0.1:2"],
        ["--engine", "a=nonsense"],
        ["--engine", "a=tcp://127.0.0.1:1", "--listen", "0.0.0.0:0"],
    ],
)
def test_options_that_cannot_be_are_refused(options: list[str]) -> None:
    assert run(["router", "serve", *options]) == 2
