"""Strangers in a process of their own: opens connections, says how many, and holds them until its input ends.

Usage: crowd_program.py (ipc PATH | tcp HOST PORT [FROM ...]) COUNT SECONDS. FROM are the addresses that the connections
come from, one after the other; without any: from a thousand."""

from __future__ import annotations

import resource
import socket
import sys
import time
from collections.abc import Callable
from itertools import cycle


def main(kind: str, *words: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connect = over_ipc(words[0]) if kind == "ipc" else over_tcp(*words)
    count, seconds = words[-2:]
    until = time.monotonic() + float(seconds)
    held = []
    while len(held) < int(count) and time.monotonic() < until:
        try:
            held.append(connect())
        except OSError:  # refused, or the queue is full
            time.sleep(0.0002)
    sys.stdout.write(f"{len(held)}\n")
    sys.stdout.flush()
    sys.stdin.read()


def over_ipc(path: str) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        return sock

    return connect


def over_tcp(host: str, port: str, *words: str) -> Callable[[], socket.socket]:
    sources = cycle(words[:-2] or [f"127.3.{number >> 8}.{number & 255}" for number in range(1, 1000)])

    def connect() -> socket.socket:
        return socket.create_connection((host, int(port)), 0.1, (next(sources), 0))

    return connect


if __name__ == "__main__":
    main(*sys.argv[1:])
