"""The filesystem tier where links, pipes and devices stand in place of its folders and files: nothing outside of its
folder is read, changed or removed, and no call waits for a pipe."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvf_filesystem import root
from kvf_filesystem.form import LARGE
from kvf_filesystem.ledger import Lister
from kvf_filesystem.root import MARKER
from kvf_filesystem.tier import FilesystemTier
from kvframework.api.tier import Outcome
from kvframework.errors import ConfigFieldError, TierError
from tests.filesystem.folder import (
    contains,
    delete,
    file_of,
    files,
    fresh_key,
    get,
    open_files,
    open_tier,
    put,
    soon,
    used,
)

FOUND, MISSING, STORED, FAILED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED, Outcome.FAILED
DELETED, DAMAGED = Outcome.DELETED, Outcome.DAMAGED

Call = Callable[[FilesystemTier, bytes], object]
CALLS: dict[str, Call] = {
    "contains": contains,
    "get": lambda tier, key: get(tier, key, 5)[0],
    "put": lambda tier, key: put(tier, key, b"other"),
    "put large": lambda tier, key: put(tier, key, bytes(LARGE)),
    "delete": delete,
    "touch": lambda tier, key: tier.touch([key], deadline=soon()),
    "scan": lambda tier, _key: list(tier.scan(deadline=soon())),
}


def contents(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """What lies below a folder: its bytes, its time and its inode."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file()
    }


def plant(folder: Path, key: bytes, name: str | None = None) -> Path:
    """A folder like a fan-out folder of another tier: a value under `key`, and a temporary file that nobody writes."""
    folder.mkdir(parents=True)
    whole = open_tier(folder.parent / "made")
    assert put(whole, key, b"value") is STORED
    whole.close()
    file_of(folder.parent / "made", key).rename(folder / (name or key.hex()))
    (folder / ".0123456789abcdef-7.tmp").write_bytes(b"of another server")
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    return folder


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("used_before", [False, True])
def test_a_link_in_place_of_a_folder_is_never_followed(
    tmp_path: Path, used_before: bool, shared: bool, name: str
) -> None:
    root, key = tmp_path / "kv", fresh_key()
    tier = open_tier(root, shared=shared)
    folder = file_of(root, key).parent
    if used_before:
        assert put(tier, key, b"value") is STORED
        assert get(tier, key, 5) == (FOUND, b"value")
        shutil.rmtree(folder)
    outside = plant(tmp_path / "outside" / "there", key)
    folder.symlink_to(outside)
    before = contents(outside)
    if name == "scan":
        assert list(tier.scan(deadline=soon())) == []
    else:
        with pytest.raises(TierError, match="Not a directory") as caught:
            CALLS[name](tier, key)
        assert "link" in caught.value.hint
    assert contents(outside) == before
    assert folder.is_symlink()
    if not used_before:
        assert used(tier) == 0

    folder.unlink()
    assert contains(tier, key) is MISSING
    assert put(tier, key, b"value") is STORED
    assert get(tier, key, 5) == (FOUND, b"value")
    tier.close()
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("name", CALLS)
def test_a_folder_that_was_moved_away_is_left_alone(tmp_path: Path, name: str) -> None:
    root, key = tmp_path / "kv", fresh_key()
    tier = open_tier(root)
    assert put(tier, key, b"value") is STORED
    assert get(tier, key, 5) == (FOUND, b"value")
    folder, outside = file_of(root, key).parent, tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    before = contents(outside)
    with contextlib.suppress(TierError):
        assert CALLS[name](tier, key) in ([], None)
    assert contents(outside) == before
    folder.unlink()
    assert CALLS[name](tier, key) in (MISSING, STORED, None, [])
    assert contents(outside) == before


