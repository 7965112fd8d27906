"""Sessions of a trace."""

from collections.abc import Sequence
from itertools import pairwise

from unified_cache.sizing.replay.trace import TraceRequest


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
