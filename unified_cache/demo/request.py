"""What a caller sees of one request: the prompt it handed in, the tokens that come out, how it ended."""

from collections.abc import Collection
from enum import Enum

from unified_cache.errors import InputError
from unified_cache.integrations.transformers import Reused
from unified_cache.page import DEFAULT_NAMESPACE, Namespace

__all__ = ["DemoRequest", "RequestOutcome"]


class RequestOutcome(Enum):
    """How a request ended."""

    FINISHED = "finished"
    """All its tokens are out."""
    ABORTED = "aborted"
    """Somebody gave it up; the tokens that were out by then stay."""


class DemoRequest:
    """A prompt and what came of it so far. The engine fills it in; whoever submitted it reads."""

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
        """When the engine took it, on the engine's clock."""
        self.first_token_s: float | None = None
        """From then until its first token, in seconds; the time in the queue included."""
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
        """Tokens that it may come to."""
        return self._prompt_tokens + self.tokens_max

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens are out."""
        count = len(self.tokens) - self._prompt_tokens
        return count == self.tokens_max or (count > 0 and self.tokens[-1] in self.stop)
