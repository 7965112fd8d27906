"""The files of the Mooncake library's log: every line once, in order, and bounded."""

import os
from pathlib import Path

import pytest

from unified_cache.storage_backends.mooncake.own_log import LogFiles

HEADING = "Log file created at: 2026/11/22 20:08:12\nRunning on machine: m\nLog line format: [IWEF]mmdd hh:mm:ss msg\n"
FIRST, SECOND, THIRD = "20261122-200812", "20261122-200813", "20261122-200901"


def record(number: int) -> str:
    return f"E1122 20:08:12.936797 32352 transfer.cpp:{number}] not found"


class GrowingLog:
    """A directory as glog fills it, and the lines that were taken from it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "log"
        self.directory.mkdir()
        self.taken: list[str] = []
        self.files = LogFiles(self.directory, self.taken.append)

    def write(self, text: str, time: str = FIRST, pid: int | None = None) -> Path:
        path = Path(f"{self.files.base}{time}.{os.getpid() if pid is None else pid}")
        with path.open("a", encoding="utf-8") as file:
            file.write(text if file.tell() else HEADING + text)
        return path


@pytest.fixture
def log(tmp_path: Path) -> GrowingLog:
    return GrowingLog(tmp_path)


def test_each_line_is_taken_once_and_without_the_heading_of_its_file(log: GrowingLog) -> None:
    log.write(f"{record(1)}\n")
    log.files.read()
    log.files.read()
    log.write(f"{record(2)}\nsecond line of it\n")
    log.files.read()
    assert log.taken == [record(1), record(2), "second line of it"]


def test_a_line_is_taken_when_it_has_an_end_and_at_the_latest_when_the_log_is_removed(log: GrowingLog) -> None:
    log.write(record(1)[:20])
    log.files.read()
    assert log.taken == []
    log.write(f"{record(1)[20:]}\n{record(2)}")
    log.files.read()
    assert log.taken == [record(1)]
    log.files.remove()
    assert log.taken == [record(1), record(2)]
    assert not log.directory.exists()


def test_a_file_with_a_successor_is_read_to_its_end_and_removed(log: GrowingLog) -> None:
    first = log.write(f"{record(1)}\n")
    log.files.read()
    log.write(f"{record(2)}\n{record(3)}")
    log.write(f"{record(4)}\n", SECOND)
    log.files.read()
    assert log.taken == [record(1), record(2), record(3), record(4)]
    assert not first.exists()


def test_what_is_too_much_is_left_out_and_said(log: GrowingLog) -> None:
    log.write(f"{record(1)}\n")
    log.files.read()
    log.write("x" * 100)
    log.write(f"{record(2)}\n", SECOND)
    log.write(f"{record(3)}\n", THIRD)
    log.files.read()
    _, said, *others = log.taken
    assert said.startswith("100 bytes of its log were left out")
    assert others == [record(2), record(3)]
    assert len(list(log.directory.iterdir())) == 1


def test_files_of_a_process_that_was_forked_off_are_not_touched(log: GrowingLog) -> None:
    forked = log.write(f"{record(1)}\n", pid=os.getpid() + 1)
    log.write(f"{record(2)}\n", SECOND)
    log.files.read()
    assert log.taken == [record(2)]
    assert forked.exists()


def test_a_directory_that_was_taken_away_costs_the_log_alone(log: GrowingLog) -> None:
    log.write(f"{record(1)}\n").unlink()
    log.directory.rmdir()
    log.files.read()
    log.files.remove()
    assert log.taken == []
