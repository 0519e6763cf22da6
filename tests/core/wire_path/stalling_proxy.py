"""A TCP proxy that stops a connection in the middle of something big, until it is told to go on."""

from __future__ import annotations

import contextlib
import socket
import threading

_PIECE = 1 << 16
_KERNEL_BUFFER = 1 << 16  # small, so that what stands still is in the sender, not on its way


class StallingProxy:
    """Passes on to `127.0.0.1:target`. A connection on which more than `after` bytes have come in one direction stands
    still in that direction, the others go on; `stalled` is set then, and `release` ends it for good."""

    def __init__(self, target: int, *, after: int = 1 << 62) -> None:
        self.after = after
        self.stalled = threading.Event()
        self._released = threading.Event()
        self._stop = threading.Event()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER)
        self._listener.settimeout(0.05)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._listen)]

    def __enter__(self) -> StallingProxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def release(self) -> None:
        self._released.set()

    def _listen(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                self._start(self._serve, self._listener.accept()[0])

    def _start(self, work: object, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()
        return thread

    def _serve(self, outer: socket.socket) -> None:
        with outer, socket.socket() as inner:
            inner.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER)
            inner.connect(("127.0.0.1", self._target))
            back = threading.Thread(target=self._pump, args=(inner, outer))
            back.start()
            self._pump(outer, inner)
            back.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        count = 0
        source.settimeout(0.05)
        while not self._stop.is_set():
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
