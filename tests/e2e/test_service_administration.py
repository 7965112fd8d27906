"""Every storage command over a service, by its URL, and by each role: what the README says that every store does."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest

from tests.support.cluster import ask
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill
from tests.support.running_service import CALL_S, RunningService, refusal, running
from unified_cache.components import Full
from unified_cache.core.errors import StorageError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Identity, ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call
from unified_cache.service.access.registry import listed_after
from unified_cache.service.limits import Limits
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.offline.stores import identities_of
from unified_cache.storage_backends.protocol import Answer, Level, Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import listing, sealed_page

TOKENS = list(range(PAGES * PAGE_SIZE))
PROMPT = Prompt.of(TOKENS, PAGE_SIZE, whole=True)
LAYOUT = LAYOUTS["full_swa"]

STORES = ("memory", "file", "packed")
"""Behind the service."""


def storage_url(kind: str, path: Path) -> str:
    return "memory:" if kind == "memory" else f"{kind}:{path}"


@pytest.fixture(params=STORES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return storage_url(request.param, tmp_path / "own")


@pytest.fixture
def server(storage: str) -> Iterator[RunningService]:
    with running(storage=storage, access={"local_role": "admin"}) as server:
        fill(open_storage(f"grpc://{server.address}"), LAYOUT, [PROMPT])
        yield server


def answered(*arguments: str | Path) -> str:
    """Run a command that succeeds and return the JSON that it says."""
    said = ask(*arguments, "--json")
    assert said.status == 0, said.err
    return said.out


def test_an_admin_clears_and_drains_a_server_whose_places_are_all_held_by_answers_that_nobody_reads(
    tmp_path: Path,
) -> None:
    page_bytes, asked_pages = 1 << 20, 64
    layout = ModelLayout(16, (Full((PoolSpec("kv", page_bytes),)),))
    manifest = manifest_of(Identity("unread"), layout)
    label = Label(manifest.identity, bytes(32), "kv")
    calls_max = 8
    limits, quota = Limits(turn_s_max=0.5), {"calls_max": calls_max}
    with ExitStack() as held, running(limits, access={"local_role": "admin"}, quota=quota) as server:
        url = f"grpc://{server.address}"
        with closing(open_storage(url)) as client:
            client.register(manifest, {})
            assert client.put([sealed_page(label, page_bytes + HEADER_BYTES)], Level.CACHED) == [Answer.STORED]
        run = pb.PageRun(
            identity=label.identity, pool="kv", keys=[label.key] * asked_pages, object_bytes=page_bytes + HEADER_BYTES
        )
        message = pb.GetRequest(runs=[run]).SerializeToString()
        unread: list[Iterator[bytes]] = []
        for _ in range(calls_max):
            channel = held.enter_context(grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]))
            get: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(Call.GET.path)
            unread.append(get(message, timeout=CALL_S))
            next(unread[-1])
        with grpc.insecure_channel(server.address) as channel:
            refused = refusal(channel, Call.REMOVE)
        assert refused is not None
        assert refused[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert json.loads(answered("storage", "clear", url, "--all", "--yes"))["removed_objects"] == 1
        assert ask("drain", url).status == 0
        assert server.drain.wait(0)


def test_who_may_not_drain_a_server_is_told_the_setting_that_says_who_may() -> None:
    with running() as server:
        said = ask("drain", f"grpc://{server.address}")
        assert said.status == 1
        assert "access.local_role" in said.err
        assert not server.drain.wait(0)


def test_every_storage_command_works_over_a_service(server: RunningService, storage: str, tmp_path: Path) -> None:
    url, copy, tokens = f"grpc://{server.address}", f"file:{tmp_path / 'copy'}", tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS), encoding="utf-8")
    contents = json.loads(answered("storage", "stat", url))
    if storage != "memory:":
        beside = json.loads(answered("storage", "stat", storage))
        assert (beside["objects"], beside["bytes"]) == (contents["objects"], contents["bytes"])
    (prompt,) = json.loads(answered("explain", "--storage", url, "--tokens", tokens))["prompts"]
    assert prompt["end"] == prompt["pages"] == PAGES
    (identity,) = contents["identities"]
    assert (identity["model"], identity["page_size"], identity["used"]) == ("toy", PAGE_SIZE, None)
    assert contents["objects"] == identity["objects"] > 0
    for verb in ("verify", "scrub"):
        (verified,) = json.loads(answered("storage", verb, url))["identities"]
        assert (verified["sound"], verified["findings"]) == (contents["objects"], [])
    (copied,) = json.loads(answered("backup", url, copy))["identities"]
    assert copied["copied_objects"] == contents["objects"]
    warmed = json.loads(answered("prefetch", url, "--into", f"file:{tmp_path / 'warm'}", "--tokens", tokens))
    assert warmed["prompts"][0]["restorable_tokens"] == PAGES * PAGE_SIZE
    (collected,) = json.loads(answered("storage", "gc", url))["identities"]
    assert (collected["misfit_objects"], collected["incomplete_objects"]) == (0, 0)
    half = contents["bytes"] // 2
    shrunk = json.loads(answered("storage", "gc", url, "--bytes-max", str(half)))
    assert 0 < shrunk["bytes"] <= half
    assert json.loads(answered("storage", "clear", url, "--all", "--yes"))["removed_objects"] == shrunk["objects"]
    (copied_back,) = json.loads(answered("backup", copy, url))["identities"]
    assert copied_back["copied_objects"] == contents["objects"]
    assert json.loads(answered("storage", "stat", url))["objects"] == contents["objects"]


def test_a_store_that_serves_no_client_any_more_is_listed_by_a_server_that_does_not_know_it(tmp_path: Path) -> None:
    own = f"file:{tmp_path / 'own'}"
    with running(storage=own) as first:
        fill(open_storage(f"grpc://{first.address}"), LAYOUT, [PROMPT])
    with running(storage=own) as second, closing(open_storage(f"grpc://{second.address}")) as client:
        (kept,) = identities_of(client)
        assert kept.name == "toy"
        assert list(listing(client, kept.digest))


@pytest.mark.threat("reading other tenants' pages")
def test_what_another_tenant_or_an_engine_stored_beside_is_named_to_nobody(tmp_path: Path) -> None:
    own, tokens = tmp_path / "own", tmp_path / "tokens"
    secrets = {tenant: token_of(tokens, tenant, "writer", tmp_path) for tenant in ("acme-b", "acme")}
    with closing(FileStorage.open(own)) as beside:
        fill(beside, LAYOUT, [PROMPT])
    with running(storage=f"file:{own}", access={"tokens": str(tokens)}) as server:
        for tenant, secret in secrets.items():
            with closing(open_storage(f"grpc://{server.address}?token_file={secret}")) as client:
                assert identities_of(client) == [], tenant
        fill(open_storage(f"grpc://{server.address}?token_file={secrets['acme-b']}"), LAYOUT, [PROMPT])
        with closing(open_storage(f"grpc://{server.address}?token_file={secrets['acme']}")) as client:
            assert identities_of(client) == []
        with closing(open_storage(f"grpc://{server.address}?token_file={secrets['acme-b']}")) as client:
            assert [kept.name for kept in identities_of(client)] == ["toy"]


def token_of(tokens: Path, tenant: str, role: str, path: Path) -> Path:
    made = ask("token", "new", "--tokens", tokens, "--tenant", tenant, "--role", role)
    assert made.status == 0, made.err
    secret = path / f"{tenant}-{role}"
    secret.write_text(made.out.split()[0], encoding="utf-8")
    return secret


def test_an_object_of_no_pool_goes_by_gc_over_a_service(tmp_path: Path) -> None:
    own = tmp_path / "own"
    with running(storage=f"file:{own}") as server:
        url = f"grpc://{server.address}"
        fill(open_storage(url), LAYOUT, [PROMPT])
        pool = LAYOUT.pools[0].name
        stray = next(each for each in own.rglob(f"*.{pool}") if each.is_file())
        stray.rename(stray.with_suffix(".nobody"))
        (collected,) = json.loads(answered("storage", "gc", url))["identities"]
        assert collected["misfit_objects"] == 1
        assert not list(own.rglob("*.nobody"))


def stored_by(storage: Store) -> list[Label]:
    return [each.label for digest in storage.manifests() or () for each in listing(storage, digest)]


def test_more_identities_than_a_server_remembers_are_all_listed_and_cleared(tmp_path: Path) -> None:
    layouts = [LAYOUTS[name] for name in ("full", "full_swa", "full_mamba", "full_swa_mamba")]
    with running(storage=f"file:{tmp_path / 'own'}", limits=Limits(identities_max=2)) as server:
        url = f"grpc://{server.address}"
        for layout in layouts:
            fill(open_storage(url), layout, [PROMPT])
        with closing(open_storage(url)) as client:
            assert len(identities_of(client)) == len(layouts)
            assert {label.identity for label in stored_by(client)} == {kept.digest for kept in identities_of(client)}
        assert ask("storage", "clear", url, "--all", "--yes").status == 0
        assert json.loads(answered("storage", "stat", url))["objects"] == 0


def test_a_client_believes_no_listing_that_never_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with running(storage=f"file:{tmp_path / 'own'}") as server, monkeypatch.context() as patched:
        url = f"grpc://{server.address}"
        fill(open_storage(url), LAYOUT, [PROMPT])
        module = "unified_cache.service.servicer.listed_after"
        original = listed_after
        patched.setattr(module, lambda after, *rest: original(b"", *rest))
        with closing(open_storage(url)) as client, pytest.raises(StorageError, match="in order"):
            client.manifests()
