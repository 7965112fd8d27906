"""An OpenAI-compatible server: greedy completions with their logprobs, and what it says of its cache."""

import os
import re
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Annotated, Self, TypeVar

import httpx
from pydantic import AliasPath, BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from unified_cache.core.errors import CacheError, InputError

__all__ = ["CompletionServer", "ServedAnswer", "ServerFacts"]

TOP_LOGPROBS = 5
"""Alternatives asked for at each token; more than servers refuse by default."""

REQUEST_TIMEOUT_S = 600.0
RETRY_PAUSE_S = 0.5

_SAMPLE = re.compile(r"^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

_HITS = (
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_hits_total",
    "sglang:cached_tokens_total",
)
"""Counters of tokens that were not computed, as vLLM 0.32 and SGLang 0.5 name them."""


class _ModelName(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_ModelName]


_Body = TypeVar("_Body")
_Each = TypeVar("_Each")
_Positions = Annotated[tuple[_Each, ...], BeforeValidator(lambda found: found or ())]
"""Something of each token of an answer; a server may say null."""


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One greedy completion, read from the body of a response."""

    text: str = Field(validation_alias=AliasPath("choices", 0, "text"))
    tokens: _Positions[str] = Field((), validation_alias=AliasPath("choices", 0, "logprobs", "tokens"))
    """Empty where the server gives no logprobs."""
    top: _Positions[Mapping[str, float]] = Field(
        (), validation_alias=AliasPath("choices", 0, "logprobs", "top_logprobs")
    )
    """Logprobs of the most likely tokens, the chosen one among them, by position."""
    prompt_tokens: int = Field(0, validation_alias=AliasPath("usage", "prompt_tokens"))
    cached_tokens: int | None = Field(
        None, validation_alias=AliasPath("usage", "prompt_tokens_details", "cached_tokens")
    )
    """Tokens of the prompt that were not computed; None where the server does not say so of a request."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Version, flags and sizes, as the server says them."""

    version: str
    flags: Mapping[str, str]
    page_tokens: int | None
    device_tokens: int | None
    """Tokens that its device holds; None where its metrics do not say so."""


class CompletionServer:
    """One model of a server; a context manager. Any number of threads may ask."""

    def __init__(self, client: httpx.Client, url: str, model: str, answer_tokens: int) -> None:
        self._client = client
        self.url = url
        self.model = model
        self._answer_tokens = answer_tokens

    @classmethod
    def connect(cls, url: str, model: str | None, answer_tokens: int) -> Self:
        """Ask a server which models it has; the first one, unless one is named. ``OPENAI_API_KEY`` is its key.

        Raises:
            InputError: no such model, or the URL is none.
            CacheError: the server does not answer.
        """
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise InputError(f"expected a URL such as http://localhost:8000, found {url!r}")
        server = cls(httpx.Client(base_url=base, headers=headers, timeout=REQUEST_TIMEOUT_S), base, "", answer_tokens)
        try:
            names = [each.id for each in server._json(_Models, "GET", "/v1/models").data]
            if not names or (model is not None and model not in names):
                raise InputError(f"{base} has the models {', '.join(names) or 'none'}, expected {model or 'one'}")
        except BaseException:
            server._client.close()
            raise
        server.model = model or names[0]
        return server

    def ask(self, prompt: str, salt: str = "", tokens: int | None = None) -> ServedAnswer:
        """Complete a prompt greedily, ``tokens`` long or as long as answers are.

        Raises:
            InputError: the server refuses the request.
            CacheError: it does not answer, or not as OpenAI's does.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens or self._answer_tokens,
            "temperature": 0.0,
            "logprobs": TOP_LOGPROBS,
            **({"cache_salt": salt} if salt else {}),
        }
        return self._json(ServedAnswer, "POST", "/v1/completions", body)

    def hits(self) -> float | None:
        """Return all tokens that the server's counters say it did not compute; None where there are no counters."""
        found = [float(value) for name, _, value in self._samples() if name in _HITS]
        return sum(found) if found else None

    def facts(self) -> ServerFacts:
        """Return version, flags and sizes, as far as the server says them."""
        flags: dict[str, str] = {}
        device = page = None
        for name, labels, value in self._samples():
            if name == "vllm:cache_config_info":
                flags = dict(_LABEL.findall(labels))
                page = int(flags.get("block_size", 0)) or None
                device = int(flags.get("num_gpu_blocks", 0) or 0) * (page or 0) or None
            elif name == "sglang:max_total_num_tokens":
                device = int(float(value))
        said = self._optional("/version") or self._optional("/get_server_info")
        flags |= {name: str(value) for name, value in said.items() if isinstance(value, str | int | float)}
        return ServerFacts(str(said.get("version", "unknown")), flags, page, device)

    def wait(self, timeout_s: float, *, until_up: bool) -> None:
        """Wait until the server answers, or until it does not.

        Raises:
            CacheError: it is not so after ``timeout_s``.
        """
        until_s = time.monotonic() + timeout_s
        while self._is_up() is not until_up:
            if time.monotonic() > until_s:
                state = "answer again" if until_up else "stop"
                raise CacheError(f"{self.url} must {state} within {timeout_s:g} s of the restart, and did not")
            time.sleep(RETRY_PAUSE_S)

    def _is_up(self) -> bool:
        try:
            return self._client.get("/v1/models", timeout=RETRY_PAUSE_S * 10).is_success
        except httpx.HTTPError:
            return False

    def _samples(self) -> list[tuple[str, str, str]]:
        try:
            answer = self._client.get("/metrics")
        except httpx.HTTPError as error:
            raise self._away(error) from error
        return _SAMPLE.findall(answer.text) if answer.is_success else []

    def _optional(self, path: str) -> Mapping[str, object]:
        """Return what a path answers that not every server has."""
        try:
            return self._json(dict[str, object], "GET", path)
        except InputError:
            return {}

    def _json(self, kind: type[_Body], method: str, path: str, body: object = None) -> _Body:
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._away(error) from error
        if not answer.is_success:
            refused = InputError if answer.is_client_error else CacheError
            raise refused(f"{self.url}{path} answers {answer.status_code}: {answer.text[:200]}")
        try:
            return TypeAdapter(kind).validate_json(answer.content)
        except ValidationError as error:
            raise CacheError(f"{self.url}{path} must answer as OpenAI's servers do: {error}") from error

    def _away(self, error: Exception) -> CacheError:
        return CacheError(f"{self.url} does not answer: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()
