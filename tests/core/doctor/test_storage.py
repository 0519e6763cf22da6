"""What the doctor tells of the memory of L1 and of the folder of a filesystem tier. It changes neither."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from kvf_filesystem.root import check_root, diagnose
from kvframework.api.plugin import ByteSize
from kvframework.errors import ConfigFieldError
from tests.core.doctor.tables import ask, levels
from tests.core.security.another_user import as_another_user
from tests.filesystem.folder import open_tier, options


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that others may enter, which they may not do with tmp_path."""
    with tempfile.TemporaryDirectory(prefix="kvf-doctor-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def refusal_for_anybody(path: Path) -> object:
    """The error of a user who is not root."""

    def work() -> object:
        try:
            check_root(options(path, capacity="1MiB"), where="[[l2]] #1")
        except ConfigFieldError as error:
            return error.fact
        return None

    return as_another_user(work) if os.geteuid() == 0 else work()


def test_a_folder_that_is_not_there_yet_is_ok_and_is_not_made(tmp_path: Path) -> None:
    found = ask("filesystem", path=str(tmp_path / "a" / "kv"), capacity="1MiB")
    assert levels(found) == {"plugin.usable": "ok", "filesystem.folder": "ok", "filesystem.space": "ok"}
    assert f"does not exist yet and will be made in {tmp_path}" in found["filesystem.folder"].fact
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_fails(shared: Path) -> None:
    shared.chmod(0o555)
    for path in (shared, shared / "kv"):
        assert refusal_for_anybody(path) == f"the folder {shared} is not writable"
    shared.chmod(0o755)


def test_what_is_no_folder_or_everybodys_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert "Not a directory" in ask("filesystem", path=str(file / "kv"))["config.field"].fact
    tmp_path.chmod(0o777)
    everybodys = ask("filesystem", path=str(tmp_path), capacity="1MiB")["config.field"]
    assert everybodys.level == "fail"
    assert "any user may write" in everybodys.fact


def test_the_disk_has_room_or_not(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    never = ask("filesystem", path=str(tmp_path), capacity=usage.total * 2)["filesystem.space"]
    assert (never.level, bool(never.advice)) == ("fail", True)
    table = msgspec.structs.replace(options(tmp_path / "kv"), capacity=ByteSize((usage.free + usage.total) // 2))
    assert diagnose(table)[1].level == "warn"


@pytest.mark.parametrize(
    ("held", "asked", "free"), [(False, False, False), (False, True, False), (True, False, False), (True, True, True)]
)
def test_a_folder_that_a_server_has_locked(*, held: bool, asked: bool, free: bool, tmp_path: Path) -> None:
    """`held` and `asked` say whether the server and the table share the folder."""
    folder = str(tmp_path / "kv")
    tier = open_tier(tmp_path / "kv", capacity="1MiB", shared=held)
    before = sorted(tmp_path.rglob("*"))
    usable = {"plugin.usable": "ok", "filesystem.folder": "ok", "filesystem.space": "ok"}
    found = ask("filesystem", path=folder, capacity="1MiB", shared=asked)
    assert levels(found) == (usable if free else {"config.field": "fail"})
    if not free:
        assert found["config.field"].fact == f"another server uses the folder {folder}, process {os.getpid()}"
    replacing = ask("filesystem", path=folder, capacity="1MiB", shared=asked, replaces=os.getpid())
    assert levels(replacing) == usable
    assert sorted(tmp_path.rglob("*")) == before
    tier.close()
    assert levels(ask("filesystem", path=folder, capacity="1MiB", shared=asked)) == usable


def test_the_check_of_a_folder_takes_no_lock(tmp_path: Path) -> None:
    """For a moment it would refuse a server that starts."""
    open_tier(tmp_path / "kv", capacity="1MiB").close()
    with mock.patch("fcntl.flock", side_effect=AssertionError):
        check_root(options(tmp_path / "kv", capacity="1MiB"), where="[[l2]] #1")
