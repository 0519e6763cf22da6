"""Owns a DEALER that several threads use: they send as they come, and one of them at a time waits for what comes in.

A thread that waits for an answer receives it by itself, where nobody else does: to be woken by another thread costs as
much as the way to the server. ZMQ's sockets know nothing of threads, so a lock guards every use, and waiting is on the
socket's descriptor. That one tells of changes only, and a send may take the notice of a message that has come in: then
whoever waits is told here.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from kvframework.api import Buffer
from kvframework.messaging import frames_io
from kvframework.messaging.wakeup import Wakeup

_POLLIN = int(zmq.POLLIN)


class SharedDealer:
    """Owns the socket and closes it. Thread-safe. The leader is the one thread that waits for messages."""

    def __init__(self, dealer: frames_io.Socket) -> None:
        self._dealer = dealer
        self._fd = int(dealer.getsockopt(zmq.FD))
        self._lock = threading.Lock()
        self._leading = threading.RLock()  # for what it knows of its owner, see `follow`
        self._leader: int | None = None
        self._interrupt = Wakeup()
        self._closed = False

    def send(self, frames: Sequence[Any]) -> None:
        """Never blocks. Raises `zmq.Again` if the queue is full, and another `zmq.ZMQError` once it is closed."""
        with self._lock:
            if self._closed:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            frames_io.send(self._dealer, frames)
            taken = self._leader is not None and self._readable()
        if taken:
            self.interrupt()

    def receive(self, most: int) -> list[list[Buffer]]:
        """The messages that are here, at most so many. Never blocks. Whoever is not the leader interrupts afterwards:
        the leader would wait on for what was taken from it."""
        messages: list[list[Buffer]] = []
        with self._lock:
            while not self._closed and len(messages) < most:
                frames = frames_io.receive(self._dealer, frames_io.HEAD_FRAMES)
                if frames is None:
                    break
                messages.append(frames)
        return messages

    def lead(self) -> bool:
        """Makes the caller the leader, unless there is one. Never blocks."""
        caller = threading.get_ident()
        if self._leader == caller or not self._leading.acquire(blocking=False):
            return False
        self._leader = caller
        return True

    def follow(self) -> None:
        """Ends being the leader. Does nothing for who is not: a signal may have ended `lead` anywhere."""
        if self._leader == threading.get_ident():
            self._leader = None
        with contextlib.suppress(RuntimeError):
            self._leading.release()

    def wait(self, until: float, poller: zmq.Poller) -> set[int]:
        """Blocks the leader until a message is here, another descriptor of `poller` is ready, somebody interrupts, or
        `until` (of the monotonic clock). `poller` is one that went through `watch`; the descriptors of it that are
        ready."""
        with self._lock:
            if self._closed:
                return set()
            here = self._readable()
        ready = {fd for fd, _ in poller.poll(0 if here else milliseconds(until))}
        if self._interrupt.fd in ready:
            self._interrupt.drain()
        return ready

    def watch(self, poller: zmq.Poller) -> zmq.Poller:
        """Lets a poller notice messages and interrupts, too."""
        poller.register(self._fd, zmq.POLLIN)
        poller.register(self._interrupt.fd, zmq.POLLIN)
        return poller

    def interrupt(self) -> None:
        """The leader, if there is one, looks again at what it waits for."""
        self._interrupt.signal()

    def close(self) -> None:
        """Nothing is received after it. Interrupts the leader and waits for it: not to be called by it."""
        with self._lock:
            self._closed = True
        self.interrupt()
        with self._leading:
            self._dealer.close(0)
            self._interrupt.close()

    def _readable(self) -> bool:
        return bool(int(self._dealer.getsockopt(zmq.EVENTS)) & _POLLIN)


def milliseconds(until: float) -> int:
    """From now to `until`, rounded up, for a poll; `math.inf` is without end."""
    return -1 if until == math.inf else max(0, math.ceil((until - time.monotonic()) * 1000))
