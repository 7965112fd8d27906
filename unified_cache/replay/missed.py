"""Missed tokens of a replay: for which component and which reason, over the run, and the prefixes that cost most.

Every token that a request asks for and the cache does not hand back is counted once, for the reason that
``UnifiedCache.explain`` gives after all tiers have brought what they can.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from unified_cache.explain.explanation import Explanation
from unified_cache.miss_reason import MissReason
from unified_cache.page import Prompt
from unified_cache.page_digests import DIGEST_BYTES, prompt_digests

__all__ = ["ComponentMiss", "MissCounter", "MissedPrefix", "MissedTokens"]

PREFIXES_SHOWN = 10
"""Prefixes that a result lists."""

_FIRST_TIMES = frozenset({MissReason.NEVER_COMPUTED, MissReason.TOO_LONG, MissReason.PART_OF_PAGE})
"""Reasons for which no prefix is to blame: no cache could have had it."""


@dataclass(frozen=True, slots=True)
class ComponentMiss:
    """Reason that tokens are missed for, and the component that lacks them."""

    component: str
    why: MissReason

    @property
    def text(self) -> str:
        """The reason in words."""
        return self.why.text

    def as_json(self) -> dict[str, object]:
        """Return it under stable names."""
        return {"component": self.component, "why": self.why.key, "text": self.text}


@dataclass(frozen=True, slots=True)
class MissedPrefix:
    """A prefix that was known once, and the tokens that were missed because its end was not there."""

    digest: str
    """Digest of its last page and all before, which tells nothing of its tokens."""
    pages: int
    """Length."""
    times: int
    """Times that its end was missed."""
    tokens: int
    """Tokens missed, all those times together."""
    reason: ComponentMiss

    def as_json(self) -> dict[str, object]:
        """Return it under stable names."""
        length = {"digest": self.digest, "pages": self.pages, "times": self.times, "tokens": self.tokens}
        return {**length, **self.reason.as_json()}


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """Missed tokens of a replay, each counted once."""

    by_reason: Mapping[ComponentMiss, int]
    """Tokens by reason and component, most first."""
    series: Sequence[Mapping[ComponentMiss, int]]
    """The same for each point of the time series."""
    asked: Sequence[int]
    """Tokens asked for, for each point of the time series."""
    prefixes: Sequence[MissedPrefix]
    """Those that cost most, most first."""

    @property
    def total(self) -> int:
        """All missed tokens."""
        return sum(self.by_reason.values())

    def as_json(self) -> dict[str, object]:
        """Return it under stable names."""
        reasons = list(self.by_reason)
        return {
            "tokens": self.total,
            "by_reason": [
                {**reason.as_json(), "tokens": tokens, "share": tokens / self.total if self.total else 0.0}
                for reason, tokens in self.by_reason.items()
            ],
            "series": [[window.get(reason, 0) for reason in reasons] for window in self.series],
            "prefixes": [prefix.as_json() for prefix in self.prefixes],
        }


_MissedRuns: TypeAlias = tuple[tuple[int, int, ComponentMiss], ...]
"""Tokens [start, end) that one request missed, and the reason."""


@dataclass(slots=True)
class _Loss:
    times: int = 0
    tokens: int = 0


class MissCounter:
    """Counts of the requests served so far, in their order."""

    def __init__(self, full: str) -> None:
        """Count; ``full`` is the name of the first component."""
        self._full = full
        self._by_request: list[_MissedRuns] = []
        self._asked: list[int] = []
        self._lost: dict[tuple[str, int, ComponentMiss], _Loss] = {}

    def count(self, prompt: Prompt, tokens: int, hit_end: int, explanation: Explanation, *, is_cut: bool) -> None:
        """Count a request of so many tokens whose first ``hit_end`` pages were handed back.

        ``explanation`` is that of its prompt when nothing more was to come; ``is_cut`` says that the prompt was cut to
        what the device holds.
        """
        missed: list[tuple[int, int, ComponentMiss]] = []
        digests = b""
        for start, end, reason in self._runs(prompt, hit_end, explanation, is_cut=is_cut):
            first = start * prompt.page_size
            after = tokens if end is None else min(end * prompt.page_size, tokens)
            count = after - first
            if count <= 0:
                continue
            missed.append((first, after, reason))
            if reason.why not in _FIRST_TIMES and end is not None:
                digests = digests or prompt_digests(prompt)
                last = digests[(end - 1) * DIGEST_BYTES : end * DIGEST_BYTES].hex()
                loss = self._lost.setdefault((last, end, reason), _Loss())
                loss.times += 1
                loss.tokens += count
        self._by_request.append(tuple(missed))
        self._asked.append(tokens)

    def between(self, request: int, start: int, end: int) -> Counter[ComponentMiss]:
        """Return the tokens [start, end) that a request missed, by reason."""
        found: Counter[ComponentMiss] = Counter()
        for first, after, reason in self._by_request[request]:
            found[reason] += max(min(after, end) - max(first, start), 0)
        return +found

    def missed(self, step: int) -> MissedTokens:
        """Sum up all that was counted, and windows of ``step`` requests each."""
        starts = range(0, len(self._by_request), step)
        total = _summed(self._by_request)
        prefixes = [
            MissedPrefix(digest, pages, loss.times, loss.tokens, reason)
            for (digest, pages, reason), loss in self._lost.items()
        ]
        prefixes.sort(key=lambda prefix: (-prefix.tokens, prefix.pages, prefix.digest))
        return MissedTokens(
            by_reason=dict(total.most_common()),
            series=[_summed(self._by_request[start : start + step]) for start in starts],
            asked=[sum(self._asked[start : start + step]) for start in starts],
            prefixes=prefixes[:PREFIXES_SHOWN],
        )

    def _runs(
        self, prompt: Prompt, hit_end: int, explanation: Explanation, *, is_cut: bool
    ) -> Iterator[tuple[int, int | None, ComponentMiss]]:
        """Yield the pages [start, end) that were missed, each once, and the reason; end is None for the last tokens."""
        if hit_end < explanation.end:
            # Could have been resumed, and was not brought: there was no room above.
            yield hit_end, explanation.end, ComponentMiss(self._full, MissReason.NOT_FETCHED)
        for loss in explanation.losses:
            if loss.end > hit_end:
                yield max(loss.start, hit_end), loss.end, ComponentMiss(loss.component, loss.reason.why)
        yield (
            prompt.pages_count,
            None,
            ComponentMiss(self._full, MissReason.TOO_LONG if is_cut else MissReason.PART_OF_PAGE),
        )


def _summed(requests: Sequence[_MissedRuns]) -> Counter[ComponentMiss]:
    total: Counter[ComponentMiss] = Counter()
    for runs in requests:
        for first, after, reason in runs:
            total[reason] += after - first
    return total
