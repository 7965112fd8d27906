"""A conversation: each turn's prompt is all text before it, and so resumes where the turn before it ended."""

from collections.abc import Iterator

from examples.continuous_batching import BatchingEngine, GenerationRequest, RequestOutcome


class Session:
    """One user's side of a conversation. It holds text alone, and so outlives engines."""

    __slots__ = ("last", "tokens")

    def __init__(self, beginning: list[int]) -> None:
        self.tokens = list(beginning)
        """Tokens of the conversation so far, of both sides."""
        self.last: GenerationRequest | None = None
        """The request of the current or the last turn."""

    def next_request(self, tokens: list[int], tokens_max: int) -> GenerationRequest:
        """Return the request of the next turn, to be submitted; call ``record_answer`` when it has ended."""
        self.last = GenerationRequest([*self.tokens, *tokens], tokens_max)
        return self.last

    def record_answer(self) -> None:
        """Append the turn that has ended to the conversation; an aborted one is left out."""
        if self.last is not None and self.last.outcome is RequestOutcome.FINISHED:
            self.tokens = list(self.last.tokens)

    def stream(self, engine: BatchingEngine, tokens: list[int], tokens_max: int) -> Iterator[int]:
        """Serve the next turn, yielding the answer's tokens as they are generated."""
        yield from engine.stream(self.next_request(tokens, tokens_max))
        self.record_answer()
