"""The phases of a check: each asks again what was asked cold, when the prefix lies somewhere else."""

import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import combinations, count

from unified_cache.core.errors import InputError
from unified_cache.sizing.faithful.prompts import FactDocument
from unified_cache.sizing.faithful.result import AnswerPair, FaithfulResult, Noise, PhaseResult, distance_of
from unified_cache.sizing.faithful.server import CompletionServer, ServedAnswer
from unified_cache.sizing.replay.trace import OnProgress

__all__ = ["PHASES", "FaithfulSettings", "run_trial"]

PHASES = ("device", "branches", "aligned", "concurrent", "salts", "host", "storage", "restart")
"""In their order; ``cold`` comes before them."""

CHURN_SHARE = 1.25
"""Tokens of other documents that push a prefix out of a tier, in its sizes."""
AT_ONCE = 8
ALIGN_TRIES_MAX = 4


@dataclass(frozen=True, slots=True)
class FaithfulSettings:
    """Sizes and phases of one check."""

    documents: int
    facts: int
    device_tokens: int | None
    """Size of the device's cache where the server does not say it."""
    host_tokens: int | None
    """Without it ``storage`` is skipped."""
    page_tokens: int | None
    restart_command: str | None
    restart_timeout_s: float
    skipped: frozenset[str]
    tolerance: float
    first_number: int
    """Number of the first document; others follow. One that was used before is not cold."""


