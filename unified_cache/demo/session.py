"""A conversation: each turn's prompt is all text before it, and so resumes where the turn before it ended."""

from collections.abc import Iterator

from unified_cache.demo.engine import DemoEngine
from unified_cache.demo.request import DemoRequest, RequestOutcome

__all__ = ["Session"]


class Session:
    """One user's side of a conversation. It holds text alone, and so outlives engines."""

    __slots__ = ("last", "spoken")

    def __init__(self, beginning: list[int]) -> None:
        self.spoken = list(beginning)
        """Tokens said so far by either side."""
        self.last: DemoRequest | None = None
        """The turn under way or just over."""

    def ask(self, tokens: list[int], tokens_max: int) -> DemoRequest:
        """Return the request of the next turn, to be submitted; ``hear`` its answer when it is over."""
        self.last = DemoRequest([*self.spoken, *tokens], tokens_max)
        return self.last

    def hear(self) -> None:
        """Append the turn that has ended to the conversation; an aborted one is left out."""
        if self.last is not None and self.last.outcome is RequestOutcome.FINISHED:
            self.spoken = list(self.last.tokens)

    def stream(self, engine: DemoEngine, tokens: list[int], tokens_max: int) -> Iterator[int]:
        """Say something, and yield the answer's tokens as they come."""
        yield from engine.stream(self.ask(tokens, tokens_max))
        self.hear()
