"""Files are whole, or not there, for whoever looks."""

import os
import stat
import threading
from pathlib import Path

import pytest

from unified_cache.core.errors import ConfigError
from unified_cache.core.files import read_kept, replace_whole, write_whole

SMALL, LARGE = b"1" * 100_000, b"2" * 1_000_000


def test_a_reader_sees_one_content_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, SMALL)
    ended = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not ended.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for content in (LARGE, SMALL) * 50:
        write_whole(path, content)
    ended.set()
    reader.join()
    assert seen <= {SMALL, LARGE}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(path, SMALL)
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".file.{os.getpid()}.part").write_bytes(LARGE)
    write_whole(tmp_path / "file", SMALL)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [SMALL]


def test_a_file_is_never_open_to_more_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o644)
    write_whole(path, SMALL, mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="regular file"):
        read_kept(tmp_path / "pipe")


def test_a_file_that_replaces_another_is_synced_before_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(SMALL)
    synced: list[tuple[Path, bytes]] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").readlink(), path.read_bytes()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    replace_whole(path, LARGE)
    (draft, before), (directory, after) = synced
    assert draft.parent == directory == tmp_path
    assert (before, after) == (SMALL, LARGE)
