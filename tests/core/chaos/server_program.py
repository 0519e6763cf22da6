"""`kvframework serve` on a disk with an adjustable delay, and with one planted bug on request: a harness that cannot
fail proves nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvf_filesystem.tier as filesystem
from kvframework.api.tier import Tier
from kvframework.cli.main import main
from kvframework.storage import recovery as kept
from kvframework.storage import table as storage_table
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.table import Table

SLOWNESS, PLANT = "KVFRAMEWORK_CHAOS_SLOWNESS", "KVFRAMEWORK_CHAOS_PLANT"
# A bug occurs once in this number of calls.
RARELY = 4


def slow_disk() -> None:
    """Delay each call of a tier by the number of seconds that a file contains."""
    open_tier, slowness = filesystem.open_tier, Path(os.environ[SLOWNESS])

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(*arguments: Any, **options: Any) -> Any:
            with contextlib.suppress(FileNotFoundError, ValueError):
                time.sleep(float(slowness.read_text()))
            return call(*arguments, **options)

        return wait_and_call

    def opened(*arguments: Any, **options: Any) -> Tier:
        tier = open_tier(*arguments, **options)
        for name in ("contains", "get_into", "put", "delete", "touch", "usage", "scan"):
            setattr(tier, name, delayed(getattr(tier, name)))
        return tier

    filesystem.open_tier = opened


# bugs


def wrong_byte(table: Table, objects: list[StoredObject]) -> None:
    """Change a byte of an object that has just been published."""
    for stored in objects[:1]:
        table.arena[stored.offset + stored.length // 2] ^= 1


def lost_commit(table: Table, objects: list[StoredObject]) -> None:
    """Report objects as stored without storing them."""
    table.drop([stored.key for stored in objects])


def leaked_pin(table: Table, objects: list[StoredObject]) -> None:
    """Never release an object that was pinned again."""
    table.pin_present([stored.key for stored in objects[:1]])


def leaked_range(table: Table, _objects: list[StoredObject]) -> None:
    """Leak memory of the arena, which is then neither free nor used."""
    table.allocator.allocate(4096)


def leaked_descriptor(_table: Table, _objects: list[StoredObject]) -> None:
    for _ in range(10):
        os.open(os.devnull, os.O_RDONLY)


def traceback(_table: Table, _objects: list[StoredObject]) -> None:
    try:
        raise RuntimeError("planted")
    except RuntimeError:
        logging.getLogger("kvframework").exception("something failed")


def ignored_writers() -> None:
    """Take the clients of an earlier server for ended: what they may still write is given to others."""
    storage_table.may_write = lambda _fd, _writer: False


def forgetful_start() -> None:
    """Forget the object that was used last: a start takes it over under another key."""
    read = kept.read

    def forgetful(*arguments: Any) -> Any:
        found = read(*arguments)
        objects = found.slots.objects
        if objects:
            objects[-1] = objects[-1]._replace(key=os.urandom(len(objects[-1].key)))
        return found

    kept.read = forgetful


def _after_commit(planted: Callable[[Table, list[StoredObject]], None]) -> None:
    commit = Table.commit
    calls = 0

    def committed(table: Table, lease_id: str, *, owner: int) -> list[StoredObject]:
        nonlocal calls
        with table.lock:
            objects = commit(table, lease_id, owner=owner)
            calls += 1
            if objects and calls % RARELY == 0:
                planted(table, objects)
        return objects

    Table.commit = committed  # type: ignore[assignment, method-assign]


BUGS = {bug.__name__: bug for bug in (wrong_byte, lost_commit, leaked_pin, leaked_range, leaked_descriptor, traceback)}
# Of a server whose L1 a keeper has: they show after a kill.
HELD_BUGS = {bug.__name__: bug for bug in (ignored_writers, forgetful_start)}

if __name__ == "__main__":
    slow_disk()
    if os.environ.get(PLANT):
        name = os.environ[PLANT]
        if name in BUGS:
            _after_commit(BUGS[name])
        else:
            HELD_BUGS[name]()
    main()
