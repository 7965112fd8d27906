"""An OpenAI-compatible server whose model is a search: it completes a line that its pages hold, and its cache may lie.

    with toy_server(ToyFault.STALE) as url: ...

A token is a word. Pages of PAGE words are cached under all words before them and the salt; the device holds few, the
host all that leave it. What the model reads of a cached prefix is what the cache hands out.
"""

import hashlib
import json
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = 16
DEVICE_PAGES = 100


class ToyFault(Enum):
    """Flaw of the server."""

    NOTHING = auto()
    STALE = auto()
    """A page from the host is the one that had its slot before."""
    OTHERS = auto()
    """A page from the host is that of another request."""
    IGNORED_SALT = auto()
    SHORT_WINDOW = auto()
    """The first page of every hit is missing."""
    NO_CACHE = auto()
    NO_COUNTERS = auto()
    NO_METRICS = auto()
    NOISE = auto()
    NO_SALT = auto()
    """A request with a salt is refused."""
    NO_USAGE = auto()
    """Nothing is said of tokens."""


class ToyModel:
    """Words in, words out."""

    def __init__(self, fault: ToyFault) -> None:
        self.fault = fault
        self.guard = threading.Lock()
        self.device: OrderedDict[bytes, list[str]] = OrderedDict()
        self.host: dict[bytes, list[str]] = {}
        self.hit_tokens = 0
        self.rng = random.Random(1)

    def complete(self, prompt: str, salt: str, tokens: int) -> dict[str, Any]:
        words = re.findall(r"\s*\S+", prompt)
        with self.guard:
            seen, cached = self._seen(words, "" if self.fault is ToyFault.IGNORED_SALT else salt)
        answer = self._answer("".join(seen), tokens)
        noise = 3.0 if self.fault is ToyFault.NOISE else 0.0
        top = [{word: -0.1 - noise * self.rng.random(), " else": -6.0} for word in answer]
        usage: dict[str, Any] = {"prompt_tokens": len(words)}
        if self.fault is not ToyFault.NO_COUNTERS:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        logprobs = {"tokens": answer, "top_logprobs": top}
        body: dict[str, Any] = {"choices": [{"text": "".join(answer), "logprobs": logprobs}]}
        return body if self.fault is ToyFault.NO_USAGE else body | {"usage": usage}

    def _seen(self, words: list[str], salt: str) -> tuple[list[str], int]:
        """Return what the model reads of a prompt, and how much of it is cached; at least a word is computed."""
        keys = [
            hashlib.sha256("".join([salt, "|", *words[: end * PAGE]]).encode()).digest()
            for end in range(1, (len(words) - 1) // PAGE + 1)
        ]
        seen: list[str] = []
        cached = 0
        for key in keys if self.fault is not ToyFault.NO_CACHE else ():
            page = self._page(key)
            if page is None:
                break
            seen += [] if self.fault is ToyFault.SHORT_WINDOW and not cached else page
            cached += PAGE
        self.hit_tokens += cached
        for number, key in enumerate(keys):
            self._keep(key, words[number * PAGE : (number + 1) * PAGE])
        return [*seen, *words[cached:]], cached

    def _page(self, key: bytes) -> list[str] | None:
        if key in self.device:
            return self.device[key]
        if key in self.host and self.fault in {ToyFault.STALE, ToyFault.OTHERS}:
            others = list(self.host.values())
            return others[-1] if self.fault is ToyFault.OTHERS else [" before"] * PAGE
        return self.host.get(key)

    def _keep(self, key: bytes, page: list[str]) -> None:
        self.device.setdefault(key, self.host.get(key, page))
        self.device.move_to_end(key)
        while len(self.device) > DEVICE_PAGES:
            left, gone = self.device.popitem(last=False)
            self.host.setdefault(left, gone)

    @staticmethod
    def _answer(text: str, tokens: int) -> list[str]:
        """Return what followed the last line's beginning before."""
        line = text.rsplit("\n", 1)[-1].removeprefix("Once more: ")
        _, found, after = text[: -len(line)].partition(line)
        return (re.findall(r"\s*\S+", after) if found else [" nothing", " of", " that", " here"])[:tokens]


@contextmanager
def toy_server(fault: ToyFault = ToyFault.NOTHING) -> Iterator[str]:
    """Serve a search until the block ends; yields the URL."""
    with serving(ToyModel(fault), fault) as url:
        yield url


@contextmanager
def serving(
    model: ToyModel,
    fault: ToyFault = ToyFault.NOTHING,
    answered: Callable[[BaseHTTPRequestHandler], bool] | None = None,
) -> Iterator[str]:
    """Serve until the block ends; yields the URL. A request that ``answered`` has answered itself is done with."""

    class CompletionsHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # in two pieces an answer would wait for an acknowledgement

        def do_GET(self) -> None:
            if answered is not None and answered(self):
                return
            if self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "toy"}]}))
            elif self.path == "/restart":
                model.hit_tokens = 0
                self._send(200, "{}")
            elif self.path == "/version":
                self._send(200, json.dumps({"version": "1.2.3"}))
            elif self.path == "/metrics" and fault not in {ToyFault.NO_COUNTERS, ToyFault.NO_METRICS}:
                sizes = f'block_size="{PAGE}",num_gpu_blocks="{DEVICE_PAGES}"'
                info = f"vllm:cache_config_info{{{sizes}}} 1.0"
                self._send(200, f"{info}\nvllm:prefix_cache_hits_total {model.hit_tokens}\n")
            else:
                self._send(404, "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if answered is not None and answered(self):
                return
            if fault is ToyFault.NO_SALT and "cache_salt" in body:
                self._send(400, json.dumps({"message": "cache_salt is not known"}))
            else:
                self._send(
                    200, json.dumps(model.complete(body["prompt"], body.get("cache_salt", ""), body["max_tokens"]))
                )

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), CompletionsHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
