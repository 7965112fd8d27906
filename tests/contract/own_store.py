"""A store as a third party writes it: four methods, here over a table of SQLite. Its URL names the class."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from threading import Lock

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store

PUT = "INSERT INTO pages VALUES (?, ?) ON CONFLICT DO UPDATE SET page = excluded.page WHERE length(page) <> ?"
DELETE = "DELETE FROM pages WHERE name = ?"


class SqliteStore(Store):
    """Keep sealed pages in a table, at level CACHED, without a cap. Thread-safe: one guard around everything."""

    def __init__(self, path: str, bytes_max: int | None = None) -> None:
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("CREATE TABLE IF NOT EXISTS pages (name TEXT PRIMARY KEY, page BLOB)")
        self._guard = Lock()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._guard, self._database:
                yield self._database
        except sqlite3.Error as error:
            raise StorageError(f"SQLite: {error}", retryable=True) from error

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        with self._transaction() as rows:
            found = [rows.execute("SELECT 1 FROM pages WHERE name = ?", [each.object_name]) for each in labels]
            return Answer.of_reads(any(row) for row in found)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        with self._transaction() as rows:
            return Answer.of_reads([self._fill(rows, page) for page in pages])

    def _fill(self, rows: sqlite3.Connection, page: PageIO) -> bool:
        asked = (page.label.object_name, sum(map(len, page.buffers)))
        for (content,) in rows.execute("SELECT page FROM pages WHERE name = ? AND length(page) = ?", asked):
            read = BytesIO(content)
            return all(read.readinto(buffer) == len(buffer) for buffer in page.buffers)
        return False

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        if level is Level.DURABLE:
            raise StorageError("a SQLite store puts at level CACHED only", retryable=False)
        contents = [(page.label.object_name, b"".join(page.buffers)) for page in pages]
        with self._transaction() as rows:
            rows.executemany(PUT, [(name, content, len(content)) for name, content in contents])
        return [Answer.STORED] * len(pages)

    def remove(self, labels: Sequence[Label]) -> int:
        with self._transaction() as rows:
            return rows.executemany(DELETE, [(each.object_name,) for each in labels]).rowcount
