"""Values of the demo: its settings, each answer beside the one computed without a cache, the verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from unified_cache.sizing.report.page import TableSection

__all__ = ["TIERS", "DemoAnswer", "DemoResult", "Ready", "ServingSettings", "Step"]

TIERS = ("device", "host", "storage", "computed")
"""Where the tokens of a prompt come from."""

COLUMNS = ("question", "first token s", "computing s", "of it", *(f"{tier} pages" for tier in TIERS), "same")


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """Settings of the process that serves."""

    model: str
    """Directory or GGUF file of a checkpoint, or the name of a tiny model."""
    saved_model: str
    """Directory in which the first process saves what was slow to load."""
    storage: str
    """URL of the store."""
    document: str
    """Text that questions are asked about."""
    document_tokens_max: int
    questions: tuple[str, ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Model and document of a process that serves."""

    loaded_s: float
    """Seconds that model and tokenizer took, without the import of torch."""
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
    prompt_tokens: int
    computed_tokens: int
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    flawed_pages: int = 0
    """Pages that storage returned damaged, while this was answered."""

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.prompt_tokens - self.computed_tokens

    def tokens_from(self, tier: str) -> int:
        """Return the tokens of the prompt that came from one of ``TIERS``."""
        return {
            "device": self.device_tokens,
            "host": self.host_tokens,
            "storage": self.storage_tokens,
            "computed": self.computed_tokens,
        }[tier]

    @property
    def main_tier(self) -> str:
        """The tier that most of the prompt came from."""
        return max(TIERS, key=self.tokens_from)


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
        return self.reference is not None and list(self.answer.tokens) == list(self.reference.tokens)

    @property
    def has_same_logits(self) -> bool:
        """Whether the logits of every token are equal, bit by bit."""
        return self.reference is not None and self.answer.logits == self.reference.logits

    @property
    def share(self) -> float | None:
        """Wait for the first token as a share of computing the whole prompt."""
        return None if self.reference is None else self.answer.first_token_s / self.reference.first_token_s

    def cells(self, page_tokens: int) -> tuple[str, ...]:
        """Return the row of ``COLUMNS``."""
        computing = ("", "") if self.reference is None else (f"{self.reference.first_token_s:.2f}", f"{self.share:.3f}")
        same = (
            ""
            if self.reference is None
            else "bits"
            if self.has_same_logits
            else "words"
            if self.has_same_words
            else "NO"
        )
        pages = (f"{self.answer.tokens_from(tier) / page_tokens:.3g}" for tier in TIERS)
        return (self.name, f"{self.answer.first_token_s:.2f}", *computing, *pages, same)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything that the demo has shown so far."""

    ready: Ready
    model: str
    storage: str
    document: str
    """Name of the document."""
    steps: tuple[Step, ...] = ()
    restart_s: float = 0.0
    """Seconds from the kill until the new process was ready."""
    flipped: str | None = None
    """File in which a byte was flipped; None where the store has none that may be touched."""
    findings: tuple[str, ...] = field(default=())
    """What is not as it must be."""

    def with_references(self, references: Sequence[DemoAnswer]) -> "DemoResult":
        """Put the answer computed without a cache beside each answer to the same question, and judge them."""
        by_question = {each.question: each for each in references}
        steps = tuple(replace(step, reference=by_question[step.answer.question]) for step in self.steps)
        return replace(self, steps=steps, findings=tuple(_findings(steps, is_flipped=self.flipped is not None)))

    @property
    def table(self) -> TableSection:
        """Every question: the wait beside computing it, and the pages of its prompt by where they came from."""
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
        """Return what JSON can hold."""
        return {
            "model": self.model,
            **asdict(self.ready),
            "storage": self.storage,
            "document": self.document,
            "restart_s": self.restart_s,
            "flipped": self.flipped,
            "identical": not self.findings,
            "findings": list(self.findings),
            "steps": [
                {**asdict(step), "same_words": step.has_same_words, "same_logits": step.has_same_logits}
                for step in self.steps
            ],
        }


def _findings(steps: Sequence[Step], *, is_flipped: bool) -> list[str]:
    """List differences from computing without a cache, and wrong counts."""
    found = [f"the answer of {step.name!r} has other words" for step in steps if not step.has_same_words]
    # Where two runs that compute everything have other bits, computing itself decides them.
    is_deterministic = all(step.has_same_logits for step in steps if not step.answer.reused_tokens)
    if is_deterministic:
        found += [f"the logits of {step.name!r} differ" for step in steps if not step.has_same_logits]
    flawed_pages = sum(step.answer.flawed_pages for step in steps)
    if flawed_pages != int(is_flipped):
        found.append(f"{int(is_flipped)} pages must be found flawed, found {flawed_pages}")
    return found
