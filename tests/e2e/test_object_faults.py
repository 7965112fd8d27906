"""A bucket that dies, a network that loses answers, objects that somebody planted: a hit is never wrong bytes."""

import gzip
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import obstore
import pytest

from tests.support.bucket import KEY, SECRET, LocalBucket
from tests.support.bucket_proxy import BucketFault, BucketProxy
from tests.support.budget import examples
from tests.support.waiting import wait_until
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError, StorageTimeoutError
from unified_cache.core.seal import Flaw, Label
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.testing.storage_contract import (
    PAGE_BYTES,
    blank_page,
    bytes_of,
    label,
    open_for_contract,
    sealed_page,
)

FAULTS_WANTED = examples(150, 1_000)
BATCH_PAGES = 32
PAGES = 256
KILLS = examples(1, 3)
KILLED_AT_PAGES = 300
PATIENCE_S = 60.0

SAID = (
    "503 Service Unavailable",
    "503 Service Unavailable (SlowDown)",
    "403 Forbidden",
    "403 Forbidden (ExpiredToken)",
    "Connection reset by peer",
    "the answer ended before its length",
    "no answer in time",
    "did not answer for every object to remove",
)
"""Ends of the errors of faults; the answer to a HEAD has no body that names a code."""


@pytest.fixture
def proxy(bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketProxy]:
    """Yield a proxy that stores find in the place of the bucket; their requests take 1 s at most."""
    with BucketProxy.running(bucket.endpoint, seed=38) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("AWS_TIMEOUT", "1s")
        yield proxy


def guarded(url: str) -> tuple[VerifiedStorage, StorageGuard]:
    """Open a store as an engine does, but for a breaker that never opens, so that every call is made."""
    backend = open_storage(url)
    config = GuardConfig(deadline_s=PATIENCE_S, breaker_failures_max=1 << 30)
    guard = StorageGuard(backend, backend.capability(), config, sleep=lambda _: None)
    return VerifiedStorage(guard), guard


def wrong_hits(storage: Store, labels: list[Label]) -> tuple[dict[Label, Answer], list[Label]]:
    """Read pages; return the answers, and the hits whose bytes are not the page's."""
    found = [blank_page(named) for named in labels]
    answers = dict(zip(labels, storage.get(found), strict=True))
    wrong = [
        page.label for page in found if answers[page.label] and bytes_of(page) != bytes_of(sealed_page(page.label))
    ]
    return answers, wrong


def test_hundreds_of_faults_bring_no_wrong_byte_and_lose_nothing_that_was_stored(
    bucket: LocalBucket, proxy: BucketProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket.new_url()
    storage, guard = guarded(url)
    open_for_contract(storage)
    # Few are slow: each of them takes as long as a request may.
    proxy.rates = {fault: 0.004 if fault is BucketFault.SLOW else 0.04 for fault in BucketFault}
    choice = random.Random(38)
    labels = [label(number) for number in range(PAGES)]
    stored: set[Label] = set()
    errors: list[StorageError] = []
    hits_count = 0
    while proxy.fired_count.total() < FAULTS_WANTED or set(proxy.fired_count) != set(BucketFault):
        batch = choice.sample(labels, BATCH_PAGES)
        try:
            level = choice.choice(list(Level))
            put = storage.put([sealed_page(named) for named in batch], level)
            stored |= {named for named, answer in zip(batch, put, strict=True) if answer is Answer.STORED}
            storage.exists(batch)
            answers, wrong = wrong_hits(storage, batch)
            assert not wrong
            hits_count += sum(map(bool, answers.values()))
            # What came back flawed by the network was removed: a miss, and no loss of the bucket's.
            stored -= {named for named, answer in answers.items() if answer is Answer.FLAWED}
        except StorageError as error:
            errors.append(error)
    assert hits_count > BATCH_PAGES
    assert not [error for error in errors if isinstance(error, StorageTimeoutError)], "every call was in time"
    assert guard.stuck_count == 0
    assert wait_until(lambda: not proxy.held_count, PATIENCE_S), "it hung up on every answer that did not come"
    assert not [error for error in errors if not str(error).endswith(SAID)]
    assert not [error for error in errors if any(each in str(error) for each in ("\n", "http:", KEY, SECRET))]
    storage.close()
    # A page that a call removed as flawed before the call failed was not counted above.
    flaws_count = storage.flaws_count.get(Flaw.PAYLOAD, 0) + storage.flaws_count.get(Flaw.HEADER, 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    monkeypatch.delenv("AWS_TIMEOUT")
    with closing(open_storage(url)) as direct:
        answers, wrong = wrong_hits(direct, sorted(stored))
    assert not wrong
    assert set(answers.values()) <= {Answer.HIT, Answer.MISS}
    assert list(answers.values()).count(Answer.MISS) <= flaws_count


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (BucketFault.BUSY, "503 Service Unavailable (SlowDown)"),
        (BucketFault.EXPIRED, "403 Forbidden (ExpiredToken)"),
        (BucketFault.RESET, "Connection reset by peer"),
        (BucketFault.LOST_ANSWER, "Connection reset by peer"),
        (BucketFault.CUT, "the answer ended before its length"),
        (BucketFault.SLOW, "no answer in time"),
    ],
    ids=lambda each: each.name if isinstance(each, BucketFault) else "",
)
def test_an_error_says_what_happened_to_which_page(
    bucket: LocalBucket, proxy: BucketProxy, fault: BucketFault, said: str
) -> None:
    url = bucket.new_url()
    with closing(open_storage(url)) as storage:
        storage.put([sealed_page(label(0))], Level.DURABLE)
        proxy.rates = {fault: 1.0}
        with pytest.raises(StorageError) as raised:
            storage.get([blank_page(label(0))])
        assert str(raised.value) == f"{url}: get of pages/{label(0).object_name}: {said}"
        assert raised.value.retryable is (fault is not BucketFault.EXPIRED)
        proxy.rates = {}
        assert wrong_hits(storage, [label(0)]) == ({label(0): Answer.HIT}, [])


