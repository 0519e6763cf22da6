"""A TCP listener for tests: a thread serves each connection, and all threads end with the block."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from typing import TypeVar

T = TypeVar("T", bound="TcpPeer")


class TcpPeer(ABC):
    """Listens on `port` of 127.0.0.1 within its `with` block."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._listen)]

    @abstractmethod
    def serve(self, sock: socket.socket) -> None:
        """Serve one connection; ends soon after `stopping`."""

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def __enter__(self: T) -> T:
        self._threads[0].start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while not self.stopping:
            with contextlib.suppress(TimeoutError):
                thread = threading.Thread(target=self.serve, args=(self._listener.accept()[0],))
                self._threads.append(thread)
                thread.start()
