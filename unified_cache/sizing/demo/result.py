"""Values of the demo: its settings, each answer beside the one computed without a cache, the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from unified_cache.sizing.report.page import TableSection

SOURCES = ("device", "host", "storage", "computed")
"""Tiers that tokens of a prompt come from, or computing them."""

COLUMNS = ("question", "first token s", "computing s", "of it", *(f"{source} pages" for source in SOURCES), "same")


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of a demo, as the user gives them; those of the serving process name the model's path and a URL."""

    document: Path
    questions: tuple[str, ...]
    """The first is asked again and again, so that its words can be compared."""
    model: str
    """Directory or GGUF file of a checkpoint, the default model, or the name of a tiny one."""
    storage: str | None = None
    """URL of a store of the user's; None for one of the demo's own."""
    document_tokens_max: int = 2048
    answer_tokens_max: int = 24


@dataclass(frozen=True, slots=True)
class Ready:
    """Document and pages of a process that serves."""

    document_tokens: int
    page_tokens: int
    page_bytes: int
    last_key: str
    """Key of the document's last page, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One answer of the model."""

    question: str
    text: str
    tokens: Sequence[int]
    logits: str
    """Digest of the logits that every token was chosen from."""
    first_token_s: float
    prompt_tokens: Mapping[str, int]
    """Tokens of the prompt by source, one of ``SOURCES``."""
    flawed_pages: int = 0
    """Pages that storage returned damaged, while this was answered."""

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return sum(self.prompt_tokens.values()) - self.prompt_tokens["computed"]

    @property
    def main_source(self) -> str:
        """The source of most of the prompt."""
        return max(SOURCES, key=self.prompt_tokens.__getitem__)


@dataclass(frozen=True, slots=True)
class Step:
    """One question, answered over the cache and, in the end, without it."""

    name: str
    answer: DemoAnswer
    reference: DemoAnswer | None = None
    """The same question, computed without a cache; None until that was done."""

    @property
    def has_same_words(self) -> bool:
        """Whether both answers have the same tokens."""
        return self.reference is not None and self.answer.tokens == self.reference.tokens

    @property
    def has_same_logits(self) -> bool:
        """Whether the logits of every token are equal, bit by bit."""
        return self.reference is not None and self.answer.logits == self.reference.logits

    @property
    def computing_s(self) -> float:
        """Seconds to the first token of the answer without a cache; NaN until that was computed."""
        return float("nan") if self.reference is None else self.reference.first_token_s

    def cells(self, page_tokens: int) -> tuple[str, ...]:
        """Return the row of ``COLUMNS``."""
        wait_s = self.answer.first_token_s
        waits = (f"{wait_s:.2f}", f"{self.computing_s:.2f}", f"{wait_s / self.computing_s:.3f}")
        pages = (f"{self.answer.prompt_tokens[source] / page_tokens:.3g}" for source in SOURCES)
        same = "bits" if self.has_same_logits else "words" if self.has_same_words else "NO"
        return (self.name, *waits, *pages, same)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All answers of the demo so far."""

    ready: Ready
    model: str
    storage: str
    document: str
    """Name of the document."""
    steps: tuple[Step, ...] = ()
    restart_s: float = 0.0
    """Seconds from the kill until the new process was ready."""
    flipped: str | None = None
    """File in which a byte was flipped; None where the store has none that may be damaged."""
    findings: tuple[str, ...] = ()
    """Differences from computing without a cache, and wrong counts."""

    def with_references(self, references: Sequence[DemoAnswer]) -> "DemoResult":
        """Put the answer computed without a cache beside each answer to the same question, and judge them."""
        by_question = {each.question: each for each in references}
        steps = tuple(replace(step, reference=by_question[step.answer.question]) for step in self.steps)
        found = [f"the answer of {step.name!r} has other words" for step in steps if not step.has_same_words]
        # Where two runs that compute everything have other bits, computing itself decides them.
        if all(step.has_same_logits for step in steps if not step.answer.reused_tokens):
            found += [f"the logits of {step.name!r} differ" for step in steps if not step.has_same_logits]
        flawed_pages, flipped_bytes = sum(step.answer.flawed_pages for step in steps), int(self.flipped is not None)
        if flawed_pages != flipped_bytes:
            found.append(f"{flipped_bytes} pages must be found flawed, found {flawed_pages}")
        return replace(self, steps=steps, findings=tuple(found))

    @property
    def table(self) -> TableSection:
        """Every question: the wait beside computing it, and the pages of its prompt by source."""
        return TableSection("Waits", COLUMNS, [step.cells(self.ready.page_tokens) for step in self.steps])

    @property
    def verdict(self) -> str:
        """Return one sentence: whether the answers are what they are without a cache."""
        if self.findings:
            return f"{'; '.join(self.findings)}: this is a bug, please report it"
        bits = "and no bit of the logits"
        if not all(step.has_same_logits for step in self.steps):
            bits = "though bits of the logits do, also where everything is computed twice"
        return f"{len(self.steps)} answers: 0 words differ from computing without a cache, {bits}"

    def as_json(self) -> dict[str, object]:
        """Return the result for JSON."""
        return {**asdict(self), "identical": not self.findings}
