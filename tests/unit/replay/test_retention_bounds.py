"""The worth of a tail of windows: much on the trace as it stands, little where conversations really continue."""

import pytest

from benchmarks.retention import POLICIES, TRACE, Kept, reuse_of
from unified_cache.sizing.replay.trace import TraceRequest, read_trace

FIRST = TraceRequest(0, 1300, 10, (1, 2, 3))
SECOND = TraceRequest(1, 1800, 10, (1, 2, 4, 5))


@pytest.mark.parametrize(
    ("exact", "tail_tokens", "full_tokens", "resumed_tokens"),
    [(False, 0, 1024, 0), (False, 512, 1024, 1024), (True, 0, 1280, 1280), (True, 512, 1280, 1280)],
)
def test_a_continuation_resumes_at_the_end_of_the_prompt_or_at_its_last_whole_block(
    exact: bool, tail_tokens: int, full_tokens: int, resumed_tokens: int
) -> None:
    found = reuse_of([FIRST, SECOND], 256, Kept(False, tail_tokens), exact=exact)
    assert (found.full_tokens, found.resumed_tokens) == (full_tokens, resumed_tokens)


def test_on_the_trace_ends_and_branches_suffice_where_prompts_continue_exactly() -> None:
    requests = read_trace(TRACE, limit=4_000)
    for page_size in (64, 256):
        traced, exact = (
            {name: reuse_of(requests, page_size, kept, exact=exact) for name, kept in POLICIES.items()}
            for exact in (False, True)
        )
        assert traced["all three"].share > traced["end, branches"].share + 0.1
        assert exact["all three"].share < exact["end, branches"].share + 0.03
        assert exact["end, branches"].share > 0.9
        assert exact["all three"].kept_pages > exact["end, branches"].kept_pages
