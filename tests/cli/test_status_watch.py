"""`kvframework status --watch`: through a restart of the server, until Ctrl-C."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cli.command import COMMAND, environment
from tests.support.server_process import ServerProcess
from tests.support.waiting import wait_until


@contextmanager
def watching(endpoint: str, *arguments: str, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [*COMMAND, "status", "--watch", "--interval", "0.1", "--timeout", "0.5", "--endpoint", endpoint]
    process = subprocess.Popen([*command, *arguments], env=environment(), **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_json_is_one_document_a_line_through_a_restart(number: signal.Signals) -> None:
    with ServerProcess() as server:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with watching(server.endpoint, "--json", **streams) as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            assert first["server"]["pid"] == server.pid
            server.kill9()
            # Engines would refuse a server that cuts otherwise; somebody who looks must not.
            server.set("server.chunk_size=512")
            server.start()
            document = first
            while document["server"]["pid"] != server.pid:
                document = json.loads(process.stdout.readline())
            assert document["server"]["chunk_size"] == 512
            process.send_signal(number)
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0
            assert b"Traceback" not in errors


class Terminal:
    """A terminal of 100 columns, read by a thread into `shown`."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.shown = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_exc: object) -> None:
        os.close(self.slave)
        self._thread.join(10)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the last writer has closed it
                return


def test_on_a_terminal_it_waits_for_the_server_and_leaves_the_cursor_visible() -> None:
    with ServerProcess() as server, Terminal() as terminal:
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
        with watching(server.endpoint, **ends) as process:
            wait_until(lambda: f"(pid {server.pid})" in terminal.shown, what="the first picture")
            server.kill9()
            wait_until(lambda: "waiting for a server at" in terminal.shown, what="the notice")
            server.start()
            wait_until(lambda: f"(pid {server.pid})" in terminal.shown, what="the server's return")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        wait_until(lambda: terminal.shown.rstrip().endswith("\x1b[?25h"), what="the cursor")
        assert "Traceback" not in terminal.shown
        assert "lost the server" not in terminal.shown, "a log line would break the picture"


def test_for_people_in_a_pipe_every_picture_is_printed() -> None:
    with ServerProcess() as server, watching(server.endpoint, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().decode() for _ in range(9)]
        assert sum("L1 0 B of 64.0 MiB" in line for line in lines) >= 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_the_interval_is_bounded() -> None:
    done = subprocess.run([*COMMAND, "status", "--watch", "--interval", "0"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"--interval" in done.stderr
