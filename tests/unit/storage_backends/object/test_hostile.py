"""Faults of a bucket's service, its network and its environment: one line names each, and nothing leaks."""

import ssl
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from threading import Event

import pytest
from obstore.store import S3Store

from tests.support.certificates import Authority
from tests.support.hostile_bucket import (
    BLOCK,
    ENDLESS_BYTES,
    BucketAnswer,
    BucketRequest,
    HostileBucket,
    dripping,
    endless,
    endless_listing,
    policy,
    redirect,
    refusal,
)
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError, StorageError, StorageTimeoutError
from unified_cache.core.pool import Identity
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.object import client
from unified_cache.storage_backends.object import store as object_store
from unified_cache.storage_backends.object.client import Bucket
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.testing.storage_contract import LAYOUT, MODEL, PAGE_BYTES, blank_page, label, sealed_page

URL = "s3://bucket/kv"
PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "secret", "SESSION_TOKEN": "token"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


def reason_of_a_get(url: str = URL) -> str:
    with closing(open_storage(url)) as storage, pytest.raises(StorageError) as failed:
        storage.get([blank_page(label(1))])
    said = str(failed.value)
    assert "\n" not in said
    return said


@pytest.mark.threat("leaked credentials")
def test_a_redirect_to_another_host_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        HostileBucket.running(refusal(404), "127.0.0.2") as thief,
        HostileBucket.running(redirect(thief.endpoint)) as bucket,
        closing(open_storage_at(bucket, monkeypatch)) as storage,
    ):
        for ask in (
            lambda: storage.get([blank_page(label(1))]),
            lambda: storage.exists([label(1)]),
            lambda: storage.put([sealed_page(label(1))], Level.CACHED),
            lambda: storage.scan(MODEL.digest(LAYOUT)),
        ):
            with pytest.raises(StorageError):
                ask()
        assert bucket.asked
        assert thief.asked == []
        assert "no variable names" in reason_of_a_get()


def open_storage_at(bucket: HostileBucket, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    return open_storage(URL)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "AWS_PROXY_URL"])
def test_a_proxy_is_used_where_a_variable_of_the_cloud_names_it_and_nowhere_else(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HostileBucket.running(refusal(404)) as bucket, HostileBucket.running(refusal(404), "127.0.0.2") as proxy:
        monkeypatch.setenv(variable, proxy.endpoint)
        with closing(open_storage_at(bucket, monkeypatch)) as storage:
            assert storage.exists([label(1)]) == [Answer.MISS]
        assert (len(bucket.asked), len(proxy.asked)) == ((0, 1) if variable == "AWS_PROXY_URL" else (1, 0))


@pytest.mark.parametrize("length", [PAGE_BYTES, 1 << 40], ids=["a page", "a terabyte"])
def test_an_answer_that_never_ends_is_read_no_further_than_a_page(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "500ms")
    sent: list[int] = []
    with HostileBucket.running(endless(length, sent)) as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
        assert ("longer than it says" in reason_of_a_get()) is (length == PAGE_BYTES)  # else its removal fails
    assert sum(sent) <= ENDLESS_BYTES // 8, f"{sum(sent) // len(BLOCK)} MiB, which the buffers of sockets take"


def test_a_listing_that_never_comes_to_a_name_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LISTING_S", 0.3)
    with HostileBucket.running(endless_listing()) as bucket, closing(open_storage_at(bucket, monkeypatch)) as storage:
        with pytest.raises(StorageError, match="does not go on"):
            storage.scan(MODEL.digest(LAYOUT))
        with pytest.raises(StorageError, match="does not go on"):
            storage.manifests()
        assert len(bucket.asked) > 2


def test_a_listing_of_ever_new_names_ends_with_the_call_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostileBucket.running(endless_listing(lambda number: f"{number:012}")) as bucket:
        storage, identity = open_storage_at(bucket, monkeypatch), MODEL.digest(LAYOUT)
        with closing(StorageGuard(storage, storage.capability(), GuardConfig(deadline_s=0.2))) as guard:
            for ask in (lambda: guard.clear(identity), lambda: guard.scan(identity), guard.manifests):
                with pytest.raises(StorageTimeoutError) as late:
                    ask()
                assert late.value.call.wait(PATIENCE_S), "it goes on for ever"


def test_objects_that_are_removed_one_by_one_are_no_more_once_the_caller_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects: dict[str, bytes] = {}
    keep, gone, deletions = policy(objects), Event(), count(1)

    def answer(request: BucketRequest) -> None:
        """Say of any deletion that there is nothing, and of the second one when the caller has gone."""
        if request.command == "POST" and next(deletions) == 2:
            gone.wait(PATIENCE_S)
        (refusal(404) if request.command == "POST" else keep)(request)

    with HostileBucket.running(answer) as bucket:
        storage = open_storage_at(bucket, monkeypatch)
        labels = [label(number) for number in range(8)]
        storage.put([sealed_page(each) for each in labels], Level.CACHED)
        with closing(StorageGuard(storage, storage.capability(), GuardConfig(deadline_s=0.5))) as guard:
            with pytest.raises(StorageTimeoutError) as late:
                guard.remove(labels)
            gone.set()
            assert late.value.call.wait(PATIENCE_S)
        assert sum(each.startswith("POST") for each in bucket.asked) == 2


def test_a_bucket_of_ever_new_identities_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "IDENTITIES_MAX", 5_000)
    with (
        HostileBucket.running(endless_listing(lambda number: f"{number:064x}.json")) as bucket,
        closing(open_storage_at(bucket, monkeypatch)) as storage,
        pytest.raises(StorageError, match="at most 5000 identities"),
    ):
        storage.manifests()


