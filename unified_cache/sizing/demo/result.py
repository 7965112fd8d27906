"""Result of a demo, as values and as the rows of its table."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from unified_cache.integrations.transformers import Reused
from unified_cache.sizing.demo.request import DemoRequest
from unified_cache.sizing.demo.workload import QUESTIONS, ConversationTurn, shown

__all__ = ["DemoResult", "ServedTurn", "TierRow"]

COLUMNS = (
    "served from",
    "requests",
    "prompt",
    "device",
    "host",
    "storage",
    "computed",
    "TTFT ms",
    "cold ms",
    "of cold",
)
"""Tokens are means over requests, times are medians."""


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """One request, compared with the same prompt served cold."""

    visit: ConversationTurn
    is_together: bool
    """Whether it shared the engine with others; its time is not comparable then."""
    prompt_tokens: int
    reused: Reused
    computed_tokens: int
    first_token_s: float
    cold_first_token_s: float
    answer: tuple[int, ...]
    cold_answer: tuple[int, ...]

    @classmethod
    def of(cls, visit: ConversationTurn, request: DemoRequest, cold: DemoRequest, *, is_together: bool) -> "ServedTurn":
        """Take what two finished requests have shown."""
        assert request.first_token_s is not None, "a request that is over has a first token"
        assert cold.first_token_s is not None, "the same"
        return cls(
            visit,
            is_together,
            request.prompt_tokens,
            request.reused,
            request.computed_tokens,
            request.first_token_s,
            cold.first_token_s,
            tuple(request.generated),
            tuple(cold.generated),
        )

    @property
    def is_identical(self) -> bool:
        """Whether both answers are the same, token by token."""
        return self.answer == self.cold_answer


@dataclass(frozen=True, slots=True)
class TierRow:
    """Row of the table: the requests that one tier has served."""

    tier: str
    requests: int
    prompt_tokens: float
    device_tokens: float
    host_tokens: float
    storage_tokens: float
    computed_tokens: float
    first_token_s: float
    cold_first_token_s: float

    @classmethod
    def of(cls, tier: str, served: Sequence[ServedTurn]) -> "TierRow":
        """Summarise one or more requests."""

        def mean(count: Callable[[ServedTurn], int]) -> float:
            return statistics.fmean(count(each) for each in served)

        return cls(
            tier,
            len(served),
            mean(lambda each: each.prompt_tokens),
            mean(lambda each: each.reused.device_tokens),
            mean(lambda each: each.reused.host_tokens),
            mean(lambda each: each.reused.storage_tokens),
            mean(lambda each: each.computed_tokens),
            statistics.median(each.first_token_s for each in served),
            statistics.median(each.cold_first_token_s for each in served),
        )

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of ``COLUMNS``."""
        tokens = (
            self.prompt_tokens,
            self.device_tokens,
            self.host_tokens,
            self.storage_tokens,
            self.computed_tokens,
        )
        times = (f"{self.first_token_s * 1e3:.1f}", f"{self.cold_first_token_s * 1e3:.1f}")
        share = f"{self.first_token_s / self.cold_first_token_s:.2f}"
        return (self.tier, str(self.requests), *(f"{count:.0f}" for count in tokens), *times, share)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of a whole demo."""

    model: str
    storage: str
    served: tuple[ServedTurn, ...]
    forwards: dict[str, int]
    """Iterations of both engines, by what their batch was."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what ``TierRow.cells`` returns."""
        return COLUMNS

    @property
    def rows(self) -> tuple[TierRow, ...]:
        """The table: every prompt served cold, then by tier those served one at a time that found something there."""
        alone = [each for each in self.served if not each.is_together]
        computed = [
            ServedTurn(
                each.visit,
                False,
                each.prompt_tokens,
                Reused(),
                each.prompt_tokens,
                each.cold_first_token_s,
                each.cold_first_token_s,
                each.cold_answer,
                each.cold_answer,
            )
            for each in alone
        ]
        by_tier = {
            tier: [each for each in alone if each.visit.turn and served_from(each) == tier]
            for tier in ("device", "host", "storage")
        }
        return (
            TierRow.of("nowhere (cold)", computed),
            *(TierRow.of(tier, found) for tier, found in by_tier.items() if found),
        )

    @property
    def different(self) -> int:
        """Requests whose answer is not the cold one's."""
        return sum(not each.is_identical for each in self.served)

    def verdict(self) -> str:
        """Return one sentence: whether answers are what they are without a cache."""
        count = len(self.served)
        if self.different:
            return (
                f"{self.different} of {count} answers differ from those computed cold; this is a bug, please report it"
            )
        return f"all {count} answers are identical, token by token, to those computed cold"

    def transcript(self, user: int = 0) -> Iterator[str]:
        """Yield one user's conversation, and beside each answer what it took."""
        for each in self.served:
            if each.visit.user == user:
                source = served_from(each) or "nowhere"
                yield f"> {QUESTIONS[each.visit.turn]}"
                yield f"  {shown(list(each.answer))}"
                yield (
                    f"  {each.first_token_s * 1e3:.0f} ms to the first token; {each.reused.tokens:,} of "
                    f"{each.prompt_tokens:,} tokens from {source}, {each.computed_tokens:,} computed"
                )

    def forwards_text(self) -> str:
        """Return how many iterations there were of each kind."""
        return ", ".join(f"{count:,} {mode}" for mode, count in self.forwards.items())

    def as_json(self) -> dict[str, object]:
        """Return what JSON can hold."""
        return {
            "model": self.model,
            "storage": self.storage,
            "identical": not self.different,
            "forwards": self.forwards,
            "rows": [asdict(row) for row in self.rows],
            "requests": [
                {
                    "user": each.visit.user,
                    "turn": each.visit.turn,
                    "together": each.is_together,
                    "prompt_tokens": each.prompt_tokens,
                    "reused": asdict(each.reused),
                    "computed_tokens": each.computed_tokens,
                    "first_token_s": each.first_token_s,
                    "cold_first_token_s": each.cold_first_token_s,
                    "answer": shown(list(each.answer)),
                    "identical": each.is_identical,
                }
                for each in self.served
            ],
        }


def served_from(served: ServedTurn) -> str | None:
    """Return the tier that most of the reused tokens came from; None if there are none."""
    reused = served.reused
    by_tier = {"device": reused.device_tokens, "host": reused.host_tokens, "storage": reused.storage_tokens}
    return max(by_tier, key=by_tier.__getitem__) if reused.tokens else None