@dataclass(slots=True)
class _Trial:
    server: CompletionServer
    settings: FaithfulSettings
    documents: list[FactDocument]
    numbers: Iterator[int]
    noise: Noise
    stray: int = 0
    """Prompts under a new salt that were hits."""
    cold: dict[str, ServedAnswer] = field(default_factory=dict)
    """By prompt."""

    # ---- asking ----------------------------------------------------------------------------------------------

    def new_document(self) -> FactDocument:
        return FactDocument(next(self.numbers), self.settings.facts)

    def at_once(self, ask: Callable[[str], ServedAnswer], prompts: Iterable[str]) -> list[ServedAnswer]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(ask, prompts))

    def ask_cold(self, prompt: str) -> ServedAnswer:
        """Ask under a salt that nobody has used; a hit all the same is counted."""
        answer = self.server.ask(prompt, f"cold-{next(self.numbers)}")
        self.stray += bool(answer.cached_tokens)
        return answer

    def judged(self, name: str, asked: Sequence[tuple[FactDocument, int]], *, is_at_once: bool = False) -> PhaseResult:
        """Ask again what has a cold answer, and judge the answers."""
        before = self.server.hits()
        prompts = [document.prompt(question) for document, question in asked]
        answers = self.at_once(self.server.ask, prompts) if is_at_once else list(map(self.server.ask, prompts))
        pairs = [
            AnswerPair(prompt, document.fact(question), self.cold[prompt], answer)
            for prompt, (document, question), answer in zip(prompts, asked, answers, strict=True)
        ]
        return self.of(name, pairs, before)

    def of(self, name: str, pairs: Sequence[AnswerPair], before: float | None, stray: int = 0) -> PhaseResult:
        self.server.ask(self.new_document().prompt(0), tokens=1)  # idle, an engine counts with its next step
        after = self.server.hits()
        counted = None if before is None or after is None else after - before
        return PhaseResult.of(name, pairs, counted, self.noise, stray)

    @property
    def firsts(self) -> list[tuple[FactDocument, int]]:
        return [(document, 0) for document in self.documents]

    # ---- phases ----------------------------------------------------------------------------------------------

    def ask_all_cold(self) -> None:
        """Ask everything cold: first as it is, then under new salts, alone and at once, which is the noise floor."""
        prompts = [document.prompt(0) for document in self.documents]
        self.cold = {prompt: self.server.ask(prompt) for prompt in prompts}
        try:
            again = [self.ask_cold(prompt) for prompt in prompts]
        except InputError:  # it refuses cache_salt
            return
        if self.stray:
            return
        rounds = [list(self.cold.values()), again, self.at_once(self.ask_cold, prompts)]
        floor = max(
            distance_of(left, right)
            for answers in zip(*rounds, strict=True)
            for left, right in combinations(answers, 2)
        )
        self.noise = replace(self.noise, floor=floor)
        for document in self.documents:
            for question in (1, 2):
                self.cold[document.prompt(question)] = self.ask_cold(document.prompt(question))

    def device(self) -> PhaseResult:
        return self.judged("device", self.firsts)

    def branches(self) -> PhaseResult:
        if self.noise.floor is None:
            return PhaseResult.unknown("branches", NO_SALT)
        return self.judged("branches", [(document, 1) for document in self.documents])

    def aligned(self) -> PhaseResult:
        page = self.settings.page_tokens or self.server.facts().page_tokens
        if self.noise.floor is None:
            return PhaseResult.unknown("aligned", NO_SALT)
        if not page:
            return PhaseResult.unknown("aligned", "no page size in the server's metrics: give --page-tokens")
        pairs: list[AnswerPair] = []
        before = self.server.hits()
        for document in (self.new_document() for _ in self.documents):
            words = 0
            for _ in range(ALIGN_TRIES_MAX):
                prompt = document.prompt(2, " the" * words)
                cold = self.ask_cold(prompt)
                if cold.prompt_tokens % page == 0:
                    break
                words += page - cold.prompt_tokens % page
            else:
                continue
            self.server.ask(prompt)
            pairs.append(AnswerPair(prompt, document.fact(2), cold, self.server.ask(prompt)))
        if not pairs:
            return PhaseResult.unknown("aligned", "no prompt could be made that ends with a page")
        return self.of("aligned", pairs, before)

    def concurrent(self) -> PhaseResult:
        asked = [(document, question) for document in self.documents for question in (0, 1, 2)]
        known = [(document, question) for document, question in asked if document.prompt(question) in self.cold]
        self.at_once(self.server.ask, [document.prompt(question) for document, question in known])
        return self.judged("concurrent", known, is_at_once=True)

    def salts(self) -> PhaseResult:
        if self.noise.floor is None and not self.stray:
            return PhaseResult.unknown("salts", NO_SALT)
        before, pairs = self.server.hits(), []
        for document, question in self.firsts:
            prompt, salt = document.prompt(question), f"one-{document.number}"
            self.stray += bool(self.server.ask(prompt, salt).cached_tokens)
            pairs.append(AnswerPair(prompt, document.fact(question), self.cold[prompt], self.server.ask(prompt, salt)))
            self.ask_cold(prompt)
        return self.of("salts", pairs, before, self.stray)

    def host(self) -> PhaseResult:
        size = self.settings.device_tokens or self.server.facts().device_tokens
        if not size:
            return PhaseResult.unknown("host", "no size of the device in the server's metrics: give --device-tokens")
        self.churn(size)
        return self.judged("host", self.firsts)

    def storage(self) -> PhaseResult:
        self.churn(self.settings.host_tokens or 0)
        return self.judged("storage", self.firsts)

    def restart(self) -> PhaseResult:
        before = self.server.hits()
        if self.settings.restart_command is None:
            self.server.wait(self.settings.restart_timeout_s, until_up=False)
        else:
            restarted = subprocess.run(shlex.split(self.settings.restart_command), check=False)  # noqa: S603 - the user's own
            if restarted.returncode:
                raise InputError(f"--restart-command ended with {restarted.returncode}, expected 0")
        self.server.wait(self.settings.restart_timeout_s, until_up=True)
        after = self.server.hits()
        if before and after is not None and after >= before:
            return PhaseResult.unknown("restart", "the server's counters did not start at zero: it was not restarted")
        return self.judged("restart", self.firsts)

    def churn(self, tokens: int) -> None:
        """Ask about other documents until they fill a tier."""
        asked = 0
        while asked < CHURN_SHARE * tokens:
            prompts = [self.new_document().prompt(0) for _ in range(AT_ONCE)]
            answers = self.at_once(lambda prompt: self.server.ask(prompt, tokens=1), prompts)
            asked += max(1, sum(answer.prompt_tokens for answer in answers))


NO_SALT = "no cache_salt: no prompt is cold twice"


def run_trial(server: CompletionServer, settings: FaithfulSettings, on_progress: OnProgress) -> FaithfulResult:
    """Run the phases that are not skipped; the server needs to serve nobody else meanwhile.

    Raises:
        InputError, CacheError: the server refuses, or does not answer.
    """
    numbers = count(settings.first_number)
    documents = [FactDocument(next(numbers), settings.facts) for _ in range(settings.documents)]
    trial = _Trial(server, settings, documents, numbers, Noise(settings.tolerance))
    on_progress(0, "cold")
    trial.ask_all_cold()
    facts = server.facts()
    phases: list[PhaseResult] = []
    runs: tuple[Callable[[], PhaseResult], ...] = (
        *(trial.device, trial.branches, trial.aligned, trial.concurrent, trial.salts),
        *(trial.host, trial.storage, trial.restart),
    )
    wanted = [(name, run) for name, run in zip(PHASES, runs, strict=True) if name not in settings.skipped]
    for done, (name, run) in enumerate(wanted):
        on_progress(done, name)
        phases.append(run())
    on_progress(len(wanted), "")
    return FaithfulResult(server.url, server.model, facts, trial.noise, tuple(phases))
