"""Share of the tokens of a trace's second half that LRU and the best policy hit in one tier, as JSON.

    python -m benchmarks.one_tier TRACE BLOCKS,BLOCKS

A process of its own for ``benchmarks.planning beside``, which imports no more than the question takes.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unified_cache.sizing.replay.clairvoyant import FutureUses
from unified_cache.sizing.replay.lru_stack import LruStack
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, iterate_trace
from unified_cache.sizing.replay.trace_pages import Counts, TracePages


def one_tier(trace: Path, blocks: Sequence[int]) -> list[list[float]]:
    """Return the ratios of LRU and of the best policy, by size of the tier."""
    pages = TracePages.of(iterate_trace(trace), BLOCK_TOKENS, padded=True)
    stack, future = LruStack.of(pages), FutureUses.of(pages)
    measured = pages.requests_count // 2
    return [[_token_ratio(pages, ends, measured) for ends in (stack.ends(n), future.ends(n))] for n in blocks]


def _token_ratio(pages: TracePages, ends: Counts, measured: int) -> float:
    """Return the share of the tokens of the requests from ``measured`` on that was hit."""
    tokens = np.minimum(ends * pages.page_size, pages.input_tokens)[measured:]
    return float(tokens.sum()) / int(pages.input_tokens[measured:].sum())


if __name__ == "__main__":
    print(json.dumps({"ratios": one_tier(Path(sys.argv[1]), [int(text) for text in sys.argv[2].split(",")])}))
