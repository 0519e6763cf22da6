"""The check of recovered objects: what is damaged goes, also if a reader has it, and what is whole stays."""

from __future__ import annotations

import pytest

from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import UNKNOWN_LAYOUT, object_checksum
from kvframework.storage.table import Table, Verification
from tests.core.storage.memory import OrderedLru, PlainMemory, content, packed_key
from tests.support.waiting import wait_until

LAYOUT = b"layout of 16 byt"
KEYS = [packed_key(number) for number in range(40)]


@pytest.fixture
def storage() -> StorageManager:
    manager = StorageManager(Table(PlainMemory(64 * ALIGNMENT), OrderedLru()))
    placed = manager.table.reserve([(key, ALIGNMENT) for key in KEYS], owner=1)
    assert placed.lease is not None
    for index, offset in placed.placed:
        manager.table.arena[offset : offset + ALIGNMENT] = content(KEYS[index], ALIGNMENT)
    manager.table.commit(placed.lease.id, owner=1)
    return manager


def checksum(key: bytes, layout: bytes = LAYOUT) -> int:
    return object_checksum(key, memoryview(content(key, ALIGNMENT)), layout)


def check(storage: StorageManager, known: list[tuple[bytes, int]]) -> Verification:
    verification = Verification(storage.table, known, lambda _: LAYOUT)
    verification.start()
    return verification


def test_whole_objects_stay_and_damaged_ones_go(storage: StorageManager) -> None:
    known = [(key, checksum(key)) for key in KEYS]
    known[7] = (KEYS[7], 1)
    # The layout was not known when it was written.
    known[8] = (KEYS[8], checksum(KEYS[8], UNKNOWN_LAYOUT))
    verification = check(storage, known)
    wait_until(lambda: verification.verified == len(KEYS) - 1, 30, "the check")
    assert verification.stop(30)
    assert storage.table.which_present(KEYS) == [key != KEYS[7] for key in KEYS]
    assert verification.damaged == 1
    storage.close()


def test_a_damaged_object_that_is_read_goes_afterwards(storage: StorageManager) -> None:
    lease = storage.table.pin([KEYS[0]], owner=1)
    assert lease is not None
    verification = check(storage, [(KEYS[0], 1)])
    wait_until(lambda: verification.damaged, 30, "the check")
    assert storage.table.which_present([KEYS[0]]) == [True]
    storage.table.unpin(lease.id, owner=1)
    wait_until(lambda: storage.table.which_present([KEYS[0]]) == [False], 30, "the end of the pin")
    assert verification.stop(30)
    storage.close()


def test_the_end_of_the_storage_ends_the_check(storage: StorageManager) -> None:
    lease = storage.table.pin([KEYS[0]], owner=1)
    assert lease is not None
    verification = check(storage, [(KEYS[0], 1)])
    assert verification.stop(30)
    storage.close()
