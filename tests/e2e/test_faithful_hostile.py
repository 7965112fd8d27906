"""``unified-cache faithful`` against servers that answer without end, without sense, or with what is secret."""

import gzip
import json
import socket
import tracemalloc
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from itertools import count
from typing import Any

import pytest

from tests.support.cluster import ask
from tests.support.toy_completions import ToyFault, ToyModel, serving, toy_server
from unified_cache.cli.main import run
from unified_cache.core.errors import CacheError
from unified_cache.sizing.faithful import server as faithful_server
from unified_cache.sizing.faithful import trial
from unified_cache.sizing.faithful.server import ANSWER_BYTES_MAX, connected

SMALL = ("--documents", "1", "--facts", "12")
SECRETS = ("sk-key", "hunter2", "SECRET", "sk-admin")
SENT_BYTES_MAX = 64 << 20
"""What a server sends before its socket is closed: all that is read, and what the kernel keeps."""

Answered = Callable[[BaseHTTPRequestHandler], bool]


def answering(path: str, body: bytes, status: int = 200, **headers: str) -> Answered:
    """Answer one path with a body, and leave the others to the server."""

    def answered(handler: BaseHTTPRequestHandler) -> bool:
        if handler.path != path:
            return False
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)
        return True

    return answered


def measured(answered: Answered, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit status and its JSON, empty where nothing was measured."""
    with serving(ToyModel(ToyFault.NOTHING), ToyFault.NOTHING, answered) as url:
        said = ask("faithful", url, *SMALL, "--json", *options)
    return said.status, json.loads(said.out) if said.out else {}


def test_a_result_has_no_secret_of_the_server_or_of_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "version": "0.5.3",
        "page_size": 64,
        "tp_size": [1],
        "api_key": "sk-key",
        "admin_api_key": "sk-admin",
        "launch_command": "serve --api-key sk-key",
        "hicache_storage_backend": "s3a://KEY:SECRET@bucket",
    }
    monkeypatch.setenv("OPENAI_API_KEY", "sk-key")
    answered = answering("/get_server_info", json.dumps(said).encode())
    with serving(ToyModel(ToyFault.STALE), ToyFault.STALE, answered) as url:
        named = url.replace("http://", "http://user:hunter2@")
        result = ask("faithful", named, *SMALL, "--json")
    assert result.status == 1
    assert [secret for secret in SECRETS if secret in result.out + result.err] == []
    server = json.loads(result.out)["server"]
    assert server.keys() == {"url", "model", "version", "page_size", "block_size", "num_gpu_blocks"}


@pytest.mark.parametrize("url", ["http://user:hunter2@127.0.0.1:1", "ftp://u:hunter2@h", "http://u:hunter2@[::1"])
def test_an_error_does_not_repeat_the_password_of_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["faithful", url]) == 2
    assert "hunter2" not in capsys.readouterr().err


def test_an_error_does_not_repeat_the_key_that_an_answer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-key")
    answered = answering("/v1/models", b"Incorrect API key sk-key", 401)
    with serving(ToyModel(ToyFault.NOTHING), ToyFault.NOTHING, answered) as url:
        said = ask("faithful", url)
    assert (said.status, "Incorrect API key" in said.err, "sk-key" in said.err) == (2, True, False)


@pytest.mark.parametrize("key", ["sk-key\nx", "sk-key\u20ac"])
def test_a_key_that_no_header_may_have_is_refused_unseen(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert run(["faithful", "http://127.0.0.1:1"]) == 2
    assert "sk-key" not in capsys.readouterr().err


class AlteredModel(ToyModel):
    """A sound cache whose answers to hits are altered on their way."""

    def __init__(self, alter: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(ToyFault.NOTHING)
        self._alter = alter

    def complete(self, prompt: str, salt: str, tokens: int) -> dict[str, Any]:
        answer = super().complete(prompt, salt, tokens)
        if answer["usage"]["prompt_tokens_details"]["cached_tokens"]:
            self._alter(answer["choices"][0])
        return answer


def cut(choice: dict[str, Any]) -> None:
    """Give the first token alone."""
    choice["logprobs"] = {name: values[:1] for name, values in choice["logprobs"].items()}
    choice["text"] = choice["logprobs"]["tokens"][0]


def other_words(choice: dict[str, Any]) -> None:
    choice["text"] = " other words"


def without_tokens(choice: dict[str, Any]) -> None:
    choice |= {"text": " other words", "logprobs": choice["logprobs"] | {"tokens": None}}


def short_of_tokens(choice: dict[str, Any]) -> None:
    choice |= {"text": " other words", "logprobs": choice["logprobs"] | {"tokens": choice["logprobs"]["tokens"][:1]}}


def no_numbers(choice: dict[str, Any]) -> None:
    choice["logprobs"]["top_logprobs"] = [dict.fromkeys(top, NAN) for top in choice["logprobs"]["top_logprobs"]]


def nulls(choice: dict[str, Any]) -> None:
    choice["logprobs"]["top_logprobs"] = [dict.fromkeys(top) for top in choice["logprobs"]["top_logprobs"]]


def no_alternatives(choice: dict[str, Any]) -> None:
    choice["logprobs"]["top_logprobs"] = [None for _ in choice["logprobs"]["top_logprobs"]]


def other_alternatives(choice: dict[str, Any]) -> None:
    """Leave the token that was chosen out of those that it was chosen from."""
    choice["logprobs"]["top_logprobs"] = [{" else": -6.0} for _ in choice["logprobs"]["top_logprobs"]]
    choice["logprobs"]["tokens"][0] = choice["text"] = " other"


NAN = float("nan")


@pytest.mark.parametrize(
    ("alter", "status"),
    [
        *((each, 1) for each in (cut, other_words, without_tokens, short_of_tokens, other_alternatives)),
        *((each, 2) for each in (no_numbers, nulls, no_alternatives)),
    ],
)
def test_answers_that_differ_are_unfaithful_and_logprobs_that_are_no_numbers_tell_nothing(
    alter: Callable[[dict[str, Any]], None], status: int
) -> None:
    with serving(AlteredModel(alter)) as url:
        said = ask("faithful", url, *SMALL, "--json")
    assert said.status == status
    found = json.loads(said.out, parse_constant=pytest.fail)
    assert found["verdict"] == {1: "unfaithful", 2: "cannot tell"}[status]
    assert found["phases"][0]["verdict"] == found["verdict"]
    assert found["phases"][0]["pairs"][0]["distance"] is None or alter is other_alternatives


def endless(handler: BaseHTTPRequestHandler) -> bool:
    """Answer completions with a body that does not end before the reader closes it."""
    if not handler.path.endswith("completions"):
        return False
    handler.close_connection = True
    handler.send_response(200)
    handler.end_headers()
    for sent in count():
        assert sent << 16 < SENT_BYTES_MAX, "nobody closes the connection"
        try:
            handler.wfile.write(bytes(1 << 16))
        except OSError:
            return True
    return True


@pytest.mark.parametrize(
    "answered",
    [
        endless,
        answering("/v1/completions", gzip.compress(bytes(100 << 20)), Content_Encoding="gzip"),
        answering("/v1/completions", bytes(ANSWER_BYTES_MAX + 1)),
    ],
    ids=["endless", "bomb", "long"],
)
def test_an_answer_is_read_no_further_than_its_bound(answered: Answered) -> None:
    tracemalloc.start()
    try:
        assert measured(answered) == (2, {})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 * ANSWER_BYTES_MAX


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"])
def test_an_answer_that_drips_ends_at_its_timeout(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def dripping(handler: BaseHTTPRequestHandler) -> bool:
        handler.close_connection = True
        handler.connection.sendall(begin)
        while begin:
            try:
                handler.connection.sendall(b"x")
                handler.connection.settimeout(0.02)
                if handler.connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            handler.connection.recv(1)
        return True

    monkeypatch.setattr(faithful_server, "PROBE_TIMEOUT_S", 0.3)
    with (
        serving(ToyModel(ToyFault.NOTHING), ToyFault.NOTHING, dripping) as url,
        pytest.raises(CacheError, match=r"within 0\.3 s"),
        connected(url, None),
    ):
        pass


def test_what_a_server_says_in_metrics_and_of_itself_may_be_anything() -> None:
    metrics = b"""vllm:prefix_cache_hits_total NaN
vllm:external_prefix_cache_hits_total 0x1p3
sglang:max_total_num_tokens -Inf
vllm:cache_config_info{block_size="None",num_gpu_blocks="1e99"} 1.0
vllm:prefix_cache_hits_total
\xff\xfe{} 1
"""
    status, found = measured(answering("/metrics", metrics))
    assert {phase["name"]: phase["verdict"] for phase in found["phases"]}["host"] == "cannot tell"
    assert (status, found["server"].get("version")) == (2, "1.2.3")
    assert measured(answering("/version", b'{"version": ' + b"9" * 4000 + b"}"))[0] == 0


@pytest.mark.parametrize(
    "usage",
    [b"{}", b'{"prompt_tokens": -1}', b'{"prompt_tokens": 1e999}', b'{"prompt_tokens": "many"}', b"[]", b"[" * 10_000],
)
def test_a_usage_that_makes_no_sense_is_no_traceback(usage: bytes) -> None:
    body = b'{"choices": [{"text": " one two three four"}], "usage": ' + usage + b"}"
    assert measured(answering("/v1/completions", body), "--device-tokens", "100")[0] == 2


def test_a_redirect_is_not_followed() -> None:
    with toy_server() as other:
        redirect = answering("/v1/models", b"", 307, Location=f"{other}/v1/models")
        assert measured(redirect) == (2, {})


def test_no_proxy_of_the_environment_sees_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert measured(lambda _: False)[0] == 0


def test_what_was_measured_before_a_server_fails_is_written() -> None:
    """A document is asked cold five times, and twice in the phases device and branches."""
    asked = count(1)
    failing = answering("/v1/completions", b"{}", 500)

    def answered(handler: BaseHTTPRequestHandler) -> bool:
        return handler.path == "/v1/completions" and next(asked) > 6 and failing(handler)

    status, found = measured(answered)
    assert status == 2
    assert {phase["name"]: phase["verdict"] for phase in found["phases"]} == {
        "device": "faithful",
        "branches": "cannot tell",
    }


@pytest.mark.parametrize(
    ("said_tokens", "device_tokens", "asked_min", "asked_max"),
    [
        # A server that says nothing of tokens, or that prompts have none, is asked as often as the words suffice.
        (0, 1_000, 0, 60),
        # A prompt has no more tokens than characters.
        (10**12, 100_000, 101, 1 << 30),
    ],
)
def test_pages_are_pushed_out_by_as_many_prompts_as_fill_a_tier_by_their_words(
    said_tokens: int, device_tokens: int, asked_min: int, asked_max: int
) -> None:
    asked = count()
    body = b'{"choices": [{"text": " one two three four"}], "usage": {"prompt_tokens": %d}}' % said_tokens
    completed = answering("/v1/completions", body)

    def answered(handler: BaseHTTPRequestHandler) -> bool:
        return handler.path == "/v1/completions" and next(asked) >= 0 and completed(handler)

    assert measured(answered, "--device-tokens", str(device_tokens))[0] == 2
    assert asked_min <= next(asked) < asked_max


def test_a_tier_that_takes_too_long_to_fill_ends_its_phase_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CHURN_TIMEOUT_S", 0.0)
    status, found = measured(lambda _: False, "--host-tokens", str(10**18))
    verdicts = {phase["name"]: phase["verdict"] for phase in found["phases"]}
    assert (status, verdicts["storage"], verdicts["device"]) == (2, "cannot tell", "faithful")
