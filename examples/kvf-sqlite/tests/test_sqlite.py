"""The tier's properties beyond the contract: several processes, kills, making room, foreign files, a full disk."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvf_sqlite import connections
from kvf_sqlite.options import SqliteOptions
from kvf_sqlite.schema import connect
from kvf_sqlite.tier import open_tier

from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import ConfigFieldError, TierError

PROGRAM = Path(__file__).with_name("writer_program.py")
VALUE_BYTES = 50_000
PATIENCE_S = 20.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "l2.db")


@pytest.fixture
def tier(path: str) -> Iterator[Tier]:
    """A tier with room for twenty values."""
    opened = open_tier(SqliteOptions(path=path, capacity=ByteSize(20 * VALUE_BYTES)), where="test")
    yield opened
    opened.close()


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def key(name: str) -> bytes:
    return name.encode().ljust(PACKED_KEY_BYTES, b".")


def store(tier: Tier, name: str, nbytes: int = VALUE_BYTES) -> Outcome:
    (outcome,) = tier.put([key(name)], [[memoryview(bytes(nbytes))]], deadline=soon())
    return outcome


def writer(path: str, seed: int, count: int, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(PROGRAM), path, str(seed), str(count), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@contextmanager
def held_by_another(path: str) -> Iterator[None]:
    """Keeps another connection in the middle of a write."""
    other = connect(path, "normal")
    try:
        other.execute("BEGIN IMMEDIATE")
        yield
    finally:
        other.close()


def must_be_whole(path: str, seeds: set[int]) -> int:
    """Checks that every listed value is whole and its writer's, and the sum of the sizes; returns the number of
    values."""
    tier = open_tier(SqliteOptions(path=path), where="test")
    entries = list(tier.scan(deadline=soon()))
    for entry in entries:
        buffer = bytearray(entry.nbytes)
        assert tier.get_into([entry.key], [[memoryview(buffer)]], deadline=soon()) == [len(buffer)]
        assert buffer == entry.key[:1] * VALUE_BYTES
    assert {entry.key[0] for entry in entries} == seeds
    assert tier.usage(deadline=soon()).used_bytes == VALUE_BYTES * len(entries)
    tier.close()
    assert rows_of(path) == len(entries)
    return len(entries)


def rows_of(path: str) -> int:
    """The number of values in the file, listed or not, after a check of the file's integrity."""
    connection = connect(path, "normal")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        (count,) = connection.execute("SELECT count(*) FROM contents").fetchone()
    finally:
        connection.close()
    return int(count)


def test_processes_share_one_file_from_its_first_moment_on(path: str) -> None:
    writers = [writer(path, seed, 40) for seed in (1, 2, 3)]
    for process in writers:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    assert must_be_whole(path, {1, 2, 3}) == 120


def test_a_writer_that_is_killed_leaves_whole_values(path: str) -> None:
    with writer(path, 1, 0) as doomed, writer(path, 2, 0) as other:
        for process in (doomed, other):
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(20)]
            assert lines[-1] == "19\n"
            process.kill()
    assert must_be_whole(path, {1, 2}) >= 40


def test_a_put_that_is_killed_before_its_end_changes_nothing(path: str) -> None:
    """The kill happens in the middle of replacing the first of three values."""
    for more in ((), ("die",)):
        with writer(path, 1, 3, *more) as process:
            process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL
    assert must_be_whole(path, {1}) == 3


def test_what_was_used_longest_ago_makes_room(tier: Tier, path: str) -> None:
    names = [f"value {number}" for number in range(20)]
    for name in names:
        assert store(tier, name) is Outcome.STORED
    tier.touch([key(names[0])], deadline=soon())
    assert store(tier, "one more") is Outcome.STORED
    assert store(tier, "and a larger one", 3 * VALUE_BYTES) is Outcome.STORED
    found = tier.contains([key(name) for name in names], deadline=soon())
    assert [name for name, outcome in zip(names, found, strict=True) if outcome is Outcome.MISSING] == names[1:5]
    usage = tier.usage(deadline=soon())
    assert usage.used_bytes == usage.capacity_bytes == 20 * VALUE_BYTES
    assert rows_of(path) == 18


def test_a_replaced_value_needs_no_room_for_the_old_one(tier: Tier) -> None:
    names = [f"value {number}" for number in range(20)]
    for name in (*names, names[3]):
        assert store(tier, name) is Outcome.STORED
    assert tier.contains([key(name) for name in names], deadline=soon()) == [Outcome.FOUND] * 20


def test_nobody_waits_longer_than_allowed_for_another_writer(tier: Tier, path: str) -> None:
    assert store(tier, "there already") is Outcome.STORED
    with held_by_another(path):
        assert tier.contains([key("there already")], deadline=soon()) == [Outcome.FOUND], "readers wait for nobody"
        begun = time.monotonic()
        with pytest.raises(TierError, match="deadline") as failed:
            tier.put([key("new")], [[memoryview(b"x")]], deadline=begun + 0.2)
        assert 0.2 <= time.monotonic() - begun < 2.0
        assert path in failed.value.where
    assert store(tier, "new") is Outcome.STORED


def test_closing_ends_a_wait_for_another_writer(tier: Tier, path: str) -> None:
    with held_by_another(path):
        closing = threading.Timer(0.2, tier.close)
        closing.start()
        begun = time.monotonic()
        with pytest.raises(TierError, match="closed"):
            store(tier, "new")
        assert time.monotonic() - begun < 2.0
        closing.join()


def test_a_full_disk_fails_the_value_alone(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(path: str, sync: str) -> sqlite3.Connection:
        connection = connect(path, sync)
        connection.execute("PRAGMA max_page_count = 20")
        return connection

    monkeypatch.setattr(connections, "connect", small)
    assert store(tier, "fits") is Outcome.STORED
    assert store(tier, "does not fit", 8 * VALUE_BYTES) is Outcome.FAILED
    assert tier.contains([key("fits"), key("does not fit")], deadline=soon()) == [Outcome.FOUND, Outcome.MISSING]
    assert tier.delete([key("fits")], deadline=soon()) == [Outcome.DELETED]
    assert store(tier, "fits again") is Outcome.STORED


def test_the_file_and_its_log_are_private(tier: Tier, path: str) -> None:
    assert store(tier, "value") is Outcome.STORED
    assert {os.stat(path + suffix).st_mode & 0o777 for suffix in ("", "-wal", "-shm")} == {0o600}


def test_what_is_no_file_of_the_tier_is_refused_and_left_alone(tmp_path: Path) -> None:
    theirs, text = tmp_path / "theirs.db", tmp_path / "notes.txt"
    connection = sqlite3.connect(theirs)
    connection.execute("CREATE TABLE things (name)")
    connection.close()
    text.write_text("shopping list, long enough to be read as the header of a database\n" * 20)
    for file in (theirs, text, tmp_path, tmp_path / "none" / "l2.db"):
        before = file.read_bytes() if file.is_file() else None
        with pytest.raises(ConfigFieldError) as refused:
            open_tier(SqliteOptions(path=str(file)), where="[[l2]] #1")
        assert refused.value.where == "[[l2]] #1"
        assert refused.value.hint
        assert before is None or file.read_bytes() == before
