"""The filesystem tier's count of its bytes: never beyond the capacity, and right after a restart."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvf_filesystem import ledger
from kvf_filesystem.form import LARGE
from kvf_filesystem.ledger import Counting, Ledger, Lister
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import Outcome
from kvframework.errors import TierError
from tests.filesystem.folder import (
    contains,
    delete,
    file_of,
    files,
    fresh_key,
    get,
    open_tier,
    put,
    soon,
    temporary_files,
    used,
)
from tests.support.waiting import wait_until

FOUND, MISSING, STORED, FAILED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED, Outcome.FAILED
DELETED = Outcome.DELETED

CAPACITY = 2 * LARGE + 5000
KEYS = [
    bytes([number % 3]) * (PACKED_KEY_BYTES - 1) + bytes([number // 2]) for number in range(6)
]  # some share a folder
SIZES = st.sampled_from([0, 1, 100, 4000, LARGE - 1, LARGE, LARGE + 1])


class Accounting(RuleBasedStateMachine):
    """A folder against a dict of sizes; `used` and the outcome of a put are exactly what they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvf-accounting-")
        self.sizes: dict[bytes, int] = {}
        self.tier = open_tier(self.folder.name, capacity=CAPACITY)

    @rule(key=st.sampled_from(KEYS), nbytes=SIZES)
    def put(self, key: bytes, nbytes: int) -> None:
        fits = sum(self.sizes.values()) - self.sizes.get(key, 0) + nbytes <= CAPACITY
        assert put(self.tier, key, bytes(nbytes)) is (STORED if fits else FAILED)
        if fits:
            self.sizes[key] = nbytes

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key: bytes) -> None:
        expected = MISSING if self.sizes.pop(key, None) is None else DELETED
        assert delete(self.tier, key) is expected

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = open_tier(self.folder.name, capacity=CAPACITY)

    @rule()
    def scan(self) -> None:
        assert {entry.key: entry.nbytes for entry in self.tier.scan(deadline=soon())} == self.sizes

    @rule(key=st.sampled_from(KEYS))
    def remove_underneath(self, key: bytes) -> None:
        file_of(Path(self.folder.name), key).unlink(missing_ok=True)
        self.sizes.pop(key, None)
        self.scan()

    @invariant()
    def used_is_what_is_there(self) -> None:
        assert used(self.tier) == sum(self.sizes.values()) <= CAPACITY

    def teardown(self) -> None:
        self.tier.close()
        self.folder.cleanup()


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=25, stateful_step_count=15)


