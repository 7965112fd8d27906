"""Verdicts: how far answers from the cache are from cold ones, beside how far cold ones are from each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from unified_cache.sizing.faithful.server import ServedAnswer, ServerFacts
from unified_cache.sizing.report.page import Page, TableSection

__all__ = ["AnswerPair", "FaithfulResult", "FaithfulVerdict", "Noise", "PhaseResult", "distance_of"]

NOISE_TIMES = 4
"""Distance from which on an answer is another one, in noise floors."""
NOISE_MAX = 1.0
"""Nats: cold answers that differ by more among themselves tell nothing."""
ANSWER_TOKENS_MIN = 4
PAIRS_SHOWN_MAX = 40

PHASE_COLUMNS = ("phase", "verdict", "why", "answers", "wrong", "hit tokens", "furthest, nats")
PAIR_COLUMNS = ("phase", "nats", "parts at character", "tokens cached", "planted", "cold", "cached", "prompt")


class FaithfulVerdict(Enum):
    """Verdict on a phase, or on all."""

    FAITHFUL = "faithful"
    UNFAITHFUL = "unfaithful"
    CANNOT_TELL = "cannot tell"


def distance_of(cold: ServedAnswer, other: ServedAnswer) -> float:
    """Return how far two answers to a prompt are apart, in nats.

    That is the largest difference of a logprob up to where they part, or what the cold one loses by the other's token
    there, if that is more. Without logprobs other words are infinitely far.
    """
    if not cold.top or not other.top:
        return 0.0 if cold.text == other.text else math.inf
    distance = 0.0
    for token, other_token, cold_top, other_top in zip(cold.tokens, other.tokens, cold.top, other.top, strict=False):
        if token != other_token:
            return max(distance, cold_top[token] - cold_top.get(other_token, min(cold_top.values())))
        distance = max(distance, *(abs(cold_top[each] - other_top[each]) for each in cold_top.keys() & other_top))
    return distance


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """An answer that may have come from the cache, beside the cold one to the same prompt."""

    prompt: str
    fact: str
    """What the right answer begins with."""
    cold: ServedAnswer
    other: ServedAnswer

    @property
    def distance(self) -> float:
        """Distance of the two, in nats."""
        return distance_of(self.cold, self.other)

    @property
    def parts_at(self) -> int | None:
        """The first character that differs; None for the same words."""
        if self.cold.text == self.other.text:
            return None
        pairs = zip(self.cold.text, self.other.text, strict=False)
        common = min(len(self.cold.text), len(self.other.text))
        return next((place for place, (left, right) in enumerate(pairs) if left != right), common)

    @property
    def row(self) -> tuple[str, ...]:
        """What a page shows of it, as PAIR_COLUMNS without the phase."""
        place = "" if self.parts_at is None else str(self.parts_at)
        cached = "unknown" if self.other.cached_tokens is None else str(self.other.cached_tokens)
        return f"{self.distance:.2f}", place, cached, self.fact, self.cold.text, self.other.text, self.prompt


@dataclass(frozen=True, slots=True)
class Noise:
    """Bounds on the distance of answers, in nats."""

    tolerance: float
    """Allowed where cold answers are all equal: kernels that compute a prefix in other pieces round otherwise."""
    floor: float | None = None
    """Largest distance of cold answers among themselves; None where no prompt could be asked cold again."""

    @property
    def limit(self) -> float:
        """From here on an answer is another one."""
        return max(self.tolerance, NOISE_TIMES * (self.floor or 0.0))


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One phase: what was compared, and what it shows."""

    name: str
    verdict: FaithfulVerdict
    reason: str
    """Why it cannot tell, or what is wrong."""
    pairs: tuple[AnswerPair, ...] = ()
    hit_tokens: int = 0
    """Tokens of the prompts that were not computed, as the server counts them."""
    wrong: int = 0

    @classmethod
    def unknown(cls, name: str, reason: str) -> "PhaseResult":
        """Return a phase that cannot tell."""
        return cls(name, FaithfulVerdict.CANNOT_TELL, reason)

    @classmethod
    def of(
        cls, name: str, pairs: Sequence[AnswerPair], counted: float | None, noise: "Noise", stray: int = 0
    ) -> "PhaseResult":
        """Judge pairs; ``counted`` are the tokens that the server's counters of all requests rose by, if it has any.

        ``stray`` prompts were hits and must not have been.
        """
        said = [pair.other.cached_tokens for pair in pairs]
        if None in said:
            hits, hit_tokens = list(pairs) if counted else [], int(counted or 0)
        else:
            hits, hit_tokens = [pair for pair in pairs if pair.other.cached_tokens], sum(map(int, filter(None, said)))
        wrong = sum(pair.distance > noise.limit for pair in hits)
        verdict, reason = FaithfulVerdict.CANNOT_TELL, ""
        if stray:
            verdict, reason = FaithfulVerdict.UNFAITHFUL, f"{stray} prompts were hits under a salt that is new"
        elif None in said and counted is None:
            reason = "the server counts no cached tokens"
        elif not hits:
            reason = "no hit seen in the server's counters"
        elif noise.floor is not None and noise.floor > NOISE_MAX:
            reason = f"too noisy: cold answers differ by {noise.floor:.2f} nats among themselves"
        elif wrong:
            worst = max(pair.distance for pair in hits)
            verdict, reason = FaithfulVerdict.UNFAITHFUL, f"{wrong} of {len(hits)} answers differ, by {worst:.2f} nats"
        elif min(len(pair.cold.tokens) or len(pair.cold.text) for pair in hits) < ANSWER_TOKENS_MIN:
            reason = f"too few tokens: an answer has fewer than {ANSWER_TOKENS_MIN}"
        else:
            verdict = FaithfulVerdict.FAITHFUL
        return cls(name, verdict, reason, tuple(pairs), hit_tokens, wrong)

    @property
    def row(self) -> tuple[str, ...]:
        """What a page shows of it, as PHASE_COLUMNS."""
        furthest = max((pair.distance for pair in self.pairs), default=0.0)
        counts = (str(len(self.pairs)), str(self.wrong), f"{self.hit_tokens:,}", f"{furthest:.2f}")
        return self.name, self.verdict.value, self.reason, *counts


