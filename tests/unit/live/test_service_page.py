"""The live page of a service: its figures, tenants for administrators alone, and where it may listen."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ask
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill
from tests.support.running_service import CALL_S, RunningService, running
from tests.support.service_settings import service_settings
from unified_cache.core.errors import ConfigError
from unified_cache.core.page import Prompt
from unified_cache.storage_backends.url import open_storage

LIVE = {"listen": "127.0.0.1:0"}
PROMPT = Prompt.of(list(range(PAGES * PAGE_SIZE)), PAGE_SIZE)


def token_of(path: Path, tenant: str, role: str) -> str:
    return ask("token", "new", "--tokens", path, "--tenant", tenant, "--role", role).out.strip()


def figures_at(server: RunningService, token: str | None = None) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.service.live_port}/figures.json")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=CALL_S) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def test_a_service_shows_its_calls_and_store() -> None:
    with running(live=LIVE, access={"local_role": "admin"}) as server:
        fill(open_storage(f"grpc://{server.address}"), LAYOUTS["full"], [PROMPT])
        found = figures_at(server)
        metrics = server.metrics()
        series = {each["kind"]: each["done"] for each in found["operations"]}
        assert series["Put"] == metrics['unified_cache_service_calls_total{code="OK",method="Put",tenant="default"}']
        assert found["components"] == []
        (tenant,) = found["tenants"]
        assert tenant["stored_bytes"] == metrics['unified_cache_service_stored_bytes{tenant="default"}'] > 0
        store = found["store"]
        assert isinstance(store, dict)
        assert store["breaker"] == "closed"
        assert {"method": "put", "answer": "stored", "count": PAGES} in store["answers"]
        assert found["slowest"], "calls have ended"


@pytest.mark.threat("reading the live page")
def test_tenants_are_shown_to_administrators_alone(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    admin, reader = (token_of(tokens, "acme", role) for role in ("admin", "reader"))
    with running(live=LIVE, access={"tokens": tokens}) as server:
        assert figures_at(server, admin)["tenants"] == []
        assert figures_at(server, reader)["tenants"] is None
        for wrong in (None, "uc1_0000000000000000_" + 64 * "0"):
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                figures_at(server, wrong)
            refused.value.close()


def test_without_a_setting_there_is_no_live_page() -> None:
    with running() as server:
        assert server.service.live_port is None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"live": {"listen": "0.0.0.0:1"}}, r"0\.0\.0\.0:1 can be reached .* so access\.tokens, tls\.certificate"),
        ({"live": {"listen": "0.0.0.0:1"}, "access": {"tokens": "tokens"}}, "tls.certificate and tls.key must be set"),
        ({"live": {"listen": "unix:/tmp/page"}}, "live.listen must be HOST:PORT"),
        ({"live": {"listen": "nowhere"}}, "an address is HOST:PORT"),
        ({"live": {"listen": "127.0.0.1:1", "every_s": 0}}, "--live-every-s must be at least 0.01, found 0"),
        (
            {"live": LIVE, "tls": {"certificate": "c", "key": "k", "client_ca": "a"}},
            r"needs access\.tokens where callers need client certificates",
        ),
    ],
)
def test_a_live_page_that_would_show_too_much_is_refused(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        service_settings(None, settings)
