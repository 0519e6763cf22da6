"""What the doctor says of the memory that `kvframework hold` keeps."""

from __future__ import annotations

import select
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.doctor.memory import kept
from kvframework.keeper.control import ControlSocket
from kvframework.keeper.place import CONTROL_SUFFIX


@pytest.fixture
def socket() -> Iterator[Path]:
    # Socket paths are short, so not below pytest's long tmp_path.
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        yield Path(folder) / "s.sock"


def answer_once(control: ControlSocket, reply: dict[str, object]) -> None:
    while True:
        poll = select.poll()
        control.register(poll)
        poll.poll()
        for caller, _ in control.requests(time.monotonic()):
            control.reply(caller, reply)
            return


@pytest.mark.parametrize(
    ("server", "nbytes", "level"), [({"pid": 8}, 1 << 20, "ok"), (None, 1 << 20, "warn"), (None, 0, "ok")]
)
def test_kept_memory_without_a_server_is_worth_a_look(
    socket: Path, server: dict[str, object] | None, nbytes: int, level: str
) -> None:
    control = ControlSocket(f"{socket}{CONTROL_SUFFIX}")
    reply = {"done": True, "pid": 7, "server": server, "held": [{"name": "kvf-arena", "size": 1, "bytes": nbytes}]}
    thread = threading.Thread(target=answer_once, args=(control, reply))
    thread.start()
    (finding,) = kept(f"ipc://{socket}")
    thread.join()
    control.close()
    assert finding.level == level
    assert finding.fact.startswith("`kvframework hold`, process 7, keeps ")
    # Its server may wait for a corrected configuration: freeing L1 is not the first thing to do.
    assert ("its log says why" in finding.advice) == (level == "warn")


def test_nothing_is_said_where_no_keeper_runs(socket: Path) -> None:
    assert list(kept(f"ipc://{socket}")) == []
