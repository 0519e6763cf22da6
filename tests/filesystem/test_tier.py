"""The filesystem tier: the contract, the folder that it takes, and the files that it makes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvf_dev.testing import TierConformance
from kvf_dev.testing.tier.capacity import CapacityTests, ListingTests
from kvf_dev.testing.tier.contract import ContractTests
from kvf_filesystem.form import FOLDERS, LARGE, counted_bytes, file_bytes, key_of, value_bytes
from kvf_filesystem.reading import move, trimmed
from kvf_filesystem.root import MARKER
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import Outcome, PackedKey, Tier
from kvframework.errors import ConfigFieldError
from tests.filesystem.folder import (
    contains,
    file_of,
    files,
    fresh_key,
    get,
    open_files,
    open_tier,
    options,
    put,
    soon,
    used,
)

FOUND, MISSING, STORED, FAILED = Outcome.FOUND, Outcome.MISSING, Outcome.STORED, Outcome.FAILED


class TestSharedFolder(TierConformance):
    use = "filesystem"
    capacity_options = {"capacity": "16MiB"}  # noqa: RUF012

    @pytest.fixture
    def tier_options(self, tmp_path: Path) -> Mapping[str, object]:
        return {"path": str(tmp_path / "kv"), "shared": True}

    def damage(self, tier: Tier, key: PackedKey) -> None:
        os.truncate(file_of(Path(str(self._tier_options["path"])), key), 10)


class TestFolderOfItsOwn(ContractTests, CapacityTests, ListingTests):
    """What is not as in a shared folder. `TestSharedFolder` runs the whole kit."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = open_tier(tmp_path / "kv")
        yield tier
        tier.close()

    @pytest.fixture
    def small_tier(self, tmp_path: Path) -> Tier:
        return self.closed_later(open_tier(tmp_path / "small", capacity="16MiB"))

    def reopen(self, tier: Tier) -> Tier:
        tier.close()
        return open_tier(tier._where.rpartition(": ")[2])  # type: ignore[attr-defined]


# The folder


def test_a_missing_folder_is_made_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    tier = open_tier(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    key = fresh_key()
    assert put(tier, key, b"value") is STORED
    assert stat.S_IMODE(file_of(folder, key).stat().st_mode) == 0o600
    assert stat.S_IMODE(file_of(folder, key).parent.stat().st_mode) == 0o700
    tier.close()
    assert open_files(tmp_path) == []


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(ConfigFieldError, match="Not a directory") as raised:
        open_tier(tmp_path / "kv")
    assert raised.value.where == "[[l2]] #1.path"
    assert (tmp_path / "kv").read_text() == "mine"


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/kv"])
def test_a_path_that_names_no_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigFieldError, match="does not name a folder") as raised:
        open_tier(Path(path))
    assert raised.value.where == "[[l2]] #1.path"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_others_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_text("mine")
    with pytest.raises(ConfigFieldError, match="contains files that this tier did not write"):
        open_tier(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]
    assert open_files(tmp_path) == []


def test_a_new_file_system_is_no_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    open_tier(tmp_path).close()
    (tmp_path / "something").write_text("put here later")
    open_tier(tmp_path).close()


@pytest.mark.parametrize("torn", [b"", b"kvframework file"])
def test_a_torn_marker_is_mended(tmp_path: Path, torn: bytes) -> None:
    open_tier(tmp_path).close()
    whole = (tmp_path / MARKER).read_bytes()
    (tmp_path / MARKER).write_bytes(torn)
    open_tier(tmp_path).close()
    assert (tmp_path / MARKER).read_bytes() == whole


@pytest.mark.parametrize("other", [b"kvframework filesystem tier, format 2\n", b"\xff\xfe"])
def test_another_format_is_refused(tmp_path: Path, other: bytes) -> None:
    (tmp_path / MARKER).write_bytes(other)
    with pytest.raises(ConfigFieldError, match="another format"):
        open_tier(tmp_path)
    assert (tmp_path / MARKER).read_bytes() == other
    assert open_files(tmp_path) == []


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_a_second_server_is_refused_unless_both_share(tmp_path: Path, first: bool, second: bool) -> None:
    tier = open_tier(tmp_path, shared=first)
    with pytest.raises(ConfigFieldError, match="another server uses the folder") as raised:
        open_tier(tmp_path, shared=second)
    assert "shared = true" in raised.value.hint
    tier.close()
    open_tier(tmp_path, shared=second).close()
    assert open_files(tmp_path) == []


def test_a_relative_path_is_kept_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tier, key = open_tier("kv"), fresh_key()
    monkeypatch.chdir("/")
    assert put(tier, key, b"value") is STORED
    assert file_of(tmp_path / "kv", key).exists()
    (tmp_path / "kv").rename(tmp_path / "renamed")
    assert get(tier, key, 5) == (FOUND, b"value")


