"""Verdicts: how far answers from the cache are from cold ones, beside how far cold ones are from each other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from unified_cache.sizing.faithful.server import ServedAnswer

TOLERANCE_NATS = 0.2
"""Allowed where cold answers are all equal: kernels that compute a prefix in other pieces round otherwise."""
NOISE_TIMES = 4
"""Distance from which on an answer is another one, in noise floors."""
NOISE_MAX = 1.0
"""Nats: cold answers that differ by more among themselves tell nothing."""
ANSWER_TOKENS_MIN = 4
HIT_TOKENS_MIN = 16
"""Where pages are single tokens, prompts of other documents share the first digits of their numbers: that is no hit."""
COUNTING_OPTIONS = "vLLM needs --enable-prompt-tokens-details, SGLang --enable-cache-report"


Asked = tuple[str, str, ServedAnswer, ServedAnswer]
"""A prompt, what its right answer begins with, the cold answer, and one that may have come from the cache."""


class FaithfulVerdict(StrEnum):
    """Verdict on a phase, or on all."""

    FAITHFUL = "faithful"
    UNFAITHFUL = "unfaithful"
    CANNOT_TELL = "cannot tell"


def distance_of(cold: ServedAnswer, other: ServedAnswer) -> float:
    """Return how far two answers to a prompt are apart, in nats.

    That is the largest difference of a logprob up to where their tokens part, or what the cold one loses by the other's
    token there, if that is more. Other words that no logprobs explain are infinitely far. NaN for the same words with
    logprobs that are not numbers.
    """
    is_same = cold.text == other.text
    if not all(answer.top and len(answer.tokens) == len(answer.top) for answer in (cold, other)):
        return 0.0 if is_same else math.inf
    distances: list[float] = []
    for token, other_token, *tops in zip(cold.tokens, other.tokens, cold.top, other.top, strict=False):
        left, right = ({each: math.nan if value is None else value for each, value in top.items()} for top in tops)
        if token != other_token:
            best, last = max(left.values(), default=math.nan), min(left.values(), default=math.nan)
            # A token that is none of the alternatives loses more than the last of them, of one alone nobody knows what.
            distances.append(best - left[other_token] if other_token in left else best - last or math.inf)
            break
        distances += [abs(left[each] - right[each]) for each in left.keys() & right] or [math.nan]
    else:
        distances += [] if is_same and len(cold.tokens) == len(other.tokens) else [math.inf]
    return math.inf if math.isnan(furthest(distances)) and not is_same else furthest(distances)


def furthest(distances: Iterable[float]) -> float:
    """Return the largest distance; NaN if one is."""
    return max(distances, key=lambda each: (math.isnan(each), each), default=0.0)


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """An answer that may have come from the cache, beside the cold one, and their distance in nats."""

    prompt: str
    fact: str
    cold: ServedAnswer
    other: ServedAnswer
    distance: float


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One phase: what was compared, and what it shows."""

    name: str
    reason: str = ""
    """Why it cannot tell, or what is wrong."""
    verdict: FaithfulVerdict = FaithfulVerdict.CANNOT_TELL
    pairs: Sequence[AnswerPair] = ()
    hit_tokens: int = 0
    """Tokens of the prompts that were not computed, as the server says."""
    wrong: int = 0

    @classmethod
    def of(cls, name: str, asked: Iterable[Asked], floor: float | None) -> "PhaseResult":
        """Judge answers; ``floor`` is the noise floor, None where nothing could be asked cold again."""
        pairs = [AnswerPair(*each, distance_of(each[2], each[3])) for each in asked]
        hits = [pair for pair in pairs if (pair.other.cached_tokens or 0) >= HIT_TOKENS_MIN]
        distances = [pair.distance for pair in hits]
        limit = max(TOLERANCE_NATS, NOISE_TIMES * (floor or 0.0))
        wrong = sum(distance > limit for distance in distances)
        verdict, reason = FaithfulVerdict.CANNOT_TELL, ""
        if not hits:  # vLLM leaves out what is 0
            reason = f"no prompt was a hit, or the server does not say so: {COUNTING_OPTIONS}"
        elif floor is not None and not floor <= NOISE_MAX:
            reason = f"too noisy: cold answers differ by {floor:.2f} nats among themselves"
        elif wrong:
            verdict = FaithfulVerdict.UNFAITHFUL
            reason = f"{wrong} of {len(hits)} answers differ, by {furthest(distances):.2f} nats"
        elif math.isnan(furthest(distances)):
            reason = "logprobs that are not numbers"
        elif min(len(pair.cold.tokens) or len(pair.cold.text) for pair in hits) < ANSWER_TOKENS_MIN:
            reason = f"too few tokens: an answer has fewer than {ANSWER_TOKENS_MIN}"
        else:
            verdict = FaithfulVerdict.FAITHFUL
        return cls(name, reason, verdict, pairs, sum(pair.other.cached_tokens or 0 for pair in hits), wrong)


@dataclass(frozen=True, slots=True)
class FaithfulResult:
    """All phases, and the server they were run against."""

    server: Mapping[str, str]
    """Its URL, model and flags."""
    noise_floor: float | None
    phases: Sequence[PhaseResult]

    @property
    def verdict(self) -> FaithfulVerdict:
        """Unfaithful if any phase is, faithful if all are and there is one."""
        found = {phase.verdict for phase in self.phases}
        if FaithfulVerdict.UNFAITHFUL in found:
            return FaithfulVerdict.UNFAITHFUL
        return FaithfulVerdict.FAITHFUL if found == {FaithfulVerdict.FAITHFUL} else FaithfulVerdict.CANNOT_TELL

    @property
    def headline(self) -> str:
        """One sentence: the verdict and its reasons."""
        blamed = [phase for phase in self.phases if phase.reason and phase.verdict is self.verdict]
        return "; ".join([self.verdict.value, *(f"{phase.name}: {phase.reason}" for phase in blamed)])

    def as_json(self) -> Mapping[str, object]:
        """Return the figures, every prompt and both its answers."""
        phases = [asdict(phase) for phase in self.phases]
        return {"verdict": self.verdict, "server": self.server, "noise_floor": self.noise_floor, "phases": phases}
