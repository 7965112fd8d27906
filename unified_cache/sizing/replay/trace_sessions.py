"""Sessions of a trace, and parts of it that keep them whole."""

import random
from collections.abc import Sequence
from itertools import pairwise

from unified_cache.core.errors import ConfigError
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest

__all__ = ["cut_sessions", "in_blocks_of", "sessions_of"]


def sessions_of(requests: Sequence[TraceRequest]) -> list[int]:
    """Return the number of each request's session, from 0 in the order of their first requests.

    A request continues the latest one that its prompt begins with, all but that one's last block, which may be partial:
    the next turn of a conversation. Any other begins a session. Nothing continues a prompt of which all but the last
    block is where prompts part, as after a system prompt: what follows it is another conversation as a rule.
    """
    parting = _parting_blocks(requests)
    ends: dict[int, int] = {}
    sessions: list[int] = []
    sessions_count = 0
    for request in requests:
        session = next((ends[block] for block in reversed(request.hash_ids) if block in ends), None)
        if session is None:
            session = sessions_count
            sessions_count += 1
        sessions.append(session)
        if len(request.hash_ids) > 1 and request.hash_ids[-2] not in parting:
            ends[request.hash_ids[-2]] = session
    return sessions


def _parting_blocks(requests: Sequence[TraceRequest]) -> set[int]:
    """Return the blocks after which prompts go on that cannot be one conversation.

        [system] [a] [b] ..   two different whole blocks follow
        [system] [c] [d] ..
        [system] [question, 300 tokens]   a later prompt that ends there with something else has not grown
        [system] [question, 200 tokens]

    The last block of a turn is followed by no other, and the next turn is longer.
    """
    parting: set[int] = set()
    next_whole: dict[int, int] = {}
    latest_end: dict[int, tuple[int, int]] = {}
    for request in requests:
        whole, last = request.hash_ids[:-1], request.hash_ids[-1:]
        parting.update(block for block, after in pairwise(whole) if next_whole.setdefault(block, after) != after)
        for block in whole[-1:]:
            end = (last[0], request.input_length)
            before = latest_end.setdefault(block, end)
            if before[0] != end[0] and before[1] >= end[1]:
                parting.add(block)
            latest_end[block] = end
    return parting


def cut_sessions(requests: Sequence[TraceRequest], share: float, seed: int) -> list[TraceRequest]:
    """Return the requests of a random ``share`` of the sessions, in their order; the same for the same seed."""
    if not 0 < share <= 1:
        raise ConfigError(f"the share of sessions must be in (0, 1], found {share}")
    sessions = sessions_of(requests)
    numbers = list(range(max(sessions) + 1))
    chosen = set(random.Random(seed).sample(numbers, max(1, round(share * len(numbers)))))  # noqa: S311  # a sample
    return [request for request, session in zip(requests, sessions, strict=True) if session in chosen]


def in_blocks_of(requests: Sequence[TraceRequest], block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """Return the requests in larger blocks, numbered from 0: a block is named by what it begins and ends with.

    Prompts that share a part of such a block share it no longer.
    """
    numbers: dict[int, int] = {}
    converted: list[TraceRequest] = []
    for request in requests:
        step, rest = divmod(block_tokens, request.block_tokens)
        if rest or not step:
            raise ConfigError(f"blocks of {block_tokens} tokens must be made of whole ones of {request.block_tokens}")
        ids = request.hash_ids
        # An id names its block and all before it, so the last one of a run names the run; a partial run is the tail.
        ends = [*range(step, len(ids) + 1, step), *([len(ids)] if len(ids) % step else [])]
        blocks = tuple(numbers.setdefault(ids[end - 1], len(numbers)) for end in ends)
        converted.append(
            TraceRequest(request.timestamp, request.input_length, request.output_length, blocks, block_tokens)
        )
    return converted
