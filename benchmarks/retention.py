"""Ends that prompts can be resumed from, by where windows are kept: the worth of a tail, and of the trace in it.

    python -m benchmarks.retention [TRACE]

A trace has a hash for each block of 512 tokens; the last, partial block of a prompt gets another one when the
conversation goes on. Read as it stands, a continuation shares whole blocks alone. Read as conversations are served,
it shares the partial block too: its first tokens are those of the prompt that it continues. No bytes and no tiers: a
cache that never evicts, and one page of window.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest, read_trace

TRACE = Path(__file__).resolve().parent.parent / "traces" / "mooncake_conversation.jsonl.gz"
PAGE_SIZES = (512, 256, 128, 64)


@dataclass(frozen=True, slots=True)
class Kept:
    """Places where windows are kept beside the end of a prompt, where they always are."""

    branches: bool
    tail_tokens: int


POLICIES = {
    "end alone": Kept(False, 0),
    "end, branches": Kept(True, 0),
    "end, tail of 512": Kept(False, BLOCK_TOKENS),
    "all three": Kept(True, BLOCK_TOKENS),
}


@dataclass(slots=True)
class Reuse:
    """Tokens of all prompts that can be resumed from, and pages at which windows were kept."""

    full_tokens: int = 0
    """What full attention alone could reuse, in whole pages."""
    resumed_tokens: int = 0
    kept_pages: int = 0
    requests: int = 0

    @property
    def share(self) -> float:
        """Part of what full attention could reuse that a window was there for."""
        return self.resumed_tokens / self.full_tokens if self.full_tokens else 1.0


@dataclass(slots=True)
class _Seen:
    """Prompts and windows of before, by the hash of their last whole block: it names all blocks before it."""

    blocks: set[int] = field(default_factory=set)
    ends: dict[int | None, set[int]] = field(default_factory=dict)
    """Tokens after which windows are kept, under the last whole block before them."""
    lengths: dict[int | None, set[int]] = field(default_factory=dict)
    """Lengths of prompts, under their last whole block."""


def reuse_of(requests: Sequence[TraceRequest], page_size: int, kept: Kept, *, exact: bool) -> Reuse:
    """Serve requests in order; with ``exact`` a prompt shares the partial block of a shorter one that it continues."""
    seen, reuse = _Seen(), Reuse()
    for request in requests:
        length, blocks = request.input_length, request.hash_ids[: request.input_length // BLOCK_TOKENS]
        shared = next((n for n, block in enumerate(blocks) if block not in seen.blocks), len(blocks))
        reach = shared * BLOCK_TOKENS
        ends = {0}
        for count in range(shared + 1):
            here = blocks[count - 1] if count else None
            inside = exact and count == shared
            room = length if inside else count * BLOCK_TOKENS
            ends |= {end for end in seen.ends.get(here, ()) if end <= room}
            if inside:
                reach = max([reach, *(each for each in seen.lengths.get(here, ()) if each <= length)])
        reach -= reach % page_size
        reuse.full_tokens += reach
        reuse.resumed_tokens += max(end for end in ends if end <= reach)
        last = length - length % page_size
        keep = {last} | set(range(last, max(length - kept.tail_tokens, 0), -page_size))
        if kept.branches and 0 < reach < length:
            keep.add(reach)
        keep.discard(0)
        reuse.kept_pages += len(keep)
        reuse.requests += 1
        for end in keep:
            count = end // BLOCK_TOKENS
            seen.ends.setdefault(blocks[count - 1] if count else None, set()).add(end)
        seen.blocks.update(blocks)
        seen.lengths.setdefault(blocks[-1] if blocks else None, set()).add(length)
    return reuse


def main() -> None:
    """Print a row for each page size and reading of the trace."""
    requests = list(read_trace(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE))
    for page_size in PAGE_SIZES:
        for exact in (False, True):
            cells = (reuse_of(requests, page_size, kept, exact=exact) for kept in POLICIES.values())
            shown = "  ".join(f"{each.share:6.1%} {each.kept_pages / each.requests:4.1f}" for each in cells)
            sys.stdout.write(f"{page_size:4}  {'continued' if exact else 'as traced'}  {shown}\n")


if __name__ == "__main__":
    main()
