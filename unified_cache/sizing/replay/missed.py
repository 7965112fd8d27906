"""Missed tokens of a replay, by component and reason.

Every token that a request asks for and the cache does not hand back is counted once, for the reason that
``UnifiedCache.explain`` gives after all tiers have brought what they can.
"""

from collections import Counter
from typing import NamedTuple

from unified_cache.cache.explain import Explanation, MissReason
from unified_cache.core.page import Prompt


class ComponentMiss(NamedTuple):
    """Reason that tokens are missed for, and the component that lacks them."""

    component: str
    why: MissReason


MissedTokens = Counter[ComponentMiss]
"""Missed tokens, each counted once."""


def missed_tokens(
    prompt: Prompt, tokens: int, hit_end: int, explanation: Explanation, *, full: str, is_cut: bool
) -> MissedTokens:
    """Count what a request of so many tokens missed, of which the first ``hit_end`` pages were handed back.

    ``explanation`` is that of its prompt when nothing more was to come; ``full`` names the first component; ``is_cut``
    says that the prompt was cut to what the device holds.
    """
    runs: list[tuple[int, int | None, ComponentMiss]] = []
    """Pages [start, end) that were missed, each once, and the reason; the end is None for the last tokens."""
    if hit_end < explanation.end:
        # Could have been resumed, and was not brought: there was no room above.
        runs.append((hit_end, explanation.end, ComponentMiss(full, MissReason.NOT_FETCHED)))
    runs += [
        (max(loss.start, hit_end), loss.end, ComponentMiss(loss.component, loss.why))
        for loss in explanation.losses
        if loss.end > hit_end
    ]
    last = MissReason.TOO_LONG if is_cut else MissReason.PART_OF_PAGE
    runs.append((prompt.pages_count, None, ComponentMiss(full, last)))
    missed: MissedTokens = Counter()
    for start, end, reason in runs:
        after = tokens if end is None else min(end * prompt.page_size, tokens)
        missed[reason] += max(after - start * prompt.page_size, 0)
    return +missed