@pytest.mark.threat("a store that fails or hangs")
@pytest.mark.parametrize("status", [200, 403, 404, 500])
def test_an_answer_whose_body_never_ends_is_read_no_longer_than_a_request_may_take(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "300ms")
    over = Event()
    with (
        HostileBucket.running(dripping(status, over)) as bucket,
        closing(open_storage_at(bucket, monkeypatch)) as storage,
    ):
        for ask in (
            lambda: storage.get([blank_page(label(1))]),
            lambda: storage.put([sealed_page(label(1))], Level.CACHED),
            lambda: storage.remove([label(1)]),
            lambda: storage.scan(MODEL.digest(LAYOUT)),
        ):
            with suppress(StorageError):
                ask()
        over.set()


@pytest.mark.parametrize(
    "value",
    [
        "minio:9000",
        "minio",
        "://",
        "ftp://minio",
        "http://id:secret@minio",
        "http://[::1",
        "http://minio:99999",
        "http://m n",
    ],
)
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_that_is_no_url_is_refused_by_the_name_of_its_variable(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} must be a URL") as refused:
        open_storage(URL)
    assert "secret" not in str(refused.value)
    assert capfd.readouterr().err == ""


def test_a_panic_of_the_library_is_an_error_of_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    bucket = Bucket(URL, S3Store("bucket", endpoint="minio:9000"))
    with pytest.raises(StorageError, match="a bug of obstore") as failed:
        bucket.size_of("name")
    assert not failed.value.retryable
    capfd.readouterr()  # what Rust says of it


def test_what_lies_under_a_request_that_cannot_be_sent_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = Authority("unknown").issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "chain").write_bytes(issued.chain)
    (tmp_path / "key").write_bytes(issued.key)
    context.load_cert_chain(tmp_path / "chain", tmp_path / "key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://no-such-host.invalid")
    assert reason_of_a_get().endswith("the name of its host is not known")
    with HostileBucket.running(refusal(404)) as plain, HostileBucket.running(refusal(404), tls=context) as secure:
        monkeypatch.setenv("AWS_ENDPOINT_URL", plain.endpoint.replace("http:", "https:"))
        assert "no TLS is spoken there" in reason_of_a_get()
        monkeypatch.setenv("AWS_ENDPOINT_URL", secure.endpoint)
        assert "SSL_CERT_FILE" in reason_of_a_get()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refusal(501, "NotImplemented"), "If-None-Match"),
        (policy({}, may_list=False), "it takes s3:ListBucket"),
        (policy({}, may_put=False, may_list=False), "it takes s3:ListBucket"),
    ],
    ids=["no conditional puts", "no listing", "neither puts nor listing"],
)
def test_a_bucket_that_lacks_what_a_store_needs_is_refused_when_it_is_opened_and_not_at_each_miss(
    answer: BucketAnswer, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        HostileBucket.running(answer) as bucket,
        closing(open_storage_at(bucket, monkeypatch)) as storage,
        pytest.raises(StorageError, match=said) as refused,
    ):
        storage.register(manifest_of(MODEL, LAYOUT), {})
    assert not refused.value.retryable