@dataclass(frozen=True, slots=True)
class FaithfulResult:
    """All phases, and the server they were run against."""

    url: str
    model: str
    facts: ServerFacts
    noise: Noise
    phases: tuple[PhaseResult, ...]

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
        phases: dict[str, list[str]] = {}
        for phase in self.phases:
            if phase.reason and phase.verdict is self.verdict:
                phases.setdefault(phase.reason, []).append(phase.name)
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in phases.items())
        return f"{self.verdict.value}: {reasons}" if reasons else self.verdict.value

    @property
    def _settings(self) -> dict[str, str]:
        return {"server": self.url, "model": self.model, "version": self.facts.version, **self.facts.flags}

    def as_json(self) -> Mapping[str, object]:
        """Return the figures, every prompt and both its answers."""
        phases = [
            {
                **{name: value for name, value in asdict(phase).items() if name != "pairs"},
                "verdict": phase.verdict.value,
                "pairs": [asdict(pair) | {"distance": _finite(pair.distance)} for pair in phase.pairs],
            }
            for phase in self.phases
        ]
        return {
            "verdict": self.verdict.value,
            "server": self._settings,
            "noise_floor": self.noise.floor,
            "phases": phases,
        }

    def page(self, *, with_answers: bool) -> Page:
        """Return the page: verdicts, and for a bug report prompts and answers, the furthest first."""
        floor = "not measured" if self.noise.floor is None else f"{self.noise.floor:.2f} nats"
        tables = [TableSection("Phases", PHASE_COLUMNS, [phase.row for phase in self.phases], text_columns=3)]
        if with_answers:
            pairs = sorted(
                ((phase.name, pair) for phase in self.phases for pair in phase.pairs),
                key=lambda each: -each[1].distance,
            )
            rows = [(name, *pair.row) for name, pair in pairs[:PAIRS_SHOWN_MAX]]
            tables.append(
                TableSection("Answers, the furthest from the cold one first", PAIR_COLUMNS, rows, len(PAIR_COLUMNS))
            )
        return Page(
            title=f"Is the cache of {self.model} faithful?",
            headline=self.headline,
            lead=f"Noise floor, cold answers among themselves: {floor}.",
            alarm=self.headline if with_answers and self.verdict is FaithfulVerdict.UNFAITHFUL else "",
            charts=[],
            tables=tables,
            notes=[],
            settings=list(self._settings.items()),
        )


def _finite(distance: float) -> float | None:
    """Return a distance as JSON has it: null for one that is infinite."""
    return distance if math.isfinite(distance) else None
