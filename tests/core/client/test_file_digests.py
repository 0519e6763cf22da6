"""Names of files by all their bytes: what is remembered, and when that is not believed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvframework.client import file_digests
from kvframework.client.file_digests import FILE_NAME, DigestMemory, FileDigest, FileState, Progress
from tests.support.waiting import wait_until


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    return DigestMemory(tmp_path / "cache" / "kvframework")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the files that are read, not remembered."""
    names: list[str] = []
    real = file_digests._read

    def counted(path: Path, told: Progress) -> tuple[FileState, str, float]:
        names.append(path.name)
        return real(path, told)

    monkeypatch.setattr(file_digests, "_read", counted)
    return names


@pytest.fixture
def rested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this test count as old from the moment they are written."""
    monkeypatch.setattr(file_digests, "REST_S", -60.0)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def digest(path: Path, memory: DigestMemory) -> FileDigest:
    return file_digests.digest_files([path], memory)[path]


def expected(content: bytes) -> FileDigest:
    return FileDigest(len(content), xxhash.xxh3_128(content).hexdigest())


def test_every_byte_of_a_file_of_many_reads_counts(tmp_path: Path, memory: DigestMemory) -> None:
    content = bytearray(os.urandom((8 << 20) * 2 + 77))
    path = write(tmp_path / "a", bytes(content))
    assert digest(path, memory) == expected(bytes(content))
    content[(8 << 20) + 5] ^= 1
    assert digest(write(path, bytes(content)), memory) == expected(bytes(content))


def test_files_come_in_the_order_given_and_links_are_what_they_point_to(tmp_path: Path, memory: DigestMemory) -> None:
    paths = [write(tmp_path / name, name.encode() * 3) for name in "cab"]
    link = tmp_path / "link"
    link.symlink_to(paths[0])
    found = file_digests.digest_files([*paths, link], memory)
    assert list(found) == [*paths, link]
    assert found[link] == found[paths[0]] == expected(b"ccc")
    with pytest.raises(OSError, match="gone"):
        file_digests.digest_files([tmp_path / "gone"], memory)


@pytest.mark.usefixtures("rested")
def test_a_file_is_read_once_and_again_after_any_change(tmp_path: Path, memory: DigestMemory, read: list[str]) -> None:
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


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, memory: DigestMemory, read: list[str]) -> None:
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
    tmp_path: Path, memory: DigestMemory, read: list[str]
) -> None:
    first, second = write(tmp_path / "a", b"a"), write(tmp_path / "b", b"b")
    for path in (first, second, first, second):
        digest(path, memory)
    assert read == ["a", "b"]
    folder = tmp_path / "cache" / "kvframework"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.iterdir()) == [FILE_NAME, "file-digests.lock"]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _version(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"version":1', b'"version":9'))


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "no JSON": lambda file: file.write_bytes(b"\xff\x00" * 50),
    "other JSON": lambda file: file.write_bytes(b'{"version":1,"entries":[[1,2]]}'),
    "endless": lambda file: os.truncate(file, 1 << 40),
    "of another version": _version,
    "written by others": lambda file: file.chmod(0o666),
    "a link": _link,
}


@pytest.mark.usefixtures("rested")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_memory_costs_reading_and_a_line_and_is_mended(
    damage: Callable[[Path], object],
    tmp_path: Path,
    memory: DigestMemory,
    read: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write(tmp_path / "a", b"one")
    digest(path, memory)
    damage(tmp_path / "cache" / "kvframework" / FILE_NAME)
    assert digest(path, memory) == expected(b"one")
    assert read == ["a", "a"]
    assert "not used" in caplog.text
    assert digest(path, memory) == expected(b"one")
    assert read == ["a", "a"]


def test_without_a_directory_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a", b"one")
    assert digest(path, DigestMemory(None)) == expected(b"one")
    assert digest(path, DigestMemory(write(tmp_path / "file", b""))) == expected(b"one")
    assert "without a lock" in caplog.text


def test_the_users_memory_lies_in_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(file_digests, "REST_S", -60.0)
    path = write(tmp_path / "a", b"one")
    file_digests.digest_files([path])
    assert list(DigestMemory(tmp_path / "kvframework").load().values()) == [expected(b"one").digest]


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, memory: DigestMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", b"one")
    replacements = [b"two"]

    def replace(_self: Progress, _nbytes: int) -> None:
        if replacements:
            write(tmp_path / "new", replacements.pop()).replace(path)

    monkeypatch.setattr(Progress, "add", replace)
    assert digest(path, memory) == expected(b"two")
    replacements += [b"x", b"xx", b"xxx"]
    with pytest.raises(OSError, match="was changed"):
        digest(path, memory)


CHILD = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from kvframework.client import file_digests
from kvframework.client.file_digests import DigestMemory
def refuse(*_):
    raise AssertionError("read what another process was reading")
if sys.argv[1] == "waits":
    file_digests._read = refuse
path = Path(sys.argv[3])
print(file_digests.digest_files([path], DigestMemory(Path(sys.argv[2])))[path].digest)
"""


def child(kind: str, tmp_path: Path, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, kind, str(tmp_path / "cache" / "kvframework"), str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("rested")
def test_a_process_waits_for_what_another_reads_and_a_killed_one_holds_nobody(
    tmp_path: Path, memory: DigestMemory
) -> None:
    path = write(tmp_path / "a", b"one")
    with memory.lock(until=lambda: False):
        waiting, patient = child("waits", tmp_path, path), child("reads", tmp_path, path)
        for process in (waiting, patient):
            assert process.stderr is not None
            assert "another process reads" in process.stderr.readline()
        patient.kill()
        patient.communicate()
        memory.remember({FileState.of(path): expected(b"one").digest})
        # It need not have the lock to see what was found.
        found, errors = waiting.communicate(timeout=240)
    assert found.strip() == expected(b"one").digest, errors
    with memory.lock(until=lambda: False):
        pass


def test_the_lock_is_held_by_one_at_a_time(memory: DigestMemory) -> None:
    order: list[str] = []

    def never() -> bool:
        order.append("asked")
        return False

    def second() -> None:
        with memory.lock(until=never):
            order.append("second")

    with memory.lock(until=lambda: False):
        thread = threading.Thread(target=second)
        thread.start()
        wait_until(lambda: order.count("asked") >= 2)
        order.append("first")
    thread.join(30)
    assert order.index("first") < order.index("second")


def test_a_holder_that_never_ends_is_not_waited_for_forever(
    tmp_path: Path, memory: DigestMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "_PATIENCE_S", 0.05)
    with memory.lock(until=lambda: False):
        assert digest(write(tmp_path / "a", b"one"), memory) == expected(b"one")


def test_what_killed_writers_left_is_removed_after_an_hour(tmp_path: Path, memory: DigestMemory) -> None:
    with memory.lock(until=lambda: False):
        folder = tmp_path / "cache" / "kvframework"
        old, new = write(folder / f"{FILE_NAME}.0a", b""), write(folder / f"{FILE_NAME}.0b", b"")
        os.utime(old, (time.time() - 7200,) * 2)
        memory.remember({FileState("p", 1, 2, 3, 4): "d"})
    assert (old.exists(), new.exists()) == (False, True)


def test_long_reads_tell_how_far_they_are(
    tmp_path: Path, memory: DigestMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path / "a", b"x" * 1000)
    digest(path, memory)
    assert not caplog.records
    monkeypatch.setattr(file_digests, "_WORTH_TELLING", 0)
    monkeypatch.setattr(file_digests, "_EVERY_S", 0.0)
    digest(path, memory)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["reading"] * 3
    assert "GB/s" in caplog.text
