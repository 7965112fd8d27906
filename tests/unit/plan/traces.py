"""Made-up traces: conversations that go on, branch off and share a beginning."""

import random

from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest


def conversations(seed: int, count: int, sessions: int, blocks_max: int = 6) -> list[TraceRequest]:
    """Return requests of sessions in random turn, each a prefix of its session's path with some blocks more."""
    rnd = random.Random(seed)
    ids = iter(range(1, 1 << 20))
    paths: list[list[int]] = [[0] for _ in range(sessions)]
    requests: list[TraceRequest] = []
    for turn in range(count):
        at = rnd.randrange(sessions)
        kept = paths[at][: rnd.choice([len(paths[at]), len(paths[at]), rnd.randint(1, len(paths[at]))])]
        if len(kept) > 4 * blocks_max:
            kept = kept[:1]
        paths[at] = kept + [next(ids) for _ in range(rnd.randint(1, blocks_max))]
        tail = [] if rnd.random() < 0.5 else [next(ids)]
        blocks = (*paths[at], *tail)
        tokens = len(blocks) * BLOCK_TOKENS - (rnd.randrange(BLOCK_TOKENS) if tail else 0)
        requests.append(TraceRequest(turn * 1000.0, tokens, 100, blocks))
    return requests
