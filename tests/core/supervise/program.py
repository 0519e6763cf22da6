"""A process that says when it is ready, and that hangs where it is told to."""

from __future__ import annotations

import os
import signal
import socket
import time

from kvframework.api.process import end_with_parent

FOR_EVER_S = 600.0


def main(arguments: list[str]) -> int:
    """Run until the socket, whose number is the argument, ends. The first byte received says how."""
    end_with_parent()
    sock = socket.socket(fileno=int(arguments[0]))
    kind = sock.recv(1)
    if kind == b"h":  # hangs at its start
        time.sleep(FOR_EVER_S)
    if kind == b"s":  # does not stop
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock.send(b"r")
    while word := sock.recv(1):
        if word == b"l":  # says a last word, and ends
            sock.send(b"l")
            os._exit(3)
        if word == b"c":  # closes the socket, and goes on
            sock.close()
            time.sleep(FOR_EVER_S)
    if kind == b"s":
        time.sleep(FOR_EVER_S)
    return 0
