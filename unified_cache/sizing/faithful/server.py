"""An OpenAI-compatible server: greedy completions with their logprobs, and what it says of its cache.

No answer is read beyond its bounds of bytes and time. Prompts and key go to the host of the URL alone: by no proxy of
the environment, by no redirect. Users publish results, which have ``FLAGS`` of a server, and neither password nor key.
"""

import asyncio
import math
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, TypeVar

import httpx
from pydantic import AfterValidator, AliasPath, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from unified_cache.core.errors import CacheError, InputError

ANSWER_TOKENS = 16
"""Tokens of an answer: several times those of a planted fact."""
TOP_LOGPROBS = 5
"""Alternatives asked for at each token; more than servers refuse by default."""
AT_ONCE = 8
"""Requests that a server has at a time."""
ANSWER_BYTES_MAX = 4 << 20
"""Longest answer read: several times the metrics of 8 engines, or 4,096 tokens with their logprobs."""
REQUEST_TIMEOUT_S = 600.0
PROBE_TIMEOUT_S = 10.0
"""For an answer that no model computes."""
RETRY_PAUSE_S = 0.5
ERROR_CHARACTERS_MAX = 200

FLAGS = frozenset(
    (
        *("version", "block_size", "cache_dtype", "enable_prefix_caching", "mamba_block_size", "mamba_cache_mode"),
        *("num_cpu_blocks", "num_gpu_blocks", "prefix_caching_hash_algo", "sliding_window", "attention_backend"),
        *("disable_radix_cache", "dtype", "enable_hierarchical_cache", "hicache_ratio", "hicache_storage_backend"),
        *("hicache_write_policy", "kv_cache_dtype", "max_total_num_tokens", "page_size", "quantization", "tp_size"),
    )
)
"""What bears on a cache, as vLLM 0.32 and SGLang 0.5 name it. Any other flag may be a key, a path or an address."""
_WORD = re.compile(r"[\w.+-]{1,64}")
_SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? (\d+(?:\.\d+)?(?:e\+?\d\d)?)$", re.MULTILINE | re.ASCII)
"""Metrics that count; one that is no number is none."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total", "sglang:cached_tokens_total")
"""Counters of tokens that were not computed, as vLLM 0.32 and SGLang 0.5 name them."""

_Body = TypeVar("_Body")
_Each = TypeVar("_Each")
_Positions = Annotated[tuple[_Each, ...], BeforeValidator(lambda found: found or ())]
"""Something of each token of an answer; a server may say null."""
_Logprob = Annotated[float | None, AfterValidator(lambda found: found if math.isfinite(found or 0.0) else None)]
"""None for what is no finite number."""


@dataclass(frozen=True, slots=True)
class _Models:
    data: list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One greedy completion, read from the body of a response."""

    text: str = Field(validation_alias=AliasPath("choices", 0, "text"))
    tokens: _Positions[str] = Field((), validation_alias=AliasPath("choices", 0, "logprobs", "tokens"))
    """Empty where the server gives no logprobs."""
    top: _Positions[Annotated[Mapping[str, _Logprob], BeforeValidator(lambda found: found or {})]] = Field(
        (), validation_alias=AliasPath("choices", 0, "logprobs", "top_logprobs")
    )
    """Logprobs of the most likely tokens, the chosen one among them, by position."""
    prompt_tokens: int | None = Field(None, ge=0, validation_alias=AliasPath("usage", "prompt_tokens"))
    cached_tokens: int | None = Field(
        None, ge=0, validation_alias=AliasPath("usage", "prompt_tokens_details", "cached_tokens")
    )
    """Tokens of the prompt that were not computed; None where the server does not say so of a request."""