def test_options_have_bounds() -> None:
    for table in (
        {"path": ""},
        {"capacity": 0},
        {"fsync": "maybe"},
        {"direct": True},
        {"recount_s": 0},
        {"fan_out": 2},
    ):
        with pytest.raises((ValueError, msgspec.ValidationError)):
            options(**{"path": "kv", **table})  # type: ignore[arg-type]


# Files


def test_keys_of_one_model_are_spread_over_the_folders(tmp_path: Path) -> None:
    tier, prefix = open_tier(tmp_path), os.urandom(40)
    keys = [prefix + os.urandom(32) for _ in range(400)]
    assert set(tier.put(keys, [[] for _ in keys], deadline=soon())) == {STORED}
    folders = {path.parent.name for path in files(tmp_path)}
    assert len(folders) > 150
    assert {key_of(int(path.parent.name, 16), path.name) for path in files(tmp_path)} == set(keys)


def test_a_key_of_another_length_is_an_error(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(ValueError, match="72 bytes"):
        contains(tier, b"short")


@given(st.integers(0, 1 << 45))
@example(LARGE - 1)
@example(LARGE)
def test_a_files_size_tells_its_values_size(nbytes: int) -> None:
    assert value_bytes(file_bytes(nbytes)) == counted_bytes(file_bytes(nbytes)) == nbytes


@given(st.integers(0, 3 * LARGE))
def test_no_size_of_a_file_is_counted_as_more_than_it_is(size: int) -> None:
    assert 0 <= counted_bytes(size) <= size
    nbytes = value_bytes(size)
    assert nbytes is None or file_bytes(nbytes) == size


@given(st.integers(0, 300), st.text(alphabet="0123456789abcdefABCDEF.", max_size=150))
@example(0, "00" * PACKED_KEY_BYTES)
@example(1, "00" * PACKED_KEY_BYTES)
@example(0, "0" * (2 * PACKED_KEY_BYTES - 2) + "\u0660\u0660")
def test_only_names_of_ours_are_keys(folder: int, name: str) -> None:
    key = key_of(folder % FOLDERS, name)
    assert key is None or (key.hex() == name and key[-1] == folder % FOLDERS)


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(0, 60))
def test_moving_puts_the_bytes_in_order(parts: list[bytes], most: int) -> None:
    written = bytearray()

    def take_some(_fd: int, views: list[memoryview], offset: int) -> int:  # as a kernel that is short of something
        assert offset == 7 + len(written)
        taken = b"".join(views)[: most + 1]
        written.extend(taken)
        return len(taken)

    value = b"".join(parts)
    views = [memoryview(part) for part in parts]
    assert move(take_some, 0, views, lambda: None, offset=7, enough=len(value)) == len(value)  # type: ignore[arg-type]
    assert bytes(written) == value
    assert b"".join(trimmed(views, most)) == value[:most]


# What is on the disk before a put returns


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("none", ["rename"]), ("data", ["fdatasync file", "rename"]), ("full", ["fsync file", "rename", "fsync folder"])],
)
def test_the_fsync_policy(tmp_path: Path, policy: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tier, key = open_tier(tmp_path, fsync=policy), fresh_key()
    assert put(tier, key, b"its folder is there from now on") is STORED
    done: list[str] = []

    def recorded(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            kind = ""
            if name != "rename":
                kind = " folder" if stat.S_ISDIR(os.fstat(args[0]).st_mode) else " file"  # type: ignore[arg-type]
            done.append(name + kind)
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "fdatasync", "rename"):
        recorded(name)
    assert put(tier, key, b"value") is STORED
    assert done == expected


def test_a_restart_finds_everything_and_leaves_files_of_others(tmp_path: Path) -> None:
    tier, keys = open_tier(tmp_path), [fresh_key() for _ in range(50)]
    values = [os.urandom(index * 100) for index in range(len(keys))]
    for key, value in zip(keys, values, strict=True):
        assert put(tier, key, value) is STORED
    tier.close()
    folder = file_of(tmp_path, keys[0]).parent
    others = [folder / "notes.txt", folder / (keys[0].hex() + "~"), folder / ".nfs0001", tmp_path / "README"]
    others.append(folder / f"{'00' * 71}{(keys[0][-1] + 1) % 256:02x}")  # of another folder
    for path in others:
        path.write_text("not the tier's")
    tier = open_tier(tmp_path)
    assert used(tier) == sum(len(value) for value in values)
    entries = {entry.key: entry.nbytes for entry in tier.scan(deadline=soon())}
    assert entries == {key: len(value) for key, value in zip(keys, values, strict=True)}
    for key, value in zip(keys, values, strict=True):
        assert get(tier, key, len(value)) == (FOUND, value)
    tier.close()
    assert all(path.read_text() == "not the tier's" for path in others)
