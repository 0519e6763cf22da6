"""Names of files by all their bytes: what is remembered, and when that is not believed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvframework.client import identity
from kvframework.client.identity import FILE_NAME, FileDigest, FileState, digest_files, load_digests


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kvframework"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the files that are read, not remembered."""
    names: list[str] = []
    real = identity._read

    def counted(path: Path) -> tuple[FileState, str, float]:
        names.append(path.name)
        return real(path)

    monkeypatch.setattr(identity, "_read", counted)
    return names


@pytest.fixture
def rested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this test count as old from the moment they are written."""
    monkeypatch.setattr(identity, "REST_S", -60.0)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def digest(path: Path, memory: Path) -> FileDigest:
    return digest_files([path], memory)[path]


def expected(content: bytes) -> FileDigest:
    return FileDigest(len(content), xxhash.xxh3_128(content).hexdigest())


def test_every_byte_of_a_file_of_many_reads_counts(tmp_path: Path, memory: Path) -> None:
    content = bytearray(os.urandom((8 << 20) * 2 + 77))
    path = write(tmp_path / "a", bytes(content))
    assert digest(path, memory) == expected(bytes(content))
    content[(8 << 20) + 5] ^= 1
    assert digest(write(path, bytes(content)), memory) == expected(bytes(content))


def test_files_come_in_the_order_given_and_links_are_what_they_point_to(tmp_path: Path, memory: Path) -> None:
    paths = [write(tmp_path / name, name.encode() * 3) for name in "cab"]
    link = tmp_path / "link"
    link.symlink_to(paths[0])
    found = digest_files([*paths, link], memory)
    assert list(found) == [*paths, link]
    assert found[link] == found[paths[0]] == expected(b"ccc")
    with pytest.raises(OSError, match="gone"):
        digest_files([tmp_path / "gone"], memory)


@pytest.mark.usefixtures("rested")
def test_a_file_is_read_once_and_again_after_any_change(tmp_path: Path, memory: Path, read: list[str]) -> None:
    path = write(tmp_path / "a", b"one")
    assert digest(path, memory) == digest(path, memory) == expected(b"one")
    assert read == ["a"]
    # In place, of the same size, and with the mtime set back: only the ctime tells.
    before = path.stat()
    write(path, b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest(path, memory) == expected(b"two")
    # Replaced by another file, through the link too, as when a hub's snapshot moves on.
    link = tmp_path / "link"
    link.symlink_to(path)
    assert digest(link, memory) == expected(b"two")
    assert read == ["a", "a"]
    link.unlink()
    link.symlink_to(write(tmp_path / "b", b"six"))
    assert digest(link, memory) == expected(b"six")


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, memory: Path, read: list[str]) -> None:
    """It may be written again within the granularity of its times."""
    path = write(tmp_path / "a", b"one")
    assert digest(path, memory) == digest(path, memory) == expected(b"one")
    assert read == ["a", "a"]


times = st.integers(0, 2_000_000_000_000_000_000)


@given(mtime=times, ctime=times, now=times)
def test_a_file_has_rested_when_a_later_change_must_get_another_time(mtime: int, ctime: int, now: int) -> None:
    state = FileState("p", 1, 1, mtime, ctime)
    if state.rested(now / 1e9):
        granularity_ns = 2_000_000_000
        assert now - max(mtime, ctime) > granularity_ns


@pytest.mark.usefixtures("rested")
def test_what_is_remembered_is_private_and_kept_beside_what_others_remembered(
    tmp_path: Path, memory: Path, read: list[str]
) -> None:
    first, second = write(tmp_path / "a", b"a"), write(tmp_path / "b", b"b")
    for path in (first, second, first, second):
        digest(path, memory)
    assert read == ["a", "b"]
    assert memory.stat().st_mode & 0o777 == 0o700
    assert (memory / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in memory.iterdir()] == [FILE_NAME]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _version(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"version":2', b'"version":9'))


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "no JSON": lambda file: file.write_bytes(b"\xff\x00" * 50),
    "other JSON": lambda file: file.write_bytes(b'{"version":2,"entries":[[1,2]]}'),
    "endless": lambda file: os.truncate(file, 1 << 40),
    "of another version": _version,
    "written by others": lambda file: file.chmod(0o666),
    "a link": _link,
}


@pytest.mark.usefixtures("rested")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_memory_costs_reading_and_a_line_and_is_mended(
    damage: Callable[[Path], object], tmp_path: Path, memory: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a", b"one")
    digest(path, memory)
    damage(memory / FILE_NAME)
    assert digest(path, memory) == expected(b"one")
    assert read == ["a", "a"]
    assert "not used" in caplog.text
    assert digest(path, memory) == expected(b"one")
    assert read == ["a", "a"]


@pytest.mark.usefixtures("rested")
def test_without_a_directory_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a", b"one")
    assert digest(path, write(tmp_path / "file", b"")) == expected(b"one")
    assert "cannot be cached" in caplog.text


def test_the_users_memory_lies_in_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(identity, "REST_S", -60.0)
    path = write(tmp_path / "a", b"one")
    digest_files([path])
    assert list(load_digests(tmp_path / "kvframework").values()) == [expected(b"one").digest]


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", b"one")
    replacements = [b"two"]
    opened = Path.open

    def replaced(self: Path, *arguments: Any, **options: Any) -> Any:
        file = opened(self, *arguments, **options)
        if self == path and replacements:
            write(tmp_path / "new", replacements.pop()).replace(path)
        return file

    monkeypatch.setattr(Path, "open", replaced)
    assert digest(path, memory) == expected(b"two")
    replacements += [b"x", b"xx", b"xxx"]
    with pytest.raises(OSError, match="was changed"):
        digest(path, memory)
