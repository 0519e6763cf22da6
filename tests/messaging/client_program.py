"""A client process for the tests: connects, does one thing, says so on stdout, and stays until it is killed."""

from __future__ import annotations

import faulthandler
import mmap
import os
import sys
import time

from kvframework.errors import ServerGone
from kvframework.wire.messages import HelloReply
from tests.messaging.lab import ask, connected


def main(endpoint: str, deed: str) -> None:
    faulthandler.dump_traceback_later(10)
    arenas: list[mmap.mmap] = []

    def on_up(reply: HelloReply, fd: int | None) -> None:
        if fd is not None:
            arenas.append(mmap.mmap(fd, 0))
            os.close(fd)

    with connected(endpoint, on_up=on_up) as connection:
        if deed == "write":
            arenas[0][100:105] = b"hello"
        elif deed == "defer":
            ask(connection, "DEFERRED", "left behind")
        elif deed == "fork":
            child = os.fork()
            if child == 0:
                in_the_child(connection)
            print(child, end=" ")
        assert ask(connection, "ECHO", "on").result(5).text == "on"
        print("done", flush=True)
        time.sleep(600)


def in_the_child(connection) -> None:
    """A fork that lives on: the parent's connection is of no use to it, and it says so instead of hanging."""
    assert connection.state == "down"
    assert not connection.wait_up(5)
    assert isinstance(ask(connection, "ECHO").exception(), ServerGone)
    connection.close()
    print("child", end=" ", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
