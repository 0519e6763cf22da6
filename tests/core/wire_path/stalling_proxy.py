"""A TCP proxy that stops a connection in the middle of something big, until it is told to go on."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.support.tcp_peer import TcpPeer

_PIECE = 1 << 16
_KERNEL_BUFFER = 1 << 16  # small, so that what stands still is in the sender, not on its way


class StallingProxy(TcpPeer):
    """Passes on to `127.0.0.1:target`. A connection on which more than `after` bytes have come in one direction stands
    still in that direction, the others go on; `stalled` is set then, and `release` ends it for good."""

    def __init__(self, target: int, *, after: int = 1 << 62) -> None:
        super().__init__()
        self.after = after
        self.stalled = threading.Event()
        self._released = threading.Event()
        self._target = target
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER)
        self.endpoint = f"tcp://127.0.0.1:{self.port}"

    def release(self) -> None:
        self._released.set()

    def serve(self, sock: socket.socket) -> None:
        with sock as outer, socket.socket() as inner:
            inner.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER)
            inner.connect(("127.0.0.1", self._target))
            back = threading.Thread(target=self._pump, args=(inner, outer))
            back.start()
            self._pump(outer, inner)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        count = 0
        source.settimeout(0.05)
        while not self.stopping:
            if count > self.after and not self._released.is_set():
                self.stalled.set()
                self._released.wait(0.05)
                continue
            try:
                piece = source.recv(_PIECE)
                count += len(piece)
                sink.sendall(piece)
            except TimeoutError:
                continue
            except OSError:
                break
            if not piece:
                break
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