def test_threads_on_the_same_keys_keep_the_count_and_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system is slow at the moments between looking and changing, so that threads meet there."""
    for name in ("rename", "unlink"):
        monkeypatch.setattr(os, name, slowed(getattr(os, name)))
    listed = Lister._listed

    def slowly_listed(*args: Any) -> Any:
        entries = listed(*args)
        if entries:
            time.sleep(0.002)
        return entries

    monkeypatch.setattr(Lister, "_listed", slowly_listed)
    capacity = 20_000
    tier, keys = open_tier(tmp_path, capacity=capacity), [fresh_key() for _ in range(4)]
    failures: list[BaseException] = []
    most: list[int] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(100):
                key = choose.choice(keys)
                if choose.random() < 0.3:
                    assert delete(tier, key) in (DELETED, MISSING)
                else:
                    value = bytes([seed]) * choose.choice([0, 10, 3000, 9000])
                    assert put(tier, key, value) in (STORED, FAILED)
                if choose.random() < 0.1:
                    list(tier.scan(deadline=soon()))
                most.append(used(tier))
                outcome, found = get(tier, key, 9000)
                assert outcome in (FOUND, MISSING)
                assert outcome is MISSING or not found.strip(found[:1] + b"\0")
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert 0 < max(most) <= capacity
    assert min(most) >= 0
    counted = used(tier)
    assert counted == sum(entry.nbytes for entry in tier.scan(deadline=soon())) == used(tier)
    assert len(files(tmp_path)) <= len(keys)


def slowed(call: Callable[..., None]) -> Callable[..., None]:
    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.0005)
        call(*args, **options)

    return slow


def test_two_that_replace_the_same_value_do_not_count_its_room_twice() -> None:
    ledger = Ledger(100, 1)
    ledger.recount(0, 90)
    assert ledger.reserve(45, replaced=90)
    assert ledger.reserve(45, replaced=90)
    assert ledger.replace(0, 45, replaced=90)
    ledger.release(45)
    assert not ledger.reserve(60, replaced=45)
    assert ledger.replace(0, 45, replaced=45)
    ledger.release(45)
    assert ledger.used == 45
    ledger.change(0, -60)  # others were there
    assert ledger.used == 0


def test_room_that_others_took_meanwhile_is_not_given_twice() -> None:
    ledger = Ledger(100, 2)
    ledger.recount(0, 0)
    ledger.recount(1, 90)
    assert ledger.reserve(80, replaced=90)  # over the value of 90, which then goes
    ledger.change(1, -90)
    assert ledger.reserve(20, replaced=0)
    ledger.change(1, 10)  # and a smaller one comes
    assert not ledger.replace(1, 80, replaced=0)
    ledger.release(80)
    assert ledger.replace(0, 20, replaced=0)
    ledger.release(20)
    assert ledger.used == 30


# Counting


def test_nothing_is_stored_before_all_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, key = open_tier(tmp_path, capacity=1000), fresh_key()
    assert put(tier, key, bytes(900)) is STORED
    tier.close()

    gate, real = threading.Event(), Lister.entries

    def held(*args: object, **options: object) -> object:
        assert gate.wait(60)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Lister, "entries", held)
    tier = open_tier(tmp_path, capacity=1000)
    assert tier.put([fresh_key()], [[memoryview(bytes(900))]], deadline=soon(0.2)) == [FAILED]
    assert tier.usage(deadline=soon(0.2)).used_bytes == 0
    assert get(tier, key, 900) == (FOUND, bytes(900))
    assert len(files(tmp_path)) == 1
    gate.set()
    wait_until(lambda: used(tier) == 900)
    assert put(tier, fresh_key(), bytes(900)) is FAILED
    assert put(tier, fresh_key(), bytes(100)) is STORED


def test_closing_does_not_wait_for_a_long_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, errors = threading.Event(), []

    def endless(_lister: Lister, _root: object, limit: object, *, folder: int) -> object:
        begun.set()
        while True:
            limit.check()  # type: ignore[attr-defined]

    monkeypatch.setattr(Lister, "entries", endless)
    tier = open_tier(tmp_path)

    def store() -> None:
        try:
            put(tier, fresh_key(), b"value", deadline=soon(60))
        except TierError as error:
            errors.append(error.fact)

    thread = threading.Thread(target=store)
    thread.start()
    assert begun.wait(60)
    tier.close()
    thread.join(20)
    assert errors == ["the tier is closed"]
    assert not any(each.name == "kvf-filesystem" for each in threading.enumerate())


def test_a_count_that_failed_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger, "RETRY_S", 0.001)
    tries: list[int] = []

    def count() -> None:
        tries.append(1)
        if len(tries) < 5:
            raise PermissionError(13, os.strerror(13))

    thread = Counting(count, every_s=None, where="[[l2]] #1")
    assert thread.wait(60)
    thread.again()
    wait_until(lambda: len(tries) == 6)
    thread.close(20)
    thread.close(20)
    assert [record.getMessage() for record in caplog.records] == [
        "[[l2]] #1: the bytes in the folder cannot be counted: Permission denied"
    ]


def test_a_folder_that_came_back_is_counted_anew(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    tier, key = open_tier(folder), fresh_key()
    assert put(tier, key, b"value") is STORED
    for path in files(folder):
        path.unlink()
        path.parent.rmdir()
    (folder / "kvframework-filesystem-tier").unlink()
    folder.rmdir()
    folder.mkdir()
    assert contains(tier, key) is MISSING
    wait_until(lambda: used(tier) == 0, what="the count")


def test_counting_spares_what_this_tier_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, key, before = open_tier(tmp_path, fsync="data"), fresh_key(), []
    assert used(tier) == 0

    def count_now(_fd: int) -> None:
        before.extend(temporary_files(tmp_path))
        assert list(tier.scan(deadline=soon())) == []

    monkeypatch.setattr(os, "fdatasync", count_now)
    assert put(tier, key, b"value") is STORED
    assert len(before) == 1
    assert get(tier, key, 5) == (FOUND, b"value")
