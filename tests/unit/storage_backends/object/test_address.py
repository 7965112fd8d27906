"""A bucket's URL names the bucket and nothing secret; who we are and where it is come from the environment alone."""

import pytest

from unified_cache.core.errors import ConfigError, StorageError
from unified_cache.core.seal import Label
from unified_cache.storage_backends.object.address import REQUESTS, BucketAddress, address_of_url
from unified_cache.storage_backends.object.client import reason_of
from unified_cache.storage_backends.url import check_storage_url, open_storage

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("rest", "address"),
    [
        ("//kv", BucketAddress("s3", "kv", None, REQUESTS)),
        ("//kv/", BucketAddress("s3", "kv", None, REQUESTS)),
        ("//kv.of-us/a", BucketAddress("s3", "kv.of-us", "a", REQUESTS)),
        ("//kv/a/b..c/?requests=64", BucketAddress("s3", "kv", "a/b..c", 64)),
    ],
)
def test_a_url_names_a_bucket_a_prefix_and_requests(rest: str, address: BucketAddress) -> None:
    assert address_of_url("s3", rest) == address


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "kv",
        "//",
        "///kv",
        "//kv//a",
        "//kv/../a",
        "//kv/a/..",
        "//kv/.?requests=2",
        "//kv/a%2f",
        "//kv?requests=0",
        "//kv?requests=100",
        "//kv?timeout=3",
        f"//me:{SECRET}@kv/a",
        f"//kv/a?secret_access_key={SECRET}",
    ],
)
def test_another_url_is_refused_and_what_it_had_is_not_repeated(rest: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_storage(f"s3:{rest}")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://kv", "gs://kv/a", "az://kv/a"])
def test_a_bucket_has_no_cap_of_ours_and_its_scheme_needs_no_server_to_be_checked(url: str) -> None:
    check_storage_url(url)
    with pytest.raises(ConfigError, match="rule of lifetime"):
        open_storage(url, bytes_max=1)


def test_variables_that_make_no_sense_are_a_config_error_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", SECRET)
    with pytest.raises(ConfigError, match=r"variables AWS_\.\.\.") as refused:
        open_storage("s3://kv/a")
    assert SECRET not in str(refused.value)


def test_a_service_that_nobody_answers_for_is_one_line_without_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", "me"), ("SECRET_ACCESS_KEY", SECRET), ("ALLOW_HTTP", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    storage = open_storage("s3://kv/a")
    with pytest.raises(StorageError) as failed:
        storage.exists([Label(bytes(32), bytes(32), "kv")])
    assert str(failed.value).startswith(f"s3://kv/a: head of pages/{bytes(32).hex()}/")
    assert failed.value.retryable
    assert not [hidden for hidden in ("127.0.0.1", "\n", SECRET) if hidden in str(failed.value)]
    assert failed.value.__cause__ is failed.value.__context__ is None
    storage.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Generic S3 error: Error performing GET https://kv.example/a?sig=x in 1ms - Server returned non-2xx status "
            "code: 503 Slow Down: <Error><Code>SlowDown</Code></Error>",
            "503 Slow Down (SlowDown)",
        ),
        (
            "Error performing PUT http://169.254.169.254/latest/api/token - HTTP error: error sending request",
            "no credentials in the environment, and the machine gave none",
        ),
        (
            "Generic S3 error: HTTP error: builder error",
            "an endpoint of http: is used only where the variable ..._ALLOW_HTTP is true",
        ),
        (
            "a - HTTP error: error sending request\n\nDebug source:\nkind: Timeout, source: TimedOut",
            "no answer in time",
        ),
        ('a - HTTP error\n\nDebug source:\nmessage: "Connection refused"', "Connection refused"),
        ('a - HTTP error: b\n\nDebug source:\nmessage: "https://kv.example/a?sig=x"', "HTTP error: b"),
        ("Generic: cut at https://kv.example/a?sig=x\nhere\n\nDebug source:\nsig", "Generic: cut at ... here"),
    ],
)
def test_a_message_of_the_client_becomes_one_line_without_what_may_be_signed(text: str, reason: str) -> None:
    assert reason_of(text) == reason
