"""The filesystem tier in processes of their own: killed in the middle, and two on one folder at the same time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from kvf_filesystem.form import LARGE
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import Outcome
from tests.filesystem.folder import file_of, fresh_key, get, open_tier, put, soon, temporary_files, used
from tests.support.processes import send
from tests.support.received import outcomes_of
from tests.support.waiting import wait_until

SPAWN = multiprocessing.get_context("spawn")
FOUND, MISSING, STORED, DELETED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED, Outcome.DELETED

MIB = 1 << 20


# kill -9


def store_for_ever(folder: Path, key: bytes) -> None:
    """Replaces one large value again and again, by one that is all of another byte."""
    tier = open_tier(folder, shared=True)
    for turn in range(1, 1_000_000):
        parts = [memoryview(bytes([turn % 251 + 1]) * MIB)] * 32
        assert tier.put([key], [parts], deadline=soon(60)) == [STORED]


def killed_in_the_middle(folder: Path, key: bytes) -> None:
    """Kills a process that has written a part of a value."""
    child = SPAWN.Process(target=store_for_ever, args=(folder, key))
    child.start()
    assert child.pid is not None
    try:
        deadline = time.monotonic() + 60
        while not stopped_in_the_middle(folder, child.pid):
            assert time.monotonic() < deadline, "it was never found in the middle of a value"
            os.kill(child.pid, signal.SIGCONT)
    finally:
        child.kill()
        child.join(20)
    assert child.exitcode == -signal.SIGKILL


def stopped_in_the_middle(folder: Path, pid: int) -> bool:
    if not any(0 < size_of(path) < 32 * MIB for path in temporary_files(folder)):
        return False
    send(pid, signal.SIGSTOP)
    return any(0 < size_of(path) < 32 * MIB for path in temporary_files(folder))


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_in_a_shared_folder_only_old_temporary_files_are_dead(tmp_path: Path) -> None:
    key = fresh_key()
    killed_in_the_middle(tmp_path, key)
    (left,) = temporary_files(tmp_path)
    young = left.with_name(".0123456789abcdef-7.tmp")
    young.write_bytes(b"of another server")
    foreign = left.with_name(".another program.tmp")
    foreign.write_bytes(b"of another program")
    long_ago = time.time() - 3601
    for path in (left, foreign):
        os.utime(path, (long_ago, long_ago))
    tier = open_tier(tmp_path, shared=True)
    wait_until(lambda: not left.exists(), what="the sweep")
    assert used(tier) in (0, 32 * MIB)
    assert young.exists()
    assert foreign.exists()


# Two on one folder

KEYS = [bytes([number]) * PACKED_KEY_BYTES for number in range(12)]
WRITERS = 2
ROUNDS = 40


def value_of(number: int, writer: int, turn: int) -> bytes:
    """A value that tells whose it is; the large ones have their own lengths, too."""
    nbytes = (LARGE + 4096 * (number + writer + turn % 3)) if number % 4 == 0 else 2000 + 500 * number + 37 * writer
    return random.Random(f"{number} {writer} {turn}").randbytes(64) * (nbytes // 64) + bytes([number, writer, turn])


def store_and_compare(folder: Path, writer: int, barrier: Barrier) -> None:
    """Writes all keys again and again, and compares whatever is found with all that may be there."""
    tier = open_tier(folder, shared=True, recount_s=0.2)
    whole = {number: {value_of(number, w, t) for w in range(WRITERS) for t in range(3)} for number in range(len(KEYS))}
    order, found_by_others = random.Random(writer), 0
    barrier.wait(60)
    for turn in range(ROUNDS):
        numbers = order.sample(range(len(KEYS)), 6)
        values = [value_of(number, writer, turn % 3) for number in numbers]
        keys = [KEYS[number] for number in numbers]
        assert tier.put(keys, [[memoryview(value)] for value in values], deadline=soon(60)) == [STORED] * 6
        if turn % 5 == 4:
            assert set(tier.delete(keys[:2], deadline=soon(60))) <= {DELETED, MISSING}
        buffers = [bytearray(LARGE + (1 << 18)) for _ in KEYS]
        outcomes = outcomes_of(tier.get_into(KEYS, [[memoryview(buffer)] for buffer in buffers], deadline=soon(60)))
        for number, (buffer, outcome) in enumerate(zip(buffers, outcomes, strict=True)):
            assert outcome in (FOUND, MISSING)
            if outcome is FOUND:
                (same,) = [value for value in whole[number] if buffer.startswith(value)]
                found_by_others += same[-2] != writer
    assert found_by_others, "the two never met"
    tier.close()


def test_two_processes_on_one_folder_never_see_a_wrong_byte(tmp_path: Path) -> None:
    barrier = SPAWN.Barrier(WRITERS)
    children = [SPAWN.Process(target=store_and_compare, args=(tmp_path, writer, barrier)) for writer in range(WRITERS)]
    for child in children:
        child.start()
    for child in children:
        child.join(100)
    assert [child.exitcode for child in children] == [0] * WRITERS
    assert temporary_files(tmp_path) == []

    tier = open_tier(tmp_path)
    entries = list(tier.scan(deadline=soon()))
    for entry in entries:
        outcome, value = get(tier, entry.key, entry.nbytes)
        number, writer, turn = value[-3:]
        assert (outcome, entry.key) == (FOUND, KEYS[number])
        assert value == value_of(number, writer, turn)
    assert used(tier) == sum(entry.nbytes for entry in entries) > 0


def test_what_others_store_is_counted_after_a_while(tmp_path: Path) -> None:
    one, two = (open_tier(tmp_path, shared=True, recount_s=0.05, capacity="1MiB") for _ in range(2))
    key = fresh_key()
    assert used(two) == 0
    assert put(one, key, bytes(MIB)) is STORED
    wait_until(lambda: used(two) == MIB, what="the count")
    assert put(two, fresh_key(), b"no room") is Outcome.FAILED
    file_of(tmp_path, key).unlink()
    wait_until(lambda: used(one) == used(two) == 0, what="the count")
    assert put(two, fresh_key(), b"room") is STORED
    one.close()
    two.close()
