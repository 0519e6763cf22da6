"""A connection that ends before HELLO is answered, as that of a process that is being killed."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from kvframework.errors import ServerGone
from kvframework.messaging.client.connection import dial, make_context
from kvframework.wire.messages import Hello


@pytest.mark.timeout(120)
def test_a_server_that_hangs_up_is_not_waited_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def hang_up() -> None:
            for _ in range(2):  # the probe, and ZMQ's own
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1)

        ending = threading.Thread(target=hang_up)
        ending.start()
        context = make_context()
        try:
            with pytest.raises(ServerGone, match="no answer to HELLO"):
                dial(context, f"ipc://{path}", Hello("test", 1), timeout=3600.0, closing=lambda: False)
        finally:
            context.destroy(0)
        ending.join()
