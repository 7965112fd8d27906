"""The phases of a check: each asks again what was asked cold, when the prefix lies somewhere else."""

import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, count

import numpy as np

from unified_cache.core.errors import CacheError, InputError
from unified_cache.sizing.faithful.result import FaithfulResult, FaithfulVerdict, PhaseResult, distance_of, furthest
from unified_cache.sizing.faithful.server import AT_ONCE, CompletionServer, ServedAnswer
from unified_cache.sizing.replay.trace import OnProgress

PLACES = ("Lisbon", "Oslo", "Cairo", "Quito", "Kyoto", "Lagos", "Lima", "Riga", "Turin", "Hanoi", "Perth", "Dakar")
CHURN_SHARE = 1.25
"""Tokens of other documents that push a prefix out of a tier, in its sizes."""
CHURN_TIMEOUT_S = 1800.0
"""For 36 million tokens at 20,000 per second: more than most hosts hold."""
RESTART_TIMEOUT_S = 900.0
STANDARD_ERROR = 2
METRICS_OPTION = "SGLang needs --enable-metrics"
NO_SALT = "no cache_salt: no prompt is cold twice"


def document_of(number: int, facts_count: int) -> Sequence[tuple[str, str]]:
    """Return prompts about the beginning, the middle and the end of a text, each with the code that it asks for.

    The text shares no page with that of another number; a model that reads another page, or none, answers otherwise.
    """
    rng = np.random.default_rng(number)
    codes = rng.integers(10_000, 100_000, facts_count).tolist()
    facts = [(f"{rng.choice(PLACES)} {index}", str(code)) for index, code in enumerate(codes, 1)]
    lines = [f"Locker {place} opens with the code {code}." for place, code in facts]
    text = "\n".join([f"{number} is the number of this list.", *lines, "That was the whole list of lockers."])
    asked = (facts[0], facts[(facts_count - 1) // 2], facts[-1])
    return [(f"{text}\nOnce more: Locker {place} opens with the code", code) for place, code in asked]


@dataclass(slots=True)
class FaithfulTrial:
    """A check of a server, which needs to serve nobody else meanwhile; of its sizes, and what it has found so far."""

    server: CompletionServer
    documents_count: int
    facts_count: int
    device_tokens: int | None
    """Size of the device's cache where the server does not say it."""
    host_tokens: int | None
    restart_command: Sequence[str]
    numbers: Iterator[int] = field(default_factory=lambda: count(secrets.randbelow(10**9) * 1000))
    """Of documents and salts; one that a server has seen before is not cold."""
    documents: Sequence[Sequence[tuple[str, str]]] = ()
    floor: float | None = None
    """Largest distance of cold answers among themselves; None where none could be asked cold again."""
    stray: int = 0
    """Prompts under a new salt that were hits."""
    cold: dict[str, ServedAnswer] = field(default_factory=dict)
    """By prompt."""

    def run(self, phases: Sequence[str], on_progress: OnProgress) -> FaithfulResult:
        """Run phases; one that fails cannot tell, and is the last. A CacheError if nothing could be asked cold."""
        on_progress(0, "cold")
        self.ask_all_cold()
        flags, _ = self.server.facts()
        found: list[PhaseResult] = []
        for name in phases:
            on_progress(len(found), name)
            try:
                found.append(PHASES[name](self))
            except CacheError as error:
                found.append(PhaseResult(name, str(error)))
                break
        on_progress(len(found), "")
        return FaithfulResult({"url": self.server.url, "model": self.server.model, **flags}, self.floor, found)

    def ask_cold(self, *prompts: str) -> list[ServedAnswer]:
        """Ask about different documents, at once, under a salt that nobody has used; a hit all the same is counted."""
        answers = self.server.ask(*prompts, salt=f"cold-{next(self.numbers)}")
        self.stray += sum(bool(answer.cached_tokens) for answer in answers)
        return answers

    def ask_others(self, prompts_count: int) -> int:
        """Ask about new documents; return the tokens of their prompts as the server says, from words to characters."""
        prompts = [document_of(next(self.numbers), self.facts_count)[0][0] for _ in range(prompts_count)]
        answers = zip(prompts, self.server.ask(*prompts, tokens=1), strict=True)
        return sum(min(max(len(prompt.split()), answer.prompt_tokens or 0), len(prompt)) for prompt, answer in answers)

    def ask_all_cold(self) -> None:
        """Ask everything cold: first as it is, then under new salts, alone and at once, which is the noise floor."""
        self.documents = [document_of(next(self.numbers), self.facts_count) for _ in range(self.documents_count)]
        prompts = [document[0][0] for document in self.documents]
        self.cold = {prompt: self.server.ask(prompt)[0] for prompt in prompts}
        try:
            again = [self.ask_cold(prompt)[0] for prompt in prompts]
        except InputError:  # it refuses cache_salt
            return
        if not self.stray:
            rounds = zip(self.cold.values(), again, self.ask_cold(*prompts), strict=True)
            self.floor = furthest(distance_of(*pair) for answers in rounds for pair in combinations(answers, 2))
            for prompt in (prompt for document in self.documents for prompt, _ in document[1:]):
                [self.cold[prompt]] = self.ask_cold(prompt)

    def again(self, name: str, *questions: int, at_once: bool = False) -> PhaseResult:
        """Ask again what has a cold answer, and judge the answers."""
        asked = [document[question] for document in self.documents for question in questions]
        facts = {prompt: fact for prompt, fact in asked if prompt in self.cold}
        if not facts:
            return PhaseResult(name, NO_SALT)
        batches = [tuple(facts)] if at_once else [(prompt,) for prompt in facts]
        answers = [answer for batch in batches for answer in self.server.ask(*batch)]
        asked_again = [(*each, self.cold[each[0]], answer) for each, answer in zip(facts.items(), answers, strict=True)]
        return PhaseResult.of(name, asked_again, self.floor)

    def concurrent(self) -> PhaseResult:
        """Ask everything again at once, twice: the first time may be the first hit."""
        self.again("concurrent", 0, 1, 2, at_once=True)
        return self.again("concurrent", 0, 1, 2, at_once=True)

    def salts(self) -> PhaseResult:
        """Ask again what is a hit without a salt, and under new salts, where it must be none."""
        if self.floor is None and not self.stray:
            return PhaseResult("salts", NO_SALT)
        found = self.again("salts", 0)
        for document in self.documents if found.hit_tokens else ():
            self.ask_cold(document[0][0])
        reason = f"{self.stray} prompts were hits under a salt that is new"
        return replace(found, verdict=FaithfulVerdict.UNFAITHFUL, reason=reason) if self.stray else found

    def after_others(self, name: str, tokens: int | None) -> PhaseResult:
        """Ask again when others have filled a tier of so many tokens."""
        if not tokens:
            return PhaseResult(name, "no size of the device in the server's metrics: give --device-tokens")
        asked, until_s = 0, time.monotonic() + CHURN_TIMEOUT_S
        while asked < CHURN_SHARE * tokens:
            if time.monotonic() > until_s:
                return PhaseResult(name, f"{asked:,} tokens in {CHURN_TIMEOUT_S:g} s push nothing out of {tokens:,}")
            asked += self.ask_others(AT_ONCE)
        return self.again(name, 0)

    def restart(self) -> PhaseResult:
        """Ask again when a command has restarted the server."""
        self.again("restart", 0)  # hits, so that a counter of them that starts again shows it
        before, command = self.server.hits(), self.restart_command
        try:
            subprocess.run(  # noqa: S603  # the user's own
                command, check=True, stdin=subprocess.DEVNULL, stdout=STANDARD_ERROR, timeout=RESTART_TIMEOUT_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            return PhaseResult("restart", f"--restart-command: {error}")
        self.server.wait(RESTART_TIMEOUT_S)
        after = self.server.hits()
        if not before or after is None:
            return PhaseResult("restart", f"the server's metrics count no hits to tell a restart by: {METRICS_OPTION}")
        if after >= before:
            return PhaseResult("restart", "the server's counters did not start at zero: it was not restarted")
        return self.again("restart", 0)


PHASES: Mapping[str, Callable[[FaithfulTrial], PhaseResult]] = {
    "device": lambda trial: trial.again("device", 0),
    "branches": lambda trial: trial.again("branches", 1),
    "concurrent": FaithfulTrial.concurrent,
    "salts": FaithfulTrial.salts,
    "host": lambda trial: trial.after_others("host", trial.device_tokens or trial.server.facts()[1]),
    "storage": lambda trial: trial.after_others("storage", trial.host_tokens),
    "restart": FaithfulTrial.restart,
}
"""In their order; what is asked cold comes before them."""
