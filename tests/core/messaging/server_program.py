"""A server process for the tests: serves the lab's handlers at the endpoint given until SIGTERM."""

from __future__ import annotations

import os
import signal
import sys

from tests.core.messaging.lab import Work, make_server


def main(endpoint: str) -> None:
    work = Work(os.urandom(8))
    work.ticks = 1
    work.gate.set()
    server = make_server(endpoint, work)
    signal.signal(signal.SIGTERM, lambda *_: server.stop(0.5))
    server.bind()
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
