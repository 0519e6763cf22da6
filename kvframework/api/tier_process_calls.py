"""The calls between a tier and its helper process, as bytes on a Unix socket: a length, and a message.

Values are in the memory that both share (`tier_process_memory.py`), in the order of the call's keys. Deadlines are
absolute, on `time.monotonic()`; None is none. All functions raise `TimeoutError`, another `OSError`, or `EOFError`.
"""

from __future__ import annotations

import socket
import struct
import time

import msgspec

from kvframework.by_name import NamedCall

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, array_like=True):
    """The first message to a process: what makes its tier, and the table in the TOML."""

    make: NamedCall
    where: str


class Call(msgspec.Struct, array_like=True):
    """One call of a tier's method. `sizes`: the bytes of each value of a `put`, the room for each of a `get_into`."""

    name: str
    keys: list[bytes] = []
    sizes: list[int] = []
    deadline: float = 0.0


class Answer(msgspec.Struct, array_like=True):
    """The result of a call: `outcomes` by value of `Outcome`; `refusal` is fact, available and hint of a `TierError`,
    `bug` the text of any other exception."""

    outcomes: list[int | str] = []
    usage: tuple[int, int] = (0, 0)
    entries: list[tuple[bytes, int, float | None]] = []
    refusal: tuple[str, str, str] | None = None
    bug: str = ""


_encoder = msgspec.msgpack.Encoder()
_starts = msgspec.msgpack.Decoder(Start)
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def write_start(sock: socket.socket, start: Start, deadline: float) -> None:
    """Sends the first message."""
    _write(sock, start, deadline)


def read_start(sock: socket.socket) -> Start:
    """Returns the first message, and reads no byte behind it."""
    return _starts.decode(_read(sock, None))


def write_call(sock: socket.socket, call: Call, deadline: float) -> None:
    """Sends a call."""
    _write(sock, call, deadline)


def read_call(sock: socket.socket) -> Call:
    """Returns the next call."""
    return _calls.decode(_read(sock, None))


def write_answer(sock: socket.socket, answer: Answer) -> None:
    """Sends an answer."""
    _write(sock, answer, None)


def read_answer(sock: socket.socket, deadline: float) -> Answer:
    """Returns the answer."""
    return _answers.decode(_read(sock, deadline))


def _read(sock: socket.socket, deadline: float | None) -> bytearray:
    head = _receive(sock, _LENGTH.size, deadline)
    return _receive(sock, _LENGTH.unpack(head)[0], deadline)


def _receive(sock: socket.socket, nbytes: int, deadline: float | None) -> bytearray:
    body, at = bytearray(nbytes), 0
    with memoryview(body) as view:
        while at < nbytes:
            _arm(sock, deadline)
            received = sock.recv_into(view[at:])
            if not received:
                raise EOFError
            at += received
    return body


def _write(sock: socket.socket, message: Start | Call | Answer, deadline: float | None) -> None:
    body = _encoder.encode(message)
    left = memoryview(_LENGTH.pack(len(body)) + body)
    while left:
        _arm(sock, deadline)
        left = left[sock.send(left) :]


def _arm(sock: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    sock.settimeout(left)
