"""A TCP port without a listener. Another process may take it between the answer and its use."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Below the ports that the kernel gives to connections: an engine listens minutes later."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
