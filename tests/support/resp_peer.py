"""A peer that is no good Redis: it accepts a login, then answers with given bytes. For tests of a client's checks."""

from __future__ import annotations

import socket

from tests.support.tcp_peer import TcpPeer


class RespPeer(TcpPeer):
    """A peer that sends `script` once per connection, after the first command behind the login; `hangs_up` says whether
    it closes then. Both may be changed at any time."""

    def __init__(self, script: bytes = b"", *, hangs_up: bool = True, login: bytes = b"+OK\r\n") -> None:
        super().__init__()
        self.script = script
        self.hangs_up = hangs_up
        self.login = login
        self.connections = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> RespPeer:
        super().__enter__()
        return self

    def serve(self, sock: socket.socket) -> None:
        self.connections += 1
        answered = False
        with sock:
            sock.settimeout(0.05)
            while not self.stopping:
                try:
                    received = sock.recv(1 << 16)
                    if not received:
                        return
                    if b"SETINFO" in received or b"AUTH" in received:
                        sock.sendall(self.login)
                    elif not answered:
                        answered = True
                        sock.sendall(self.script)
                        if self.hangs_up:
                            sock.shutdown(socket.SHUT_WR)
                except TimeoutError:
                    continue
                except OSError:
                    return
