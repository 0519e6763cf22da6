"""How much of the arena may be used while several threads pin it. A copier process whose log is not read works and ends
like any other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from kvf_devices.copier import THREADS, Pinning
from kvf_devices.messages import Frames, Lost, Start, framed, from_copier
from kvframework.errors import DeviceError
from kvframework.supervise.child import NamedCall
from tests.support.full_pipe import full_pipe

SLICE = 4
SIZE = 2 * THREADS * SLICE - 1
STUCK_S = 20.0


class Pins:
    """Its slices are pinned at the same moment, as many as there are threads; from `fails_at` on none is."""

    def __init__(self, fails_at: int = SIZE) -> None:
        self.pinned: list[tuple[int, int]] = []
        self._fails_at = fails_at
        self._together = threading.Barrier(THREADS)

    def pin(self, offset: int, nbytes: int) -> None:
        self._together.wait(STUCK_S)
        if offset >= self._fails_at:
            raise DeviceError("no more memory may be locked")
        self.pinned.append((offset, nbytes))


def pin_all(driver: Pins) -> Pinning:
    made = Pinning(driver, SIZE, SLICE)  # type: ignore[arg-type]
    made._run()
    return made


def test_every_byte_is_pinned_once() -> None:
    driver = Pins()
    assert pin_all(driver).usable() == SIZE
    ends = [0, *(offset + nbytes for offset, nbytes in sorted(driver.pinned))]
    assert [offset for offset, _ in sorted(driver.pinned)] == ends[:-1]
    assert ends[-1] == SIZE


def test_what_lies_before_a_slice_that_failed_is_usable() -> None:
    made = pin_all(Pins(fails_at=5 * SLICE))
    assert made.usable() == 5 * SLICE
    with pytest.raises(DeviceError, match="no more memory may be locked"):
        made.check()


def test_a_copier_that_fails_says_so_although_its_log_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    arena = os.memfd_create("arena")
    program = "import sys; from kvf_devices.copier import main; sys.exit(main(sys.argv[1:]))"
    with ours, full_pipe() as (_, writer):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), str(arena)],
            pass_fds=(theirs.fileno(), arena),
            stdout=writer,
            stderr=writer,
        )
        theirs.close()
        os.close(arena)
        try:
            ours.settimeout(30)
            ours.sendall(framed(Start(NamedCall("no_such_module:create", "no_such_module:Options", b""), "gpu-0")))
            frames, said = Frames(), []
            while not said:
                said = [from_copier(payload) for payload in frames.feed(ours.recv(1 << 16))]
            assert isinstance(said[0], Lost)
            assert "no_such_module" in said[0].failure.error().fact
            assert process.wait(60) == 1
        finally:
            process.kill()
            process.wait()
