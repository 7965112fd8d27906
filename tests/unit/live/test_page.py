"""The live page of a cache: whom it lets in, what it sends, and what it refuses."""

import base64
import http.client
from collections.abc import Iterator

import pytest

from tests.support.live import publishing_cache
from unified_cache.core.errors import ConfigError
from unified_cache.observe.live.page import LivePage

ANSWER_S = 20.0
TOKEN = "a token that is long enough"


@pytest.fixture(scope="module")
def page() -> Iterator[LivePage]:
    with publishing_cache() as cache, LivePage.start(cache) as opened:
        yield opened


@pytest.fixture(scope="module")
def locked() -> Iterator[LivePage]:
    with publishing_cache() as cache, LivePage.start(cache, token=TOKEN) as opened:
        yield opened


def asked(page: LivePage, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=ANSWER_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def basic(user: str, token: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{token}".encode()).decode()


def test_a_page_serves_itself_and_the_metrics_of_its_cache(page: LivePage) -> None:
    status, headers, content = asked(page, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"<script src" not in content, "nothing is loaded from elsewhere"
    status, _, metrics = asked(page, "/metrics")
    assert status == 200
    assert b'unified_cache_pages{cache="cache",component="full",state="free",tier="device"} 64.0' in metrics
    for path in ("/nothing", "/../etc/passwd", "/live.html"):
        assert asked(page, path)[0] == 404
    for path in ("/", "/metrics", "/nothing"):
        assert asked(page, path)[1]["X-Content-Type-Options"] == "nosniff"


@pytest.mark.threat("reading metrics")
@pytest.mark.parametrize("path", ["/", "/metrics"])
def test_with_a_token_nothing_is_shown_without_it(locked: LivePage, path: str) -> None:
    for wrong in (
        {},
        {"Authorization": "Bearer no"},
        {"Authorization": basic("me", "no")},
        {"Authorization": "Basic ?"},
    ):
        status, headers, content = asked(locked, path, **wrong)
        assert status == 401
        assert b"cache" not in content
        assert headers["WWW-Authenticate"].startswith("Basic "), "one challenge: browsers drop a header with two"
        assert "," not in headers["WWW-Authenticate"].partition('"unified-cache"')[0]
    for right in (f"Bearer {TOKEN}", basic("me", TOKEN), basic("", TOKEN)):
        assert asked(locked, path, Authorization=right)[0] == 200


@pytest.mark.threat("reading metrics")
def test_a_page_without_a_token_answers_to_names_of_this_machine_alone(page: LivePage) -> None:
    for host in (
        "evil.example",
        "evil.example@localhost",
        "localhost.evil.example",
        "localhost@evil.example:1",
        "\xff",
    ):
        for path in ("/", "/metrics"):
            assert asked(page, path, Host=host)[0] == 403, host
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert asked(page, "/", Host=f"{host}:{page.port}")[0] == 200, host


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"host": "0.0.0.0"}, "needs a token, found 0.0.0.0 and none"),
        ({"token": "short"}, "at least 16 characters, found 5"),
        ({"port": 70_000}, "HOST:PORT"),
        ({"host": "192.0.2.1", "token": TOKEN}, "cannot be served at 192.0.2.1"),
    ],
)
def test_a_page_that_cannot_be_or_would_show_too_much_is_refused(options: dict[str, object], match: str) -> None:
    with publishing_cache() as cache, pytest.raises(ConfigError, match=match):
        LivePage.start(cache, **options)  # type: ignore[arg-type]


def test_a_page_that_is_closed_answers_no_more() -> None:
    with publishing_cache() as cache:
        page = LivePage.start(cache)
        page.close()
        page.close()
        with pytest.raises(ConnectionError):
            asked(page, "/")
