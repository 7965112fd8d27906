"""Labels as messages: runs of pages of one identity and pool. Digests of another length are an ``InputError``."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby, repeat

from unified_cache.core.errors import InputError
from unified_cache.core.page import PAGE_KEY_BYTES, PageKey
from unified_cache.core.seal import Label
from unified_cache.proto.service_pb2 import PageRun

DIGEST_BYTES = PAGE_KEY_BYTES
"""Length of identities and keys."""


_label = partial(tuple.__new__, Label)
"""``Label`` of a tuple, without a Python call for each."""


def labels_of(identity: bytes, keys: Iterable[PageKey], pool: str) -> list[Label]:
    """Return the labels of pages that share identity and pool."""
    return list(map(_label, zip(repeat(identity), keys, repeat(pool), strict=False)))


def named_runs(labels: Iterable[Label]) -> list[PageRun]:
    """Return labels as runs in their order; no parents, no lengths."""
    return [
        PageRun(identity=identity, pool=pool, keys=[label.key for label in run])
        for (identity, pool), run in groupby(labels, lambda label: (label.identity, label.pool))
    ]


def labels_in(run: PageRun) -> list[Label]:
    """Return the labels that a run of digests names."""
    identity, pool, keys = run.identity, run.pool, list(run.keys)
    check_digests((identity,), "an identity")
    check_digests(keys, "a key")
    return labels_of(identity, keys, pool)


def check_digests(digests: Sequence[bytes], what: str) -> None:
    """Raise ``InputError`` unless all are digests."""
    lengths = set(map(len, digests)) - {DIGEST_BYTES}
    if lengths:
        raise InputError(f"{what} has {DIGEST_BYTES} bytes, found {min(lengths)}")
