"""Commands and engines over a bucket, and what lies in it afterwards."""

import json
import re
import shlex
from contextlib import closing
from pathlib import Path

import obstore
import pytest

from tests.support.bucket import LocalBucket
from tests.support.cluster import ask
from tests.support.documents import blocks_run_by
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, TOY, fill, objects_of, open_store
from unified_cache.core.page import Prompt
from unified_cache.core.seal import verify_buffers
from unified_cache.storage_backends.object.store import PAGES as PAGES_PLACE
from unified_cache.storage_backends.protocol import Level
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import label, open_for_contract, sealed_page

DOCUMENT_URL = "s3://kv-pages/prod"
LAYOUT = LAYOUTS["full_swa"]
TOKENS = list(range(PAGES * PAGE_SIZE))
PROMPTS = [Prompt.of(tokens, PAGE_SIZE, whole=True) for tokens in (TOKENS, TOKENS[::-1])]


@pytest.fixture
def url(bucket: LocalBucket) -> str:
    """URL of a store of two prompts, which an engine has stored."""
    url = bucket.new_url()
    fill(open_storage(url), LAYOUT, PROMPTS)
    return url


def done(*arguments: str | Path) -> str:
    """Run a command that succeeds; return its output."""
    said = ask(*arguments)
    assert said.status == 0, said.err
    return said.out


def test_what_lies_in_a_bucket_is_what_the_document_says(bucket: LocalBucket, url: str, tmp_path: Path) -> None:
    fill(open_store("file", tmp_path), LAYOUT, PROMPTS)
    identity = TOY.digest(LAYOUT).hex()
    client = bucket.client(url.rpartition("/")[2])
    (manifest,) = client.list("manifests").collect()
    assert manifest["path"] == f"manifests/{identity}.json"
    assert bytes(client.get(manifest["path"]).bytes()) == (tmp_path / identity / "manifest.json").read_bytes()
    with closing(open_storage(url)) as storage:
        pages = objects_of(storage, LAYOUT)
    found = {each["path"]: bytes(obstore.get(client, each["path"]).bytes()) for each in client.list("pages").collect()}
    assert found == {f"pages/{named.object_name}": page for named, page in pages.items()}
    assert all(re.fullmatch(rf"pages/{identity}/[0-9a-f]{{64}}\.[a-z0-9_]+", name) for name in found)
    assert not [named for named, page in pages.items() if verify_buffers((memoryview(page),), named)]
    with closing(open_store("file", tmp_path)) as stored:
        assert objects_of(stored, LAYOUT) == pages


def test_the_commands_of_the_document_on_a_bucket_work(url: str) -> None:
    conformance, rule, collect = (shlex.split(block.text) for block in blocks_run_by("bucket"))
    for command in (conformance, collect):
        done(
            *(url if word == DOCUMENT_URL else word for word in command[1:]),
            *["--not-empty"] * (command == conformance),
        )
    (only,) = json.loads(rule[-1])["Rules"]
    assert only["Filter"]["Prefix"] == f"{DOCUMENT_URL.rpartition('/')[2]}/{PAGES_PLACE}/"


def test_more_pages_than_a_listing_has_are_all_listed_and_all_cleared(bucket: LocalBucket) -> None:
    with closing(open_for_contract(open_storage(bucket.new_url()))) as storage:
        pages = [sealed_page(label(number)) for number in range(1_500)]
        assert all(storage.put(pages, Level.CACHED))
        identity = pages[0].label.identity
        first = storage.scan(identity)
        second = storage.scan(identity, first.cursor)
        assert [len(first.objects), len(second.objects), second.cursor] == [1_000, 500, ""]
        assert {each.label for each in (*first.objects, *second.objects)} == {page.label for page in pages}
        assert storage.clear(identity) == 1_500
        assert storage.scan(identity).objects == []