class CompletionServer:
    """One model of a server, for one thread. Methods raise a CacheError for a server that does not answer as others."""

    def __init__(self, client: httpx.AsyncClient, runner: asyncio.Runner, key: str) -> None:
        self._client = client
        self._runner = runner
        self._key = key
        self._gate = asyncio.Semaphore(AT_ONCE)
        self.url = str(client.base_url.copy_with(userinfo=b"")).rstrip("/")
        self.model = ""

    def models(self) -> list[str]:
        """Return the names of its models."""
        return [str(each.get("id")) for each in self._parsed(_Models, "/v1/models", self._get("/v1/models")).data]

    def ask(self, *prompts: str, salt: str = "", tokens: int = ANSWER_TOKENS) -> list[ServedAnswer]:
        """Complete prompts greedily and at once; an InputError, which is a CacheError, if the server refuses one."""
        path, body = "/v1/completions", {"model": self.model, "temperature": 0.0, "logprobs": TOP_LOGPROBS}
        body |= {"max_tokens": tokens, **({"cache_salt": salt} if salt else {})}

        async def all_read() -> list[bytes | BaseException]:
            reads = (self._read(path, REQUEST_TIMEOUT_S, {**body, "prompt": prompt}) for prompt in prompts)
            return await asyncio.gather(*reads, return_exceptions=True)

        answers: list[ServedAnswer] = []
        for content in self._runner.run(all_read()):
            if isinstance(content, BaseException):
                raise content
            answers.append(self._parsed(ServedAnswer, path, content))
        return answers

    def hits(self) -> float | None:
        """Return all tokens that the server's counters say it did not compute; None where they say no number."""
        found = [float(value) for name, _, value in self._samples() if name in _HITS]
        return sum(found) if found else None

    def facts(self) -> tuple[Mapping[str, str], int | None]:
        """Return flags, and how many tokens the device holds, as far as the server says them."""
        said: dict[str, object] = {}
        for name, labels, _ in self._samples():
            if name == "vllm:cache_config_info":
                said |= _LABEL.findall(labels)
        for path in ("/version", "/get_server_info"):
            with suppress(CacheError):
                said |= self._parsed(dict[str, object], path, self._get(path))
        flags = {name: str(value) for name, value in said.items() if name in FLAGS and _WORD.fullmatch(str(value))}
        numbers = {name: int(value) for name, value in flags.items() if value.isdecimal()}
        blocks_tokens = numbers.get("num_gpu_blocks", 0) * numbers.get("block_size", 0)
        return flags, numbers.get("max_total_num_tokens") or blocks_tokens or None

    def wait(self, timeout_s: float) -> None:
        """Wait until the server answers; after ``timeout_s`` raise the CacheError of the last try."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            with suppress(CacheError):
                self.models()
                return
            time.sleep(RETRY_PAUSE_S)
        self.models()

    def _samples(self) -> list[tuple[str, str, str]]:
        try:
            return _SAMPLE.findall(self._get("/metrics").decode("utf-8", "replace"))
        except CacheError:
            return []

    def _get(self, path: str) -> bytes:
        return self._runner.run(self._read(path, PROBE_TIMEOUT_S))

    async def _read(self, path: str, timeout_s: float, body: Mapping[str, object] | None = None) -> bytes:
        """Return what a path answers: to a GET without ``body``, else to a POST."""
        content = bytearray()
        method = "POST" if body else "GET"
        try:
            async with self._gate, asyncio.timeout(timeout_s), self._client.stream(method, path, json=body) as answer:
                async for piece in answer.aiter_raw():
                    content += piece
                    if len(content) > ANSWER_BYTES_MAX:
                        raise CacheError(f"{self.url}{path} must answer with at most {ANSWER_BYTES_MAX:,} bytes")
        except TimeoutError:
            raise CacheError(f"{self.url}{path} must answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise CacheError(f"{self.url} does not answer: {str(error) or type(error).__name__}") from error
        if not answer.is_success:
            text = content.decode("utf-8", "replace").replace(self._key or "…", "…")  # some answer with the request
            refused = InputError if answer.is_client_error else CacheError
            raise refused(f"{self.url}{path} answers {answer.status_code}: {text[:ERROR_CHARACTERS_MAX]}")
        return bytes(content)

    def _parsed(self, kind: type[_Body], path: str, content: bytes) -> _Body:
        try:
            return TypeAdapter(kind).validate_json(content)
        except ValidationError as error:
            flaw = error.errors(include_url=False, include_context=False, include_input=False)[0]["msg"]
            raise CacheError(f"{self.url}{path} must answer as OpenAI's servers do: {flaw}") from error


@contextmanager
def connected(url: str, model: str | None) -> Iterator[CompletionServer]:
    """Open a server by its URL until the block ends, ``OPENAI_API_KEY`` its key; an InputError if one is of no use."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InputError("OPENAI_API_KEY must be printable ASCII")
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL:
        base = httpx.URL("")
    if base.scheme not in {"http", "https"} or not base.host or base.query:
        shown = url.rpartition("@")[2].partition("?")[0]
        raise InputError(f"expected a URL such as http://localhost:8000, found {shown!r}")
    client = httpx.AsyncClient(
        base_url=base,
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        timeout=httpx.Timeout(None, connect=PROBE_TIMEOUT_S),
        trust_env=False,
        verify=ssl.create_default_context(),  # httpx reads SSL_CERT_FILE and proxies, or neither
    )
    with asyncio.Runner() as runner:
        try:
            server = CompletionServer(client, runner, key)
            names = server.models()
            if not names or (model is not None and model not in names):
                found = ", ".join(names)[:ERROR_CHARACTERS_MAX] or "none"
                raise InputError(f"{server.url} has the models {found}, expected {model or 'one'}")
            server.model = model or names[0]
            yield server
        finally:
            runner.run(client.aclose())
