"""A copier process whose log is not read works and ends like any other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from kvf_devices.messages import Frames, Lost, Start, framed, from_copier
from kvframework.supervise.child import NamedCall
from tests.support.full_pipe import full_pipe


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
