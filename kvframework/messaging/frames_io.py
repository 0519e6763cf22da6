"""Input and output of messages at a ZMQ socket, by the thread that owns it: never blocking; small frames are copied,
big buffers are not. And the one socket that several threads of a client use."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.backend import Socket as BareSocket

from kvframework.api.plugin import Buffer
from kvframework.errors import InvalidPayload, MessageTooLarge
from kvframework.messaging.polling import Wakeup
from kvframework.wire.frames import MAX_BUFFER_BYTES, MAX_BUFFERS, MAX_PAYLOAD_BYTES

ZERO_COPY_BYTES = 64 << 10
HIGH_WATER_MARK = 1000
_KEEPALIVE_S = 30
UNREAD_S = 60  # bound on the time for which a peer over TCP may leave sent bytes unread
_HANDSHAKE_MS = 3000  # connections that do not speak ZMTP are dropped after it
HEAD_FRAMES = 3  # request id, type, payload

# Plain ints: pyzmq's flag enums cost more than the call.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
# `Socket.send` calls this method, and costs three times as much.
_send = BareSocket.send

Socket = zmq.Socket[bytes]


def bound(socket: Socket) -> None:
    """Set the bounds of every socket: queue lengths, and the size of one frame before memory is allocated for it."""
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BUFFER_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def over_tcp(socket: Socket, host: str) -> None:
    """Set the further options of a socket over TCP: the kernel ends peers that have vanished, or receive nothing."""
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_MAXRT, UNREAD_S * 1000)


def outgoing(frames: Sequence[Buffer]) -> list[Any]:
    """Return the frames of one message (without a routing id), ready to send: big buffers are wrapped without a copy,
    and stay unchanged until they are sent. Raises `MessageTooLarge` for a message that the peer would refuse,
    `InvalidPayload` for a buffer that is not contiguous. Any thread."""
    if len(frames[2]) > MAX_PAYLOAD_BYTES:
        raise MessageTooLarge(f"the payload has {len(frames[2])} bytes", available=f"at most {MAX_PAYLOAD_BYTES} bytes")
    ready: list[Any] = list(frames[:HEAD_FRAMES])
    size = 0
    for buffer in frames[HEAD_FRAMES:]:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise InvalidPayload(f"buffer {len(ready) - HEAD_FRAMES} of the request is not contiguous memory")
        size += view.nbytes
        ready.append(bytes(view) if view.nbytes < ZERO_COPY_BYTES else zmq.Frame(buffer, copy=False))
    if len(ready) > HEAD_FRAMES + MAX_BUFFERS or size > MAX_BUFFER_BYTES:
        raise MessageTooLarge(
            f"{len(ready) - HEAD_FRAMES} buffers have {size} bytes",
            available=f"at most {MAX_BUFFERS}, of {MAX_BUFFER_BYTES} bytes together",
        )
    return ready


def send(socket: Socket, frames: Sequence[Any]) -> None:
    """Hand a message to ZMQ. Raises `zmq.Again` if the peer's queue is full and, on a ROUTER, `zmq.ZMQError` with
    EHOSTUNREACH if the peer has left. Only the first frame can be refused: then no part of the message was sent."""
    for frame in frames[:-1]:
        _send(socket, frame, _MORE)
    _send(socket, frames[-1], _NOBLOCK)


def receive(socket: Socket, head: int) -> list[Buffer] | None:
    """Return the next message, None if there is none: the first `head` frames copied, the others borrowed from ZMQ. Of
    one with more frames than the protocol allows only the first ones are kept (enough to be refused)."""
    try:
        frame = socket.recv(_NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames: list[Buffer] = [frame.bytes]
    limit = head + MAX_BUFFERS + 1
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) < head:
            frames.append(frame.bytes)
        elif len(frames) < limit:
            frames.append(frame.buffer)
    return frames


def readable(socket: Socket) -> bool:
    """Return whether a message can be received: at half the cost of trying in vain."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def milliseconds(until: float) -> int:
    """Return the milliseconds from now to `until`, rounded up, for a poll; `math.inf` means no limit."""
    return -1 if until == math.inf else max(0, math.ceil((until - time.monotonic()) * 1000))


class SharedDealer:
    """A DEALER that several threads use, which owns its socket. Each thread sends for itself, and one at a time, the
    leader, waits for messages: a wake-up by another thread costs as much as the round trip to the server.

    ZMQ's sockets are not thread-safe, so a lock guards every use, and the leader waits on the socket's descriptor. It
    is edge-triggered, and a send may consume the notice of a message that has come in: then the leader is interrupted.
    """

    def __init__(self, dealer: Socket) -> None:
        self._dealer = dealer
        self._fd = int(dealer.getsockopt(zmq.FD))
        self._lock = threading.Lock()
        self._leading = threading.RLock()  # reentrant, since it knows its owner, see `follow`
        self._leader: int | None = None
        self._interrupt = Wakeup()
        self.interrupt = self._interrupt.signal  # makes the leader, if there is one, check again
        self._closed = False

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message. Never blocks. Raises `zmq.Again` if the queue is full, another `zmq.ZMQError` once closed."""
        with self._lock:
            if self._closed:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            send(self._dealer, frames)
            taken = self._leader is not None and readable(self._dealer)
        if taken:
            self.interrupt()

    def receive(self, most: int) -> list[list[Buffer]]:
        """Return the messages that have arrived, at most `most`. Never blocks. A thread that is not the leader, which
        would still wait for them, interrupts afterwards."""
        messages: list[list[Buffer]] = []
        with self._lock:
            while not self._closed and len(messages) < most:
                frames = receive(self._dealer, HEAD_FRAMES)
                if frames is None:
                    break
                messages.append(frames)
                if not readable(self._dealer):
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
            here = readable(self._dealer)
        ready = {fd for fd, _ in poller.poll(0 if here else milliseconds(until))}
        if self._interrupt.fd in ready:
            self._interrupt.drain()
        return ready

    def watch(self, poller: zmq.Poller) -> zmq.Poller:
        poller.register(self._fd, zmq.POLLIN)
        poller.register(self._interrupt.fd, zmq.POLLIN)
        return poller

    def close(self) -> None:
        """Close the socket; nothing is received afterwards. Interrupts the leader and waits for it: not for it."""
        with self._lock:
            self._closed = True
        self.interrupt()
        with self._leading:
            self._dealer.close(0)
            self._interrupt.close()
