"""vLLM as a server: an API process with its engine core in another one, asked over HTTP."""

import json
import socket
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.engines.vllm.engine import EngineAnswer, EngineGroup, running_group
from tests.engines.vllm.models import TOKENS

START_S = 900.0
"""Longest wait for a server to start, and for an answer; reached only where something hangs."""

POLL_S = 0.2


class SaidWords(NamedTuple):
    """One completion, as whoever waits for its words sees it."""

    text: str
    cached: int
    """Tokens of the prompt that were not computed."""


class VllmServer(EngineGroup):
    """An API process with its engine core, and the port of this machine that it listens at."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        super().__init__(process, log)
        self.url = f"http://127.0.0.1:{port}"
        self.pid = process.pid

    def wait_until_ready(self) -> None:
        """Wait until the server answers."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            try:
                self._ask("/health")
            except OSError:
                try:
                    self._process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
            else:
                return
            break
        raise AssertionError(f"the server did not start:\n{self.tail()}")

    def completion(self, prompt: Sequence[int], tokens: int = 8) -> EngineAnswer:
        """Complete a prompt, greedily."""
        request = {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "logprobs": 5,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        answer = json.loads(self._ask("/v1/completions", request))
        (choice,) = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"]
        return EngineAnswer(
            tuple(choice["token_ids"]),
            (details or {}).get("cached_tokens") or 0,
            tuple(
                tuple(sorted((int(name.removeprefix("token_id:")), value) for name, value in position.items()))
                for position in choice["logprobs"]["top_logprobs"]
            ),
        )

    def say(self, prompt: Sequence[int], salt: str = "") -> SaidWords:
        """Complete a prompt greedily, word by word."""
        text, cached = "", 0
        for event in self._events(prompt, salt, tokens=6):
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return SaidWords(text, cached)

    def abandon(self, prompt: Sequence[int], salt: str = "") -> None:
        """Ask as ``say`` does, and hang up at the first word of many."""
        events = self._events(prompt, salt, tokens=256)
        next(events)
        events.close()

    def metrics_text(self) -> str:
        """Return what ``/metrics`` says."""
        return self._ask("/metrics").decode()

    def metric(self, name: str, **labels: str) -> float:
        """Return one of vLLM's metrics as Prometheus scrapes it, summed over its other labels; 0 if it never came."""
        families = text_string_to_metric_families(self.metrics_text())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def settle(self, chunks_count: int) -> None:
        """Wait until so many chunks were stored; an idle engine tells what it counted with its next step."""
        until_s = time.monotonic() + START_S
        while self.metric("vllm:unified_cache_store_chunks_total", answer="stored") < chunks_count:
            assert time.monotonic() < until_s, self.metrics_text()
            self.completion([3, 4], tokens=1)

    def reset(self) -> None:
        """Drop what the device and host memory cache; for a server in vLLM's development mode."""
        self._ask("/reset_prefix_cache?reset_external=true", {})

    def stop(self) -> float:
        """Ask the server to end, as a service manager does; return for how many seconds that took."""
        started_s = time.monotonic()
        self._process.terminate()
        self._process.wait(START_S)
        return time.monotonic() - started_s

    def _events(self, prompt: Sequence[int], salt: str, tokens: int) -> Generator[dict[str, Any], None, None]:
        """Yield what the server streams of a completion."""
        request: dict[str, object] = {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with urlopen(
            self._request("/v1/completions", request | ({"cache_salt": salt} if salt else {})), timeout=START_S
        ) as lines:
            for line in lines:
                body = line.removeprefix(b"data: ").strip()
                if body and body != b"[DONE]":
                    yield json.loads(body)

    def _ask(self, path: str, body: object = None) -> bytes:
        with urlopen(self._request(path, body), timeout=START_S) as answer:
            content: bytes = answer.read()
        return content

    def _request(self, path: str, body: object) -> Request:
        return Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )


@contextmanager
def running_server(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Iterator[VllmServer]:
    """Run a server with this command until the block ends; it is given a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running_group([*command, "--host", "127.0.0.1", "--port", str(port)], variables, log) as process:
        server = VllmServer(process, port, log)
        server.wait_until_ready()
        yield server


def write_tokenizer(model: Path) -> None:
    """Write a tokenizer into a checkpoint, a word for each token: a server does not start without one."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, TOKENS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
