"""TLS in front of a plain TCP port, for tests; the certificate is made on demand."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from pathlib import Path

from tests.support.certificates import make_certificate
from tests.support.tcp_peer import TcpPeer


class TlsProxy(TcpPeer):
    """A relay to `127.0.0.1:target`. A client must trust `certificate`."""

    def __init__(self, directory: Path, target: int, *, names: str = "DNS:localhost") -> None:
        super().__init__()
        self.certificate, key = make_certificate(directory, names)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._target = target

    def __enter__(self) -> TlsProxy:
        super().__enter__()
        return self

    def serve(self, sock: socket.socket) -> None:
        # One thread serves both directions: a TLS socket must not be read and written by two at once.
        with sock, socket.create_connection(("127.0.0.1", self._target)) as inner, contextlib.suppress(OSError):
            for each in (sock, inner):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(5.0)
            with self._context.wrap_socket(sock, server_side=True) as outer:
                other: dict[socket.socket, socket.socket] = {outer: inner, inner: outer}
                while not self.stopping:
                    ready = [outer] if outer.pending() else select.select([outer, inner], [], [], 0.05)[0]
                    for source in ready:
                        received = source.recv(1 << 18)
                        if not received:
                            return
                        other[source].sendall(received)
