"""One request from the caller's side: its prompt, the tokens generated so far, and its outcome."""

from collections.abc import Collection
from enum import Enum

from unified_cache.core.errors import InputError
from unified_cache.core.page import DEFAULT_NAMESPACE, Namespace
from unified_cache.integrations.transformers import Reused

__all__ = ["DemoRequest", "RequestOutcome"]


class RequestOutcome(Enum):
    """Outcome of a request."""

    FINISHED = "finished"
    """All its tokens are out."""
    ABORTED = "aborted"
    """The caller aborted it; the tokens generated until then stay."""


class DemoRequest:
    """A prompt and the tokens generated after it. The engine fills it in; the caller that submitted it reads it."""

    __slots__ = (
        "_prompt_tokens",
        "computed_tokens",
        "first_token_s",
        "namespace",
        "outcome",
        "reused",
        "stop",
        "submitted_s",
        "tokens",
        "tokens_max",
    )

    def __init__(
        self,
        prompt: list[int],
        tokens_max: int,
        stop: Collection[int] = (),
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> None:
        """Ask for at most ``tokens_max`` tokens after ``prompt``, up to one of ``stop``.

        Raises:
            InputError: nothing to begin with, or nothing to generate.
        """
        if not prompt or tokens_max < 1:
            raise InputError(f"a request needs tokens and room for one more, found {len(prompt)} and {tokens_max}")
        self.tokens = list(prompt)
        """The prompt, and what was generated since."""
        self.tokens_max = tokens_max
        self.stop = frozenset(stop)
        self.namespace = namespace
        self.outcome: RequestOutcome | None = None
        """None as long as it waits or runs."""
        self.reused = Reused()
        self.computed_tokens = 0
        """Tokens of the prompt that the model was run on."""
        self.submitted_s = 0.0
        """Time at which the engine took it, on the engine's clock."""
        self.first_token_s: float | None = None
        """Seconds from ``submitted_s`` until its first token; the time in the queue included."""
        self._prompt_tokens = len(prompt)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._prompt_tokens

    @property
    def generated(self) -> list[int]:
        """Tokens that came out so far; a stop token is the last of them."""
        return self.tokens[self._prompt_tokens :]

    @property
    def length_max(self) -> int:
        """Largest number of tokens, prompt and answer together."""
        return self._prompt_tokens + self.tokens_max

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens are out."""
        count = len(self.tokens) - self._prompt_tokens
        return count == self.tokens_max or (count > 0 and self.tokens[-1] in self.stop)
