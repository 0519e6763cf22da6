"""TLS in front of a plain TCP port, for tests; the certificate is made for the occasion."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from types import TracebackType


class TlsProxy:
    """Listens on localhost and passes on to `127.0.0.1:target`. `certificate` is what a client must trust."""

    def __init__(self, directory: Path, target: int) -> None:
        self.certificate, key = directory / "cert.pem", directory / "key.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-nodes", "-days", "2"]
        command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        command += ["-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(command, check=True, capture_output=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._listen)]

    def __enter__(self) -> TlsProxy:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                thread = threading.Thread(target=self._serve, args=(self._listener.accept()[0],))
                self._threads.append(thread)
                thread.start()

    def _serve(self, plain: socket.socket) -> None:
        # One thread turns both ways: a TLS socket must not be read and written by two at once.
        with plain, socket.create_connection(("127.0.0.1", self._target)) as inner, contextlib.suppress(OSError):
            plain.settimeout(5.0)
            with self._context.wrap_socket(plain, server_side=True) as outer:
                other: dict[socket.socket, socket.socket] = {outer: inner, inner: outer}
                while not self._stop.is_set():
                    ready = [outer] if outer.pending() else select.select([outer, inner], [], [], 0.05)[0]
                    for source in ready:
                        received = source.recv(1 << 18)
                        if not received:
                            return
                        other[source].sendall(received)
