"""What the doctor says of the memory that `kvframework hold` keeps."""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.doctor.checkup import examine, kept
from kvframework.keeper.sockets import CONTROL_SUFFIX, KeeperSocket, reply
from tests.core.cli.command import run


@pytest.fixture
def socket() -> Iterator[Path]:
    # Socket paths are short, so not below pytest's long tmp_path.
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        yield Path(folder) / "s.sock"


def answer(control: KeeperSocket, document: dict[str, object], ending: int) -> None:
    while True:
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(ending, select.POLLIN)
        if ending in dict(poll.poll()):
            return
        received = control.receive()
        if received is not None and received.fd is not None:
            reply(received.fd, document)


@contextlib.contextmanager
def keeping(socket: Path, server: dict[str, object] | None, nbytes: int) -> Iterator[None]:
    """A keeper with this server and an arena with so many bytes of memory."""
    control, ending = KeeperSocket(f"{socket}{CONTROL_SUFFIX}"), os.eventfd(0)
    held = [{"name": "kvf-arena", "size": 1, "bytes": nbytes}]
    thread = threading.Thread(
        target=answer, args=(control, {"done": True, "pid": 7, "server": server, "held": held}, ending)
    )
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(ending, 1)
        thread.join()
        control.close()
        os.close(ending)


@pytest.mark.parametrize(
    ("server", "nbytes", "level"), [({"pid": 8}, 1 << 20, "ok"), (None, 1 << 20, "warn"), (None, 0, "ok")]
)
def test_kept_memory_without_a_server_is_worth_a_look(
    socket: Path, server: dict[str, object] | None, nbytes: int, level: str
) -> None:
    with keeping(socket, server, nbytes):
        (finding,) = kept(f"ipc://{socket}")
    assert finding.level == level
    assert finding.fact.startswith("`kvframework hold`, process 7, holds ")
    # Its server may wait for a corrected configuration: freeing L1 is not the first thing to do.
    assert ("see the log of `kvframework hold`; `kvframework hold --drop` frees" in finding.advice) == (level == "warn")


def test_nothing_is_said_where_no_keeper_runs(socket: Path) -> None:
    assert list(kept(f"ipc://{socket}")) == []


def test_what_is_kept_needs_no_room_beside_itself(socket: Path) -> None:
    """As `serve`: the next server has it, or frees it."""
    settings = [f"server.endpoint=ipc://{socket}", "l1.capacity=900TiB"]
    for held in (False, True):
        with keeping(socket, None, 1 << 20) if held else contextlib.nullcontext():
            checked = run("config", "check", *(word for setting in settings for word in ("--set", setting)))
            found = [each for each in examine(overrides=settings).findings if "does not fit" in each.fact]
        assert (checked.returncode, len(found)) == ((0, 0) if held else (2, 1)), checked.stderr
