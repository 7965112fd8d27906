"""A stock model with a prefix cache: the loop for one request at a time."""

import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from unified_cache.cache.cache import UnifiedCache
from unified_cache.core.errors import ConfigError, InputError
from unified_cache.core.page import DEFAULT_NAMESPACE, Namespace, TokensLike, encode_tokens
from unified_cache.core.pool import Hits
from unified_cache.integrations.transformers.pages import DevicePages
from unified_cache.integrations.transformers.sequence import NO_EMBEDDED, EmbeddedMedia, Sequence, Stage

CHUNK_TOKENS = 512
"""Usual tokens per forward of a prefill."""

POLL_S = 0.0005
"""Pause between two polls of an awaited transfer: short beside reading one page from a local disk."""

_WAITING = (Stage.FETCH, Stage.LOAD)


def greedy(logits: torch.Tensor) -> int:
    """Return the likeliest token; ``logits`` has shape (vocabulary,)."""
    return int(logits.argmax())


@dataclass(frozen=True, slots=True)
class Completion:
    """Generated tokens of one request, and how much of its prompt was reused."""

    tokens: tuple[int, ...]
    """Generated, in order; a stop token is the last of them."""
    prompt_tokens: int
    computed_tokens: int
    """Tokens of the prompt that the model was run on: all that were not reused."""
    reused: Hits
    """Tokens of the prompt that were not computed again, by the tier that they came from."""
    first_token_s: float
    """Seconds from the call until the first token was known."""


class Generation:
    """Tokens of one request, generated while they are iterated over, once. The request begins with the first one.

    Leaving the loop early and ``close`` abort the request; computed pages of its prompt stay cached.
    """

    __slots__ = ("_tokens", "answer")

    def __init__(self, tokens: Generator[int, None, Completion]) -> None:
        self._tokens = tokens
        self.answer: Completion | None = None
        """Result of the request, once its last token is out."""

    def __iter__(self) -> Iterator[int]:
        self.answer = yield from self._tokens

    def close(self) -> None:
        """Abort the request, if it is under way."""
        self._tokens.close()


class PrefixCachedModel:
    """Runs a model over a prefix cache: the part of a prompt that any tier holds is not computed again.

    Borrows model, cache and pages; the caller closes the cache. One thread owns it, as it does the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: UnifiedCache,
        pages: DevicePages,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Put ``model`` over a ``cache`` that was opened with ``pages.layout`` and ``pages.pools``.

        ``chunk_tokens`` is what a prefill computes in one forward at most, a whole number of pages. ``pause``
        is called between two looks at a transfer, with seconds.

        Raises:
            ConfigError: they do not belong together, or no page fits into a chunk.
        """
        if pages.kept.model is not model:
            raise ConfigError("the pages are another model's")
        if cache.layout != pages.layout:
            raise ConfigError(f"the cache is opened for {cache.layout}, the model keeps {pages.layout}")
        page_size = pages.layout.page_size
        if chunk_tokens < page_size:
            raise ConfigError(f"chunk_tokens must hold a page of {page_size} tokens, found {chunk_tokens}")
        self.cache = cache
        self.pages = pages
        self._chunk_pages = chunk_tokens // page_size
        self._clock = clock
        self._pause = pause

    def start(
        self, tokens: TokensLike, namespace: Namespace = DEFAULT_NAMESPACE, media: EmbeddedMedia = NO_EMBEDDED
    ) -> Sequence:
        """Return a request that has not begun, to be stepped: several may be under way, in any order of steps.

        ``media`` is for models that read embedded pictures in a row, each token those before it, as LLaVA does.

        Raises:
            TokenError: no token ids.
            InputError: no token at all, or media outside them.
        """
        ids = np.frombuffer(encode_tokens(tokens), "<i4").tolist()
        return Sequence(self.cache, self.pages, ids, namespace, self._chunk_pages, media)

    def prefill(
        self, tokens: TokensLike, namespace: Namespace = DEFAULT_NAMESPACE, media: EmbeddedMedia = NO_EMBEDDED
    ) -> Sequence:
        """Return a request; restore the longest prefix and compute the rest.

        Waits for transfers. The caller ends the request: ``finish`` or ``abort``, or its ``with`` block.

        Raises:
            TokenError, InputError: as ``start``.
        """
        sequence = self.start(tokens, namespace, media)
        try:
            while (stage := sequence.step()) is not Stage.READY:
                if stage in _WAITING:
                    self._pause(POLL_S)
        except BaseException:
            sequence.abort()
            raise
        return sequence

    def generate(
        self,
        tokens: TokensLike,
        *,
        tokens_max: int,
        stop: Collection[int] = (),
        choose: Callable[[torch.Tensor], int] = greedy,
        namespace: Namespace = DEFAULT_NAMESPACE,
        media: EmbeddedMedia = NO_EMBEDDED,
    ) -> Generation:
        """Return the answer to a prompt, to be iterated over: at most ``tokens_max`` tokens, up to one of ``stop``.

        ``choose`` picks a token given what follows, shape (vocabulary,). Pages that the answer fills are kept like
        those of the prompt: the next turn of a conversation passes prompt, answer and what is new, and goes on from
        there.

        Raises:
            TokenError, InputError: as ``start``, at the first token; or ``tokens_max`` is not positive.
        """
        if tokens_max < 1:
            raise InputError(f"tokens_max must be positive, found {tokens_max}")
        return Generation(self._answer(tokens, tokens_max, frozenset(stop), choose, namespace, media))

    def _answer(
        self,
        prompt: TokensLike,
        tokens_max: int,
        stop: frozenset[int],
        choose: Callable[[torch.Tensor], int],
        namespace: Namespace,
        media: EmbeddedMedia,
    ) -> Generator[int, None, Completion]:
        started_s = self._clock()
        with self.prefill(prompt, namespace, media) as sequence:
            assert sequence.logits is not None, "a prompt that is ready has been computed"
            prompt_tokens = len(sequence.tokens)
            generated = [choose(sequence.logits)]
            first_token_s = self._clock() - started_s
            yield generated[0]
            while len(generated) < tokens_max and generated[-1] not in stop:
                generated.append(choose(sequence.feed(generated[-1])))
                yield generated[-1]
        return Completion(tuple(generated), prompt_tokens, sequence.computed_tokens, sequence.reused, first_token_s)
