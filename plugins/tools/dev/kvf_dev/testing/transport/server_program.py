"""A server process of the transport kit: RIG ENDPOINT. Serves until its standard input ends."""

from __future__ import annotations

import sys
import threading

from kvf_dev.testing.transport.engine import registry_for
from kvf_dev.testing.transport.node import rig_told, settings_for
from kvframework.config import load_config
from kvframework.server import Server


def main() -> None:
    rig = rig_told(sys.argv[1])
    server = Server(load_config(None, tuple(settings_for(rig, sys.argv[2]))), registry_for(rig))
    server.bind()

    def stop_with_input() -> None:
        sys.stdin.read()
        server.stop()

    threading.Thread(target=stop_with_input, daemon=True).start()
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    server.serve_forever()
    rig.close()


if __name__ == "__main__":
    main()
