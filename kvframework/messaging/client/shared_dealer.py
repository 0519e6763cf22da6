"""A DEALER that several threads use: each sends for itself, and one of them at a time waits for incoming messages.

A thread that waits for an answer receives it by itself, unless another thread already waits: a wake-up by another
thread costs as much as the round trip to the server. ZMQ's sockets are not thread-safe, so a lock guards every use, and
threads wait on the socket's descriptor. It is edge-triggered, and a send may consume the notice of a message that has
come in: then the waiting thread is interrupted here.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from kvframework.api.types import Buffer
from kvframework.messaging import frames_io
from kvframework.messaging.polling import Wakeup


class SharedDealer:
    """A shared DEALER, which owns its socket and closes it. Thread-safe. The leader is the one thread that waits for
    messages."""

    def __init__(self, dealer: frames_io.Socket) -> None:
        self._dealer = dealer
        self._fd = int(dealer.getsockopt(zmq.FD))
        self._lock = threading.Lock()
        self._leading = threading.RLock()  # reentrant, since it knows its owner, see `follow`
        self._leader: int | None = None
        self._interrupt = Wakeup()
        self._closed = False

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message. Never blocks. Raises `zmq.Again` if the queue is full, and another `zmq.ZMQError` once it is
        closed."""
        with self._lock:
            if self._closed:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            frames_io.send(self._dealer, frames)
            taken = self._leader is not None and frames_io.readable(self._dealer)
        if taken:
            self.interrupt()

    def receive(self, most: int) -> list[list[Buffer]]:
        """Return the messages that have arrived, at most `most`. Never blocks. A thread that is not the leader
        interrupts afterwards, because the leader would still wait for the messages taken from it."""
        messages: list[list[Buffer]] = []
        with self._lock:
            while not self._closed and len(messages) < most:
                frames = frames_io.receive(self._dealer, frames_io.HEAD_FRAMES)
                if frames is None:
                    break
                messages.append(frames)
                if not frames_io.readable(self._dealer):
                    break
        return messages

    def lead(self) -> bool:
        """Make the caller the leader, unless there is one. Never blocks."""
        caller = threading.get_ident()
        if self._leader == caller or not self._leading.acquire(blocking=False):
            return False
        self._leader = caller
        return True

    def follow(self) -> None:
        """End being the leader. No effect in another thread: a signal may have interrupted `lead` anywhere."""
        if self._leader == threading.get_ident():
            self._leader = None
        with contextlib.suppress(RuntimeError):
            self._leading.release()

    def wait(self, until: float, poller: zmq.Poller) -> set[int]:
        """Block the leader until a message has arrived, another descriptor of `poller` is ready, an interrupt, or
        `until` (of the monotonic clock). `poller` must have passed through `watch`; returns its ready descriptors."""
        with self._lock:
            if self._closed:
                return set()
            here = frames_io.readable(self._dealer)
        ready = {fd for fd, _ in poller.poll(0 if here else milliseconds(until))}
        if self._interrupt.fd in ready:
            self._interrupt.drain()
        return ready

    def watch(self, poller: zmq.Poller) -> zmq.Poller:
        """Register messages and interrupts with a poller."""
        poller.register(self._fd, zmq.POLLIN)
        poller.register(self._interrupt.fd, zmq.POLLIN)
        return poller

    def interrupt(self) -> None:
        """Make the leader, if there is one, check again."""
        self._interrupt.signal()

    def close(self) -> None:
        """Close the socket; nothing is received afterwards. Interrupts the leader and waits for it: must not be called
        by it."""
        with self._lock:
            self._closed = True
        self.interrupt()
        with self._leading:
            self._dealer.close(0)
            self._interrupt.close()


def milliseconds(until: float) -> int:
    """Return the milliseconds from now to `until`, rounded up, for a poll; `math.inf` means no limit."""
    return -1 if until == math.inf else max(0, math.ceil((until - time.monotonic()) * 1000))
