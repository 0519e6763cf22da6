"""A peer that is no good Redis: it logs a client in, then answers with given bytes. For tests of a client's doubt."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class RespPeer:
    """Listens on 127.0.0.1. Every connection gets `script` once, after its first command that is none of the login's;
    `hangs_up` says whether the peer closes then. Change both at any time."""

    def __init__(self, script: bytes = b"", *, hangs_up: bool = True, login: bytes = b"+OK\r\n") -> None:
        self.script = script
        self.hangs_up = hangs_up
        self.login = login
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._listen)]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> RespPeer:
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
                sock, _ = self._listener.accept()
                self.connections += 1
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket) -> None:
        answered = False
        with sock:
            sock.settimeout(0.05)
            while not self._stop.is_set():
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