@pytest.mark.parametrize("name", ["delete", "put"])
def test_a_folder_replaced_by_a_link_within_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The folder is moved away and linked to between two keys of one call."""
    root, one = tmp_path / "kv", fresh_key()
    two = fresh_key()[:-1] + one[-1:]
    tier = open_tier(root)
    for key in (one, two):
        assert put(tier, key, b"value") is STORED
    folder, outside = file_of(root, one).parent, tmp_path / "outside"
    call = {"delete": "unlink", "put": "rename"}[name]
    real, seen = getattr(os, call), {}

    def replaced(*args: Any, **options: Any) -> None:
        real(*args, **options)
        monkeypatch.undo()
        folder.rename(outside)
        folder.symlink_to(outside)
        seen.update(contents(outside))

    monkeypatch.setattr(os, call, replaced)
    batches: dict[str, Callable[[], object]] = {
        "delete": lambda: tier.delete([one, two], deadline=soon()),
        "put": lambda: tier.put([one, two], [[memoryview(b"other")]] * 2, deadline=soon()),
    }
    with pytest.raises(TierError, match="Not a directory"):
        batches[name]()
    assert contents(outside) == seen


def test_a_folder_replaced_while_its_value_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, key = tmp_path / "kv", fresh_key()
    tier = open_tier(root, fsync="data")
    assert put(tier, key, b"value") is STORED
    folder, outside = file_of(root, key).parent, tmp_path / "outside"

    def replaced(_fd: int) -> None:
        folder.rename(outside)
        folder.mkdir()

    monkeypatch.setattr(os, "fdatasync", replaced)
    assert put(tier, key, b"other") is FAILED
    monkeypatch.undo()
    assert [path.name for path in outside.iterdir() if not path.name.endswith(".tmp")] == [key.hex()]
    assert list(folder.iterdir()) == []
    assert put(tier, key, b"other") is STORED
    assert get(tier, key, 5) == (FOUND, b"other")


def test_a_folder_deleted_and_made_again_a_thousand_times(tmp_path: Path) -> None:
    """The tier holds no folder longer than it has its name, and no more of them than there are names."""
    tier, key = open_tier(tmp_path), fresh_key()
    folder = file_of(tmp_path, key).parent
    for turn in range(1000):
        assert put(tier, key, b"value%d" % turn) is STORED
        assert get(tier, key, 9) == (FOUND, (b"value%d" % turn).ljust(9, b"\0"))
        shutil.rmtree(folder)
        if turn % 2:
            folder.mkdir()
        assert contains(tier, key) is MISSING
        assert delete(tier, key) is MISSING
    assert len(open_files(tmp_path)) <= 3
    tier.close()
    assert open_files(tmp_path) == []


def test_a_folder_replaced_again_and_again_under_readers_is_never_another_file(tmp_path: Path) -> None:
    """A descriptor that was closed under a call could name another file by then."""
    root, key, outside = tmp_path / "kv", fresh_key(), tmp_path / "outside"
    tier = open_tier(root)
    assert put(tier, key, b"value") is STORED
    other = plant(outside / "there", key, "another name")
    (other / key.hex()).write_bytes(b"not of this tier")
    folder, ended, failures = file_of(root, key).parent, threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            with contextlib.suppress(TierError):
                outcome, value = get(tier, key, 5)
                if outcome not in (FOUND, MISSING) or (outcome is FOUND and value != b"value"):
                    failures.append((outcome, value))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for turn in range(300):
        folder.rename(root / "aside")
        folder.symlink_to(other)
        folder.unlink()
        if turn % 2:
            folder.mkdir()
            folder.rmdir()
        (root / "aside").rename(folder)
    ended.set()
    for reader in readers:
        reader.join(60)
    assert not failures
    assert get(tier, key, 5) == (FOUND, b"value")


def test_a_hit_costs_no_more_calls_of_the_kernel_than_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, keys = open_tier(tmp_path), [fresh_key() for _ in range(100)]
    for key in keys:
        assert put(tier, key, b"value") is STORED
    monkeypatch.setattr(root, "_TICK_NS", 0)  # a root that has just changed is looked at by each call
    assert set(tier.contains(keys, deadline=soon())) == {FOUND}
    made: list[str] = []

    def record(name: str) -> None:
        real = getattr(os, name)

        def recorded(*args: Any, **options: Any) -> Any:
            made.append(name)
            return real(*args, **options)

        monkeypatch.setattr(os, name, recorded)

    for name in ("stat", "open", "close"):
        record(name)
    assert set(tier.contains(keys, deadline=soon())) == {FOUND}
    assert (made.count("stat"), made.count("open")) == (100, 0)
    made.clear()
    buffers = [[memoryview(bytearray(5))] for _ in keys]
    assert tier.get_into(keys, buffers, deadline=soon()) == [5] * 100
    assert (made.count("open"), made.count("close"), made.count("stat")) == (100, 100, 0)
    monkeypatch.undo()


# Links to files, and what is no file


def test_a_file_that_has_another_name_outside_keeps_its_bytes_and_its_time(tmp_path: Path) -> None:
    root, key = tmp_path / "kv", fresh_key()
    tier = open_tier(root)
    assert put(tier, key, b"value") is STORED
    outside = tmp_path / "outside"
    outside.mkdir()
    os.link(file_of(root, key), outside / "precious")
    os.utime(outside / "precious", (1, 1))
    before = contents(outside)
    tier.touch([key], deadline=soon())
    assert put(tier, key, b"other") is STORED
    assert get(tier, key, 5) == (FOUND, b"other")
    file_of(root, key).unlink()
    os.link(outside / "precious", file_of(root, key))
    assert delete(tier, key) is DELETED
    assert contents(outside) == before


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_a_fifo(path: Path) -> None:
    fifo = path.parent.parent.parent / "a fifo"
    os.mkfifo(fifo)
    path.symlink_to(fifo)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("no device can be made here")


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make", [make_fifo, make_link_to_a_fifo, make_folder, make_device, make_dangling_link, make_link_to_itself]
)
def test_what_is_no_file_delays_no_call_and_is_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    root, key = tmp_path / "kv", fresh_key()
    tier = open_tier(root)
    path = file_of(root, key)
    path.parent.mkdir()
    for last in (lambda: delete(tier, key) is DELETED, lambda: put(tier, key, b"value") is STORED):
        make(path)
        assert contains(tier, key) is DAMAGED
        assert get(tier, key, 5)[0] is DAMAGED
        tier.touch([key], deadline=soon())
        assert list(tier.scan(deadline=soon())) == []
        assert last()
        for left in tmp_path.glob("a fifo"):
            left.unlink()
    assert get(tier, key, 5) == (FOUND, b"value")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [make_fifo, make_device, make_dangling_link, make_link_to_itself, make_folder])
def test_what_is_no_file_in_place_of_the_marker_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / MARKER)
    with pytest.raises(ConfigFieldError) as caught:
        open_tier(tmp_path)
    assert caught.value.where == "[[l2]] #1.path"
    assert open_files(tmp_path) == []


def test_a_marker_that_is_a_file_of_others_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "precious").write_bytes(b"")
    os.link(tmp_path / "precious", tmp_path / "kv" / MARKER)
    with pytest.raises(ConfigFieldError):
        open_tier(tmp_path / "kv")
    assert (tmp_path / "precious").read_bytes() == b""


# The configured folder


def test_a_configured_link_is_resolved_once(tmp_path: Path) -> None:
    one, two, link = tmp_path / "one", tmp_path / "two", tmp_path / "link"
    one.mkdir()
    two.mkdir()
    link.symlink_to("one")
    tier, key = open_tier(link), fresh_key()
    assert put(tier, key, b"value") is STORED
    assert file_of(one, key).exists()
    link.unlink()
    link.symlink_to("two")
    assert get(tier, key, 5) == (FOUND, b"value")
    shutil.rmtree(one)
    with pytest.raises(TierError, match="lost"):
        put(tier, key, b"other")
    assert list(two.iterdir()) == []
    one.mkdir()
    assert put(tier, key, b"other") is STORED
    assert file_of(one, key).exists()
    assert list(two.iterdir()) == []


@pytest.mark.parametrize("above", [False, True])
def test_a_lost_folder_is_not_looked_for_behind_a_link(tmp_path: Path, above: bool) -> None:
    """Neither in place of the folder nor in place of one above."""
    root, outside = tmp_path / "above" / "kv", tmp_path / "outside"
    tier, key = open_tier(root), fresh_key()
    assert put(tier, key, b"value") is STORED
    shutil.rmtree(root.parent)
    (outside / "kv").mkdir(parents=True)
    if above:
        root.parent.symlink_to(outside)
    else:
        root.parent.mkdir()
        root.symlink_to(outside / "kv")
    with pytest.raises(TierError, match="lost") as caught:
        put(tier, key, b"other")
    assert "Not a directory" in caught.value.fact
    assert files(outside) == []


def test_a_link_to_nothing_is_refused_as_it_may_be_a_disk_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("missing")
    with pytest.raises(ConfigFieldError, match="No such file"):
        open_tier(tmp_path / "link")
    assert not (tmp_path / "missing").exists()


# The descriptors


def test_listing_spares_what_a_linked_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a folder that is replaced while it is listed lose a file of others."""
    root, key = tmp_path / "kv", fresh_key()
    tier = open_tier(root)
    assert put(tier, key, b"value") is STORED
    outside = plant(tmp_path / "outside" / "there", key)
    before, folder = contents(outside), file_of(root, key).parent
    real = Lister._is_dead

    def replaced(lister: Lister, status: os.stat_result) -> bool:
        folder.rename(tmp_path / "aside")
        folder.symlink_to(outside)
        return real(lister, status)

    (folder / ".0123456789abcdef-7.tmp").write_bytes(b"of a server that died")
    monkeypatch.setattr(Lister, "_is_dead", replaced)
    list(tier.scan(deadline=soon()))
    assert contents(outside) == before
    assert not (tmp_path / "aside" / ".0123456789abcdef-7.tmp").exists()