def test_a_server_that_is_killed_amid_puts_has_every_page_that_it_acknowledged(bucket: LocalBucket) -> None:
    storage, _ = guarded(bucket.new_url())
    open_for_contract(storage)
    stored: list[Label] = []

    def store(numbers: range) -> int:
        """Put pages until the server is gone; return the batches that failed."""
        for start in range(numbers.start, numbers.stop, BATCH_PAGES):
            batch = [label(number) for number in range(start, start + BATCH_PAGES)]
            try:
                answers = storage.put([sealed_page(named) for named in batch], Level.DURABLE)
            except StorageError:
                return 1
            stored.extend(named for named, answer in zip(batch, answers, strict=True) if answer is Answer.STORED)
            if Answer.UNAVAILABLE in answers:
                return 1
        return 0

    with ThreadPoolExecutor(2) as threads:
        for kill in range(KILLS):
            wanted = len(stored) + KILLED_AT_PAGES
            first = kill << 20
            puts = [threads.submit(store, range(at, at + (1 << 18))) for at in (first, first + (1 << 19))]
            assert wait_until(lambda: len(stored) >= wanted, PATIENCE_S)  # noqa: B023  # read before the next round
            bucket.kill()
            assert sum(put.result() for put in puts) == 2, "it died amid the puts of both"
            bucket.start()
            answers, wrong = wrong_hits(storage, stored)
            assert not wrong
            assert set(answers.values()) == {Answer.HIT}
    storage.close()


def test_objects_that_somebody_planted_are_misses_counted_and_removed(bucket: LocalBucket) -> None:
    url = bucket.new_url()
    storage, _ = guarded(url)
    open_for_contract(storage)
    planted = bucket.client(url.rpartition("/")[2])
    right = bytes_of(sealed_page(label(0)))
    bodies = {
        "truncated": right[:-1],
        "empty": b"",
        "longer": right + b"x",
        "flipped": right[:-1] + bytes([right[-1] ^ 1]),
        "another page": bytes_of(sealed_page(label(99))),
        "zeros": bytes(PAGE_BYTES),
        "another format": right[:4] + b"\x09" + right[5:],
        "a page of nobody's key": random.Random(1).randbytes(PAGE_BYTES),
    }
    labels = [label(number) for number in range(len(bodies))]
    for named, body in zip(labels, bodies.values(), strict=True):
        obstore.put(planted, f"pages/{named.object_name}", body)
    # Its length is that of what is stored; nothing makes it longer on its way.
    packed = label(len(bodies))
    obstore.put(
        planted, f"pages/{packed.object_name}", gzip.compress(bytes(1 << 24)), attributes={"Content-Encoding": "gzip"}
    )
    obstore.put(planted, f"pages/{label(0).identity.hex()}/what is this", b"x")
    obstore.put(planted, "pages/x", b"x")
    obstore.put(planted, "manifests/x.json", b"{")
    asked = [*labels, packed]
    answers, _ = wrong_hits(storage, asked)
    assert set(answers.values()) == {Answer.FLAWED}
    assert sum(storage.flaws_count.values()) == 5, "those of a page's length; the others were not read"
    assert storage.exists(asked) == [Answer.MISS] * len(asked)
    assert storage.put([sealed_page(named) for named in asked], Level.DURABLE) == [Answer.STORED] * len(asked)
    assert set(wrong_hits(storage, asked)[0].values()) == {Answer.HIT}
    storage.close()


@pytest.mark.parametrize(
    ("level", "body"), [(Level.CACHED, b"short"), (Level.DURABLE, b"short"), (Level.DURABLE, bytes(PAGE_BYTES))]
)
def test_what_was_planted_under_a_page_s_name_is_written_over_before_the_page_is_said_to_be_stored(
    level: Level, body: bytes, bucket: LocalBucket
) -> None:
    url = bucket.new_url()
    storage = open_storage(url)
    obstore.put(bucket.client(url.rpartition("/")[2]), f"pages/{label(0).object_name}", body)
    assert storage.put([sealed_page(label(0))], level) == [Answer.STORED]
    assert wrong_hits(storage, [label(0)]) == ({label(0): Answer.HIT}, [])
    storage.close()


def test_a_call_that_was_given_up_begins_no_further_request(bucket: LocalBucket, proxy: BucketProxy) -> None:
    backend = open_storage(f"{bucket.new_url()}?requests=4")
    guard = StorageGuard(backend, backend.capability(), GuardConfig(deadline_s=0.5))
    proxy.rates = {BucketFault.SLOW: 1.0}
    with pytest.raises(StorageTimeoutError) as late:
        guard.put([sealed_page(label(number)) for number in range(64)], Level.CACHED)
    assert late.value.call.wait(PATIENCE_S)
    assert proxy.fired_count[BucketFault.SLOW] <= 4
    guard.close(PATIENCE_S)
