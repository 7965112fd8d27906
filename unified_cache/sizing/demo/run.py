"""Run of the demo: serve conversations, restart the engine on the same store, go on; then serve all of it cold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import numpy as np

from unified_cache.cache.cache import UnifiedCache
from unified_cache.integrations.transformers import KeptState
from unified_cache.sizing.demo.engine import DemoEngine, EngineSettings
from unified_cache.sizing.demo.one_thread import one_thread
from unified_cache.sizing.demo.opening import TierSizes, load_model, opened
from unified_cache.sizing.demo.request import DemoRequest
from unified_cache.sizing.demo.result import DemoResult, ServedTurn
from unified_cache.sizing.demo.session import Session
from unified_cache.sizing.demo.workload import (
    QUESTIONS,
    ConversationTurn,
    Interruption,
    first_life,
    second_life,
    system_prompt,
    tokens_of,
)

__all__ = ["DemoSettings", "run_demo"]

SETTLE_S = 60.0
"""Longest wait for what moves between two requests."""

COMPARABLE = EngineSettings(keeps_answers=False)
"""Settings under which every engine computes a page in the same chunk, so answers do not depend on cache hits."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of a demo: the model, the store, and the number of conversations."""

    model: str = "tiny-gpt-oss"
    storage: str | None = None
    """URL of the L3 that both engines share; None for a directory that is removed afterwards."""
    users: int = 3
    system_tokens: int = 1024
    """Tokens of the prompt that all conversations begin with."""
    answer_tokens: int = 16

    @property
    def requests_count(self) -> int:
        """Requests of one run, those served cold included."""
        return 2 * (len(first_life(self.users)) + len(second_life(self.users)) + self.users)


Watch = Callable[[int, str], None]
"""Called after each request with how many are done, and what is being done."""


def run_demo(settings: DemoSettings, watch: Watch) -> DemoResult:
    """Serve the workload; return what it has shown.

    Raises:
        ConfigError, StorageError: no such model, or the store cannot be opened.
    """
    kept = load_model(settings.model)
    with one_thread(), _storage(settings) as storage:
        return DemoRun(settings, kept, storage, watch).run()


@dataclass(slots=True)
class DemoRun:
    """State of a running demo."""

    settings: DemoSettings
    kept: KeptState
    storage: str
    watch: Watch
    sessions: list[Session] = field(default_factory=list)
    done: list[tuple[ConversationTurn, DemoRequest, bool]] = field(default_factory=list)
    """With each visit its request, and whether others were served beside it."""
    forwards: dict[str, int] = field(default_factory=dict)

    def run(self) -> DemoResult:
        """Both lives, then the same prompts cold."""
        users = range(self.settings.users)
        beginning = tokens_of(system_prompt(self.settings.system_tokens))
        self.sessions = [Session([*beginning, *tokens_of(f"\nreader {user + 1}")]) for user in users]
        with self._engine() as engine:
            for visit in first_life(len(users)):
                self._serve(engine, visit)
        with self._engine() as engine:
            for visit in second_life(len(users)):
                self._serve(engine, visit)
            self._serve_together(engine, [ConversationTurn(user, 4, Interruption.NONE) for user in users])
        served = tuple(self._cold())
        return DemoResult(self.settings.model, self.settings.storage or "a temporary directory", served, self.forwards)

    @contextmanager
    def _engine(self) -> Iterator[DemoEngine]:
        """Open an engine that the longest conversation fits into, over a host tier for all of them."""
        pages_max = self._pages_max
        sizes = TierSizes(device_pages=2 * pages_max, host_pages=2 * pages_max * self.settings.users)
        with opened(self.settings.model, self.kept, sizes, self.storage, COMPARABLE) as engine:
            yield engine
            engine.cache.wait_all(SETTLE_S)
            for mode, count in engine.forwards.items():
                if not count:
                    continue
                self.forwards[mode.value] = self.forwards.get(mode.value, 0) + count

    @property
    def _pages_max(self) -> int:
        turns = sum(len(_line(question)) + self.settings.answer_tokens for question in QUESTIONS)
        return -(-(self.settings.system_tokens + len("\nreader 00") + turns) // self.kept.layout.page_size)

    def _serve(self, engine: DemoEngine, visit: ConversationTurn) -> None:
        """Serve one turn on its own, after what comes before it has happened."""
        self._meet(engine.cache, visit.hurdle)
        session = self.sessions[visit.user]
        for _ in session.stream(engine, tokens_of(_line(QUESTIONS[visit.turn])), self.settings.answer_tokens):
            pass
        assert session.last is not None
        self._note(visit, session.last, is_together=False)

    def _serve_together(self, engine: DemoEngine, visits: list[ConversationTurn]) -> None:
        """Serve a turn of several users in one continuous batch."""
        requests: list[DemoRequest] = []
        for visit in visits:
            question = tokens_of(_line(QUESTIONS[visit.turn]))
            requests.append(self.sessions[visit.user].next_request(question, self.settings.answer_tokens))
            engine.submit(requests[-1])
        engine.run()
        for visit, request in zip(visits, requests, strict=True):
            self.sessions[visit.user].record_answer()
            self._note(visit, request, is_together=True)

    def _meet(self, cache: UnifiedCache, hurdle: Interruption) -> None:
        cache.wait_all(SETTLE_S)
        if hurdle is Interruption.CROWD:
            everything = [np.ones(min(cache.config.device_pages), np.bool_) for _ in cache.layout.components]
            taken = cache.allocate(everything)
            assert taken is not None, "nothing is pinned between two requests"
            cache.free(taken)
        elif hurdle is Interruption.RESET:
            cache.reset()

    def _note(self, visit: ConversationTurn, request: DemoRequest, *, is_together: bool) -> None:
        self.done.append((visit, request, is_together))
        self.watch(len(self.done), f"reader {visit.user + 1}, turn {visit.turn + 1}")

    def _cold(self) -> Iterator[ServedTurn]:
        """Serve every prompt once more, by an engine that has nothing of it."""
        with opened(self.settings.model, self.kept, TierSizes(2 * self._pages_max), None, COMPARABLE) as engine:
            for number, (visit, request, is_together) in enumerate(self.done, 1):
                engine.cache.reset()
                again = DemoRequest(request.tokens[: request.prompt_tokens], request.tokens_max)
                for _ in engine.stream(again):
                    pass
                yield ServedTurn.of(visit, request, again, is_together=is_together)
                self.watch(len(self.done) + number, "the same, cold")


def _line(question: str) -> str:
    return f"\n> {question}\n"


@contextmanager
def _storage(settings: DemoSettings) -> Iterator[str]:
    if settings.storage is not None:
        yield settings.storage
        return
    with TemporaryDirectory(prefix="unified-cache-demo-") as directory:
        yield f"file:{directory}"
