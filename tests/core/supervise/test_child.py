"""A supervised process: real ones, killed, hanging at their start, slow to stop."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvframework.api.process import SupervisedChild, start_connected
from tests.support.waiting import wait_until

MOST_S = 60.0
OF_EACH = 0.2


class Child(SupervisedChild):
    """Of the program beside; `kind` is how it behaves."""

    def __init__(self, kind: bytes, *, ready_s: float = MOST_S, stop_s: float = MOST_S) -> None:
        super().__init__("the program", thread="kvf-test", ready_s=ready_s, stop_s=stop_s)
        self.kind = kind
        self.want = True
        self.readies = 0
        self.said = b""
        self.kill_for = ""
        self.ends: list[str] = []
        self.sock: socket.socket | None = None

    def wanted(self) -> bool:
        return self.want

    def spawn(self) -> subprocess.Popen[bytes]:
        popen, self.sock = start_connected(__package__ + ".program")
        self.sock.sendall(self.kind)
        return popen

    def watch(self, poller: select.poll) -> float:
        poller.register(self.sock, select.POLLIN)  # type: ignore[arg-type]
        return time.monotonic() + OF_EACH

    def serve(self, happened: dict[int, int]) -> str | None:
        assert self.sock is not None
        if self.sock.fileno() in happened:
            data = self.sock.recv(100)
            if not data:
                return ""
            self.said += data
            if not self.is_ready:
                self.ready()
                self.readies += 1
        return self.kill_for or None

    def hang_up(self, popen: subprocess.Popen[bytes]) -> None:
        super().hang_up(popen)
        self.sock.close()

    def ended(self, why: str) -> None:
        assert self.pid is None
        self.ends.append(why)
        super().ended(why)

    def is_up(self) -> bool:
        return self.pid is not None and self.readies == self.starts


@contextmanager
def running(child: Child) -> Iterator[Child]:
    child.start()
    try:
        yield child
    finally:
        child.stop()
        assert child.join(MOST_S)
        assert child.pid is None
        assert child.ends[-1] == "", "the last call says that there will be no more"
        assert child.ends.count("") == 1


def lives(pid: int) -> Callable[[], bool]:
    return lambda: Path(f"/proc/{pid}").exists()


def test_a_killed_process_is_started_again_with_a_growing_delay(caplog: pytest.LogCaptureFixture) -> None:
    with running(Child(b"x")) as child:
        seen, between = set(), []
        for number in range(1, 4):
            wait_until(lambda number=number: child.is_up() and child.starts == number, MOST_S)  # type: ignore[misc]
            assert child.pid is not None
            seen.add(child.pid)
            os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda number=number: len(child.ends) == number, MOST_S)  # type: ignore[misc]
            between.append(child._machine.due - time.monotonic())
        assert len(seen) == 3
        assert child.last_error == "the program ended by signal SIGKILL"
        assert between[-1] > 0.1, "0.4 s after the third end"
    assert caplog.text.count("the program ended by signal SIGKILL") == 3


def test_a_process_that_hangs_at_its_start_is_killed_and_started_again() -> None:
    with running(Child(b"h", ready_s=0.5)) as child:
        wait_until(lambda: len(child.ends) == 2, MOST_S)
        assert set(child.ends) == {"the program was killed: not ready within 0.5 s"}


def test_a_process_that_stops_in_time_is_not_killed() -> None:
    with running(Child(b"x")) as child:
        wait_until(child.is_up, MOST_S)
        popen = child._popen
        assert popen is not None
    assert popen.returncode in (0, -signal.SIGTERM)


def test_a_process_that_does_not_stop_is_killed() -> None:
    with running(Child(b"s", stop_s=0.3)) as child:
        wait_until(child.is_up, MOST_S)
        popen = child._popen
        assert popen is not None
        began = time.monotonic()
    assert time.monotonic() - began >= 0.3
    assert popen.returncode == -signal.SIGKILL


def test_what_a_process_says_last_is_heard_before_its_end() -> None:
    with running(Child(b"x")) as child:
        wait_until(child.is_up, MOST_S)
        child.want = False
        child.sock.send(b"l")
        wait_until(lambda: child.ends, MOST_S)
        assert child.said == b"rl"
        assert child.ends == ["the program ended with status 3"]


def test_a_process_that_closes_its_connection_and_goes_on_is_ended() -> None:
    with running(Child(b"s")) as child:
        wait_until(child.is_up, MOST_S)
        child.want = False
        child.sock.send(b"c")
        wait_until(lambda: child.ends, MOST_S)
        assert child.ends == ["the program was killed: did not end"]


def test_its_owner_can_have_it_killed() -> None:
    with running(Child(b"x")) as child:
        wait_until(child.is_up, MOST_S)
        child.want = False
        child.kill_for = "the program was killed: nobody likes it"
        child.wake()
        wait_until(lambda: child.ends, MOST_S)
        assert child.ends == [child.kill_for]


def test_a_bug_of_its_owner_ends_the_process_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Child):
        def serve(self, happened: dict[int, int]) -> str | None:
            if self.starts == 1:
                raise ValueError("a bug")
            return super().serve(happened)

    with running(Wrong(b"x")) as child:
        wait_until(lambda: child.readies == 1, MOST_S)
        assert child.starts == 2
        assert child.ends == ["the connection to the program failed: a bug"]
    assert "Traceback" in caplog.text


def test_what_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", [*sys.path, object()])
        child = Child(b"x")
        child.start()
        wait_until(lambda: len(child.ends) == 2, MOST_S)
    assert child.ends[0].startswith("the program cannot be started: ")
    wait_until(child.is_up, MOST_S)
    child.stop()
    assert child.join(MOST_S)


def test_one_that_nobody_wants_has_no_process_until_somebody_does() -> None:
    child = Child(b"x")
    child.want = False
    with running(child):
        child.wake()
        assert child.starts == 0
        child.want = True
        child.wake()
        wait_until(child.is_up, MOST_S)


def test_it_can_be_stopped_before_it_is_started() -> None:
    child = Child(b"x")
    child.stop()
    assert child.join(0.0)


def test_a_process_ends_with_the_process_that_supervises_it() -> None:
    program = (
        "import time\n"
        f"from {__name__} import Child\n"
        "child = Child(b's')\n"
        "child.start()\n"
        "while not child.is_up(): time.sleep(0.01)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert lives(pid)()
        parent.kill()
    wait_until(lambda: not lives(pid)(), MOST_S)
