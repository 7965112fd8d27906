"""Stores that stand frozen hold, byte by byte, what docs/format.md says; the tables are read from the page itself."""

import re
import tarfile
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from tests.sources import ROOT
from tests.unit.storage_backends.fixtures.write_stores import PAYLOAD_BYTES, STORED, pages_of

DOCUMENT = ROOT / "docs" / "format.md"
ARCHIVES = sorted((Path(__file__).parents[1] / "fixtures").glob("stores_*.tar.gz"))


def fields_under(heading: str) -> dict[str, slice]:
    """Read the table of offsets below a heading of the document: the bytes of each field."""
    (section,) = re.findall(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([a-z ]+) \|", section, re.MULTILINE)
    return {field: slice(int(start), int(start) + int(size)) for start, size, field in rows}


def number(text: bytes) -> int:
    return int.from_bytes(text, "little")


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def stores(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_the_tables_leave_no_byte_out() -> None:
    for heading, end in (("Page", 128), ("`packed:`", 48)):
        stops = [0, *(field.stop for field in fields_under(heading).values())]
        assert [field.start for field in fields_under(heading).values()] == stops[:-1]
        assert stops[-1] == end


def test_a_file_of_a_page_is_the_seal_of_the_document_and_the_payload(stores: Path) -> None:
    fields = fields_under("Page")
    paths = [path for path in (stores / "file").rglob("*") if len(path.stem) == 64 and path.is_file()]
    assert len(paths) == sum(map(len, STORED.values()))
    for path in paths:
        page = path.read_bytes()
        found = {name: page[field] for name, field in fields.items()}
        assert found["magic"] == b"UKVP"
        assert number(found["version"]) == 1
        assert number(found["header bytes"]) == 128
        assert number(found["payload bytes"]) == len(page) - 128
        assert found["identity"].hex() == path.parents[1].name
        assert found["key"].hex() == path.stem
        assert path.parent.name == path.stem[0]
        assert found["pool"].rstrip(b"\0").decode() == path.suffix[1:]
        assert number(found["payload checksum"]) == xxh3_64_intdigest(page[128:])
        assert number(found["header checksum"]) == xxh3_64_intdigest(page[:120])


def test_a_packed_file_is_the_table_of_the_document_and_a_page_in_each_slot_that_it_enters(stores: Path) -> None:
    fields = fields_under("`packed:`")
    for (identity, pool), payload_bytes in PAYLOAD_BYTES.items():
        page_bytes = 128 + payload_bytes
        (path,) = (stores / "packed" / identity.hex()).glob(f"{pool}.*.pack")
        assert path.name == f"{pool}.{page_bytes}.1.pack"
        grain = 4096 if page_bytes >= 32 << 10 else 128
        slot_bytes = -(-page_bytes // grain) * grain
        slots_count = min((4 << 30) // slot_bytes, 65_536)
        table_bytes = -(-slots_count * 48 // 4096) * 4096
        content = path.read_bytes()
        expected = {
            page.label.key: bytes(page.buffers[0]) for page in pages_of({(identity, pool): STORED[identity, pool]})
        }
        for slot in range((len(content) - table_bytes) // slot_bytes + 1):
            entry = content[slot * 48 : (slot + 1) * 48]
            if not any(entry):
                continue
            key = entry[fields["key"]]
            assert number(entry[fields["check"]]) == xxh3_64_intdigest(key, seed=slot)
            assert 1_000_000 * 10**9 <= number(entry[fields["used"]]) < 1_000_100 * 10**9
            start = table_bytes + slot * slot_bytes
            assert content[start : start + page_bytes] == expected.pop(key)
        assert not expected


def test_a_marker_says_the_versions_of_the_document(stores: Path) -> None:
    text = DOCUMENT.read_text()
    assert (stores / "file" / "store.json").read_text().strip() in text
    for kind, version in (("file", 2), ("packed", 1)):
        marker = (stores / kind / "store.json").read_text()
        assert f'"unified-cache {kind} store", "format_version": {version}' in marker
        assert f"`{kind} store` {version}" in text
