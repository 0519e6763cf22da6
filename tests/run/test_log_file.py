"""The log of a server that `run` has started stays within two files, and no line is lost or cut."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvf_run.log_file import followed, last_lines, older, write
from tests.support.waiting import wait_until


def written(path: Path, text: bytes, most: int) -> None:
    source, end = os.pipe()
    feeding = threading.Thread(target=lambda: (os.write(end, text), os.close(end)))
    feeding.start()
    try:
        write(source, path, most)
    finally:
        feeding.join()
        os.close(source)


def test_it_turns_at_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    lines = [b"line %d\n" % number for number in range(200)]
    for line in lines:
        written(path, line, 500)
    assert path.stat().st_size <= 500 + 10
    assert older(path).stat().st_size <= 500 + 20
    kept = (older(path).read_bytes() + path.read_bytes()).splitlines(keepends=True)
    assert kept == lines[-len(kept) :]
    assert last_lines(path, 3) == ["line 197", "line 198", "line 199"]


def test_a_log_that_cannot_turn_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    (older(path) / "in the way").mkdir(parents=True)
    lines = [b"line %d\n" % number for number in range(9)]
    source, end = os.pipe()
    reading = threading.Thread(target=write, args=(source, path, 10))
    reading.start()
    for count, line in enumerate(lines, 1):
        os.write(end, line)
        wait_until(lambda count=count: path.exists() and path.read_bytes() == b"".join(lines[:count]), what="a line")
    os.close(end)
    reading.join()
    os.close(source)


def test_a_log_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        last_lines(tmp_path / "s.log", 3)


def test_it_is_followed_over_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "s.log"
    path.write_text("old\n")
    got: list[str] = []
    text = followed(path, 0.01)
    reading = threading.Thread(target=lambda: got.extend(iter(lambda: next(text), "newer\n")), daemon=True)
    reading.start()
    wait_until(lambda: appended(path, "new\n") and got, what="the text that was appended")
    os.replace(path, older(path))
    path.write_text("newer\n")
    reading.join(60)
    assert not reading.is_alive()
    text.close()
    assert set("".join(got).splitlines()) == {"new"}


def appended(path: Path, text: str) -> bool:
    with path.open("a") as file:
        return bool(file.write(text))
