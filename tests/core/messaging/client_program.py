"""A client process for the tests: connects, does one thing, says so on stdout, and stays until it is killed."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time

from kvframework.errors import ServerGone
from kvframework.messaging.client.connection import Connection
from kvframework.wire.messages import HelloReply
from tests.core.messaging.lab import ask, connected


def main(endpoint: str, deed: str) -> None:
    arenas: list[mmap.mmap] = []
    word = "done"

    def on_up(reply: HelloReply, fd: int | None) -> None:
        if fd is not None:
            arenas.append(mmap.mmap(fd, 0))
            os.close(fd)

    with connected(endpoint, on_up=on_up) as connection:
        if deed == "write":
            arenas[0][100:105] = b"hello"
        elif deed == "defer":
            ask(connection, "DEFERRED", "left behind")
        elif deed == "fork from C":
            word = f"{fork_from_c()} forked"
        elif deed == "fork":
            word = f"{fork(connection)} forked"
        assert ask(connection, "ECHO", "on").result(20).payload.text == "on"
        sys.stdout.write(f"{word}\n")
        sys.stdout.flush()
        time.sleep(600)


def fork_from_c() -> int:
    """A child that no hook of Python's knows of: it has copies of all descriptors, and never ends by itself."""
    c = ctypes.PyDLL(None)
    child = int(c.fork())
    while child == 0:
        c.pause()
    return child


def fork(connection: Connection) -> int:
    """Forks a child that lives on, once that has seen that its parent's connection is of no use to it."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        assert connection.state == "down"
        assert not connection.wait_up(5)
        assert isinstance(ask(connection, "ECHO").exception(), ServerGone)
        connection.close()
        os.write(told, b"ok")
        time.sleep(600)
    os.close(told)
    assert os.read(heard, 2) == b"ok"
    return child


if __name__ == "__main__":
    main(*sys.argv[1:])
