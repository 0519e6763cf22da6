"""The filesystem tier when the disk is full, read-only, failing or forbidden, and when a call must end."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvf_filesystem.form import PAGE, file_bytes, pack_head
from kvf_filesystem.reading import SLICE_BYTES
from kvframework.api.tier import Outcome, TierUsage
from kvframework.errors import TierError
from tests.filesystem.folder import (
    contains,
    delete,
    file_of,
    fresh_key,
    get,
    open_files,
    open_tier,
    put,
    soon,
    temporary_files,
    used,
)
from tests.filesystem.small_disk import small_disk
from tests.support.received import outcomes_of
from tests.support.waiting import wait_until

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
DELETED, FAILED = Outcome.DELETED, Outcome.FAILED

SPAWN = multiprocessing.get_context("spawn")
NOBODY = 65534


# The disk


@pytest.fixture(name="small_disk")
def four_mebibytes() -> Iterator[Path]:
    """A file system of 4 MiB, made for this test."""
    with small_disk("4m") as folder:
        yield folder


def test_a_full_disk_fails_the_key_and_leaves_nothing_of_it(small_disk: Path) -> None:
    tier, value = open_tier(small_disk, capacity="1GiB"), os.urandom(1 << 20)
    keys = [fresh_key() for _ in range(6)]
    outcomes = tier.put(keys, [[memoryview(value)]] * 6, deadline=soon())
    assert outcomes == [STORED] * 3 + [FAILED] * 3
    assert tier.problems() == [f"{small_disk}: No space left on device"]
    assert temporary_files(small_disk) == []
    buffers = [bytearray(len(value)) for _ in keys]
    found = outcomes_of(tier.get_into(keys, [[memoryview(each)] for each in buffers], deadline=soon()))
    assert found == [FOUND] * 3 + [MISSING] * 3
    assert buffers[:3] == [value] * 3
    tier.ping(deadline=soon())

    # The disk is the capacity, so that the core makes room in time.
    usage = tier.usage(deadline=soon())
    assert usage.used_bytes == 3 * len(value)
    assert usage.used_bytes <= usage.capacity_bytes <= 4 << 20

    assert delete(tier, keys[0]) is DELETED
    assert put(tier, keys[5], value) is STORED
    assert tier.problems() == []
    tier.close()
    assert open_files(small_disk) == []


def test_a_file_of_others_takes_its_share_of_the_capacity(small_disk: Path) -> None:
    tier = open_tier(small_disk, capacity="3MiB")
    assert tier.usage(deadline=soon()) == TierUsage(0, 3 << 20)
    (small_disk / "other").write_bytes(bytes(2 << 20))
    assert tier.usage(deadline=soon()).capacity_bytes <= 2 << 20


def test_a_quota_that_is_used_up_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, key = open_tier(tmp_path), fresh_key()

    def fail(*_args: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "pwritev", fail)
    assert put(tier, key, b"value") is FAILED
    assert tier.problems() == [f"{tmp_path}: Disk quota exceeded"]
    monkeypatch.undo()
    assert put(tier, key, b"value") is STORED
    assert tier.problems() == []


# Permissions


def test_permissions_that_are_lost_and_come_back(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvf-owned-") as folder:  # others may not enter tmp_path
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        child = SPAWN.Process(target=lose_permissions, args=(Path(folder),))
        child.start()
        child.join(60)
        assert child.exitcode == 0


def lose_permissions(root: Path) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    folder, key, other = root / "kv", fresh_key(), fresh_key()
    other = other[:-1] + key[-1:]
    tier = open_tier(folder)
    for each in (key, other):
        assert put(tier, each, b"value") is STORED

    file_of(folder, key).chmod(0o000)  # one file is this key's matter
    buffers = [bytearray(5), bytearray(5)]
    outcomes = outcomes_of(tier.get_into([key, other], [[memoryview(each)] for each in buffers], deadline=soon()))
    assert outcomes == [FAILED, FOUND]
    file_of(folder, key).chmod(0o600)

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(TierError, match="Permission denied") as raised:
            call()
        assert "read and write" in raised.value.hint

    file_of(folder, key).parent.chmod(0o500)
    refused(lambda: put(tier, key, b"other"))
    refused(lambda: delete(tier, key))
    assert get(tier, key, 5) == (FOUND, b"value")
    folder.chmod(0o000)
    refused(lambda: contains(tier, key))
    refused(lambda: get(tier, key, 5))
    refused(lambda: tier.ping(deadline=soon()))
    folder.chmod(0o700)
    file_of(folder, key).parent.chmod(0o700)
    tier.ping(deadline=soon())
    assert put(tier, key, b"other") is STORED
    assert get(tier, key, 5) == (FOUND, b"other")
    tier.close()

    folder.chmod(0o500)
    with pytest.raises(ValueError, match="not writable"):
        open_tier(folder)
    folder.chmod(0o700)


def test_a_file_that_cannot_be_removed_fails_its_key_only(tmp_path: Path) -> None:
    tier, key, other = open_tier(tmp_path), fresh_key(), fresh_key()
    for each in (key, other):
        assert put(tier, each, b"value") is STORED
    path = str(file_of(tmp_path, key))
    try:
        made = subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        made = False
    if not made:
        tier.close()
        pytest.skip("no file can be made immutable here")
    try:
        assert tier.delete([key, other], deadline=soon()) == [FAILED, DELETED]
        parts = [[memoryview(b"other")], [memoryview(b"other")]]
        assert tier.put([key, other], parts, deadline=soon()) == [FAILED, STORED]
        assert get(tier, key, 5) == (FOUND, b"value")
        assert temporary_files(tmp_path) == []
        assert used(tier) == 10
    finally:
        subprocess.run(["chattr", "-i", path], check=True)
        tier.close()


def test_a_failing_disk_is_the_tiers_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, key = open_tier(tmp_path), fresh_key()
    assert put(tier, key, b"value") is STORED

    def fail(*_args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, fail)
    for call in (lambda: get(tier, key, 5), lambda: put(tier, key, b"other")):
        with pytest.raises(TierError, match="Input/output error") as raised:
            call()
        assert "kernel's log" in raised.value.hint
    assert tier.problems() == [f"{tmp_path}: Input/output error"]
    monkeypatch.undo()
    assert get(tier, key, 5) == (FOUND, b"value")
    assert temporary_files(tmp_path) == []
    assert used(tier) == 5
    assert tier.problems() != [], "a read says nothing about writes"
    assert put(tier, key, b"other") is STORED
    assert tier.problems() == []


# Deadlines and close in the middle of a large value


def large_parts(nbytes: int) -> tuple[bytearray, list[memoryview]]:
    """A value of `nbytes` whose parts are the same memory again and again."""
    memory = bytearray(SLICE_BYTES)
    return memory, [memoryview(memory)] * (nbytes // SLICE_BYTES)


def test_the_deadline_ends_the_writing_of_a_large_value(tmp_path: Path) -> None:
    tier, key, (memory, parts) = open_tier(tmp_path), fresh_key(), large_parts(4 << 30)
    put(tier, fresh_key(), b"")  # the folder is counted from here on
    started = time.monotonic()
    with pytest.raises(TierError, match="deadline"):
        tier.put([key], [parts], deadline=started + 0.03)
    assert time.monotonic() - started < 5.0
    assert contains(tier, key) is MISSING
    assert temporary_files(tmp_path) == []
    assert used(tier) == 0
    parts.clear()
    memory.clear()  # the error keeps no view of it


def test_the_deadline_ends_the_reading_of_a_large_value(tmp_path: Path) -> None:
    nbytes = 64 << 30
    tier, key, (memory, parts) = open_tier(tmp_path), fresh_key(), large_parts(nbytes)
    path = file_of(tmp_path, key)
    path.parent.mkdir()
    path.write_bytes(pack_head(PAGE, nbytes))
    try:
        os.truncate(path, file_bytes(nbytes))  # all of it a hole
    except OSError:
        pytest.skip("the file system has no room for a sparse file of 64 GiB")
    started = time.monotonic()
    with pytest.raises(TierError, match="deadline"):
        tier.get_into([key], [parts], deadline=started + 0.03)
    assert time.monotonic() - started < 5.0
    parts.clear()
    memory.clear()


def test_close_ends_the_writing_of_a_large_value(tmp_path: Path) -> None:
    tier, key, (_, parts) = open_tier(tmp_path), fresh_key(), large_parts(8 << 30)
    errors: list[str] = []

    def store() -> None:
        try:
            tier.put([key], [parts], deadline=soon(120))
        except TierError as error:
            errors.append(error.fact)

    thread = threading.Thread(target=store)
    thread.start()
    wait_until(lambda: any(path.stat().st_size for path in temporary_files(tmp_path)), what="a part of the file")
    tier.close()
    thread.join(20)
    assert not thread.is_alive()
    assert errors == ["the tier is closed"]
    assert temporary_files(tmp_path) == []
    assert not file_of(tmp_path, key).exists()
    assert open_files(tmp_path) == []
