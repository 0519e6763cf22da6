"""The filesystem tier when others truncate, garble, replace and delete its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvf_filesystem.form import LARGE, file_bytes, pack_head
from kvframework.api.tier import Outcome
from kvframework.errors import TierError
from tests.filesystem import folder
from tests.support.received import outcomes_of

FOUND, MISSING, STORED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED
DELETED, FAILED, DAMAGED = Outcome.DELETED, Outcome.FAILED, Outcome.DAMAGED


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def shorten_to_another_values_size(path: Path) -> None:
    os.truncate(path, file_bytes(10))


def write_garbage_over_the_head(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(os.urandom(16))


def let_the_value_begin_beyond_the_end(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(pack_head(60_000, int.from_bytes(path.read_bytes()[8:16], "little")))


def put_a_link_there(path: Path) -> None:
    path.rename(path.with_name("the value"))
    path.symlink_to("the value")


DAMAGES: list[Callable[[Path], None]] = [
    truncate,
    empty,
    append,
    shorten_to_another_values_size,
    write_garbage_over_the_head,
    let_the_value_begin_beyond_the_end,
    put_a_link_there,
]


@pytest.mark.parametrize("nbytes", [1000, LARGE + 1000])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_told_deleted_and_replaced(
    tmp_path: Path, damage: Callable[[Path], None], nbytes: int
) -> None:
    tier, before, key, after = folder.open_tier(tmp_path), folder.fresh_key(), folder.fresh_key(), folder.fresh_key()
    keys, values = [before, key, after], [os.urandom(100), os.urandom(nbytes), os.urandom(100)]
    parts = [[memoryview(value)] for value in values]
    for again in (lambda: folder.delete(tier, key), lambda: None):
        assert tier.put(keys, parts, deadline=folder.soon()) == [STORED] * 3
        damage(folder.file_of(tmp_path, key))
        assert folder.contains(tier, key) in (FOUND, DAMAGED)
        buffers = [bytearray(len(value)) for value in values]
        outcomes = outcomes_of(tier.get_into(keys, [[memoryview(each)] for each in buffers], deadline=folder.soon()))
        assert outcomes == [FOUND, DAMAGED, FOUND]
        assert (buffers[0], buffers[2]) == (values[0], values[2])
        assert again() in (DELETED, None)
        if again() is MISSING:
            assert folder.contains(tier, key) is MISSING
    assert folder.put(tier, key, values[1]) is STORED
    assert folder.get(tier, key, nbytes) == (FOUND, values[1])
    assert len(list(tier.scan(deadline=folder.soon()))) == 3
    assert folder.used(tier) == 200 + nbytes


def test_a_flipped_bit_is_for_the_cores_checksum(tmp_path: Path) -> None:
    tier, key = folder.open_tier(tmp_path), folder.fresh_key()
    assert folder.put(tier, key, b"a" * 100) is STORED
    path = folder.file_of(tmp_path, key)
    path.write_bytes(path.read_bytes().replace(b"aaa", b"aca", 1))
    assert folder.get(tier, key, 100) == (FOUND, b"aca" + b"a" * 97)


def test_a_link_is_not_followed_and_its_target_is_left_alone(tmp_path: Path) -> None:
    tier, key, target = folder.open_tier(tmp_path / "kv"), folder.fresh_key(), tmp_path / "precious"
    assert folder.put(tier, key, b"value") is STORED
    target.write_bytes(folder.file_of(tmp_path / "kv", key).read_bytes())
    folder.file_of(tmp_path / "kv", key).unlink()
    folder.file_of(tmp_path / "kv", key).symlink_to(target)
    kept = target.read_bytes()
    assert folder.get(tier, key, 5)[0] is DAMAGED
    tier.touch([key], deadline=folder.soon())
    assert folder.put(tier, key, b"other") is STORED
    assert not folder.file_of(tmp_path / "kv", key).is_symlink()
    folder.file_of(tmp_path / "kv", key).unlink()
    folder.file_of(tmp_path / "kv", key).symlink_to(target)
    assert folder.delete(tier, key) is DELETED
    assert target.read_bytes() == kept


def test_a_folder_with_something_in_it_is_not_deleted(tmp_path: Path) -> None:
    tier, key = folder.open_tier(tmp_path), folder.fresh_key()
    folder.file_of(tmp_path, key).mkdir(parents=True)
    (folder.file_of(tmp_path, key) / "mine").write_text("mine")
    assert folder.get(tier, key, 5)[0] is DAMAGED
    assert folder.delete(tier, key) is FAILED
    assert folder.put(tier, key, b"value") is FAILED
    assert (folder.file_of(tmp_path, key) / "mine").read_text() == "mine"
    assert folder.temporary_files(tmp_path) == []
    assert folder.used(tier) == 0


def test_files_and_folders_deleted_underneath_are_missing(tmp_path: Path) -> None:
    tier, one, two = folder.open_tier(tmp_path), folder.fresh_key(), folder.fresh_key()
    for key in (one, two):
        assert folder.put(tier, key, b"value") is STORED
    folder.file_of(tmp_path, one).unlink()
    folder.file_of(tmp_path, two).unlink()
    folder.file_of(tmp_path, two).parent.rmdir()
    for key in (one, two):
        assert folder.contains(tier, key) is MISSING
        assert folder.get(tier, key, 5)[0] is MISSING
        assert folder.delete(tier, key) is MISSING
    assert folder.used(tier) == 10  # it cannot know
    assert list(tier.scan(deadline=folder.soon())) == []
    assert folder.used(tier) == 0  # now it does
    assert folder.put(tier, two, b"value") is STORED


def test_a_file_in_place_of_a_fan_out_folder_fails_the_call_with_a_hint(tmp_path: Path) -> None:
    tier, key = folder.open_tier(tmp_path), folder.fresh_key()
    folder.file_of(tmp_path, key).parent.write_text("mine")
    for call in (
        lambda: folder.contains(tier, key),
        lambda: folder.get(tier, key, 5),
        lambda: folder.put(tier, key, b"value"),
    ):
        with pytest.raises(TierError, match="Not a directory") as raised:
            call()
        assert "remove the" in raised.value.hint
