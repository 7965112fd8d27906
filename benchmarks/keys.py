"""Tokens to bytes, and bytes to page keys."""

from collections.abc import Iterator
from hashlib import sha256

import numpy as np

from benchmarks.measure import Comparison, Figure, Spread, interleaved, timed
from benchmarks.plan import BenchmarkPlan
from unified_cache.core.page import Prompt, encode_tokens

TOKENS_COUNT = 32_768


def keys_figures(plan: BenchmarkPlan) -> Iterator[Figure]:
    """Digest a prompt, and convert it; the ratio is ours / reference for times, and for rates as well."""
    tokens = np.random.default_rng(7).integers(0, 150_000, TOKENS_COUNT, dtype=np.int32)
    listed = tokens.tolist()
    encoded = tokens.tobytes()
    rounds = plan.effort.keys_rounds
    for page_size in (64, 512):

        def chain(page_size: int = page_size) -> object:
            return Prompt(encoded, page_size, b"").keys

        ours, raw = interleaved([timed(chain), timed(lambda: sha256(encoded).digest())], rounds, calls=10, warm=2)
        rate, raw_rate = (Spread.of([TOKENS_COUNT * 1e3 / ns for ns in taken]) for taken in (ours, raw))
        against = Comparison("SHA-256 of the same bytes at once", raw_rate.median, rate.median / raw_rate.median)
        yield Figure("keys", f"key chain, page {page_size}", "Mtoken/s", rate, (against,))
    conversions = (
        ("convert a list of 32k int", lambda: encode_tokens(listed), lambda: np.array(listed, np.int32)),
        ("convert 32k tokens, int32 array", lambda: encode_tokens(tokens), tokens.tobytes),
    )
    for name, convert, plain in conversions:
        ours, raw = interleaved([timed(convert), timed(plain)], rounds, calls=5, warm=2)
        converted, bare = (Spread.of([ns / 1e3 for ns in taken]) for taken in (ours, raw))
        against = Comparison("numpy alone, nothing checked", bare.median, converted.median / bare.median)
        yield Figure("keys", name, "us", converted, (against,))