def test_what_a_bucket_says_of_a_digest_stands_whoever_registers_another_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    objects: dict[str, bytes] = {}
    manifest, other = manifest_of(MODEL, LAYOUT), manifest_of(Identity("another"), LAYOUT)
    other.identity = manifest.identity
    with HostileBucket.running(policy(objects)) as bucket, closing(open_storage_at(bucket, monkeypatch)) as storage:
        storage.register(manifest, {})
        before = dict(objects)
        with pytest.raises(StorageError, match="describes another identity or layout"):
            storage.register(other, {})
    assert objects == before


@pytest.mark.parametrize("code", ["ExpiredToken", "AccessDenied"])
def test_a_bucket_that_denies_everything_is_no_miss(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects: dict[str, bytes] = {}
    answers = [policy(objects)]

    def answer(request: BucketRequest) -> None:
        answers[-1](request)

    with (
        HostileBucket.running(answer) as bucket,
        closing(open_storage_at(bucket, monkeypatch)) as storage,
    ):
        storage.register(manifest_of(MODEL, LAYOUT), {})
        storage.put([sealed_page(label(1))], Level.CACHED)
        answers.append(refusal(403, code))
        with pytest.raises(StorageError, match="403"):
            storage.exists([label(1)])
        needed = r"403 .*s3:ListBucket" if code == "AccessDenied" else "403"
        with pytest.raises(StorageError, match=needed):
            storage.get([blank_page(label(1))])


@pytest.mark.parametrize("is_registered", [True, False])
def test_who_may_only_read_a_bucket_reads_it_and_every_put_is_declined(
    is_registered: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    objects: dict[str, bytes] = {}
    with HostileBucket.running(policy(objects)) as bucket, closing(open_storage_at(bucket, monkeypatch)) as writer:
        if is_registered:
            writer.register(manifest_of(MODEL, LAYOUT), {})
        writer.put([sealed_page(label(1))], Level.CACHED)
    with (
        HostileBucket.running(policy(objects, may_put=False)) as bucket,
        closing(open_storage_at(bucket, monkeypatch)) as reader,
    ):
        reader.register(manifest_of(MODEL, LAYOUT), {})
        assert reader.get([blank_page(label(1))]) == [Answer.HIT]
        pages = [sealed_page(label(number)) for number in range(2, 10)]
        asked_count = len(bucket.asked)
        assert reader.put(pages, Level.DURABLE) == [Answer.DECLINED] * 8
        assert len(bucket.asked) == asked_count, "none is sent to be denied"
        assert reader.get([blank_page(label(2))]) == [Answer.MISS]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        ("gs://bucket/kv", {"GOOGLE_BASE_URL": "", "GOOGLE_SKIP_SIGNATURE": "true", "GOOGLE_ALLOW_HTTP": "true"}),
        ("az://bucket/kv", {"AZURE_STORAGE_ENDPOINT": "", "AZURE_SKIP_SIGNATURE": "true", "AZURE_ALLOW_HTTP": "true"}),
    ],
)
def test_each_cloud_is_asked_where_its_variable_says_and_nowhere_else(
    url: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with (
        HostileBucket.running(refusal(404), "127.0.0.2") as thief,
        HostileBucket.running(redirect(thief.endpoint)) as bucket,
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value or bucket.endpoint)
        assert "no variable names" in reason_of_a_get(url)
        assert (bool(bucket.asked), thief.asked) == (True, [])
