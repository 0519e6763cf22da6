"""The calls between a tier and its helper process, as bytes on a Unix socket: a length, a message, and values.

The values of a `put` follow its call, one behind the other; those of a `get_into` follow its answer. Deadlines are
absolute, on `time.monotonic()`; None is none. All functions raise `TimeoutError`, another `OSError`, or `EOFError`.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

import msgspec

from kvframework.api.types import Buffer
from kvframework.by_name import NamedCall

_LENGTH = struct.Struct("<I")
_IOV_MAX = 1024


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
    _write(sock, start, (), deadline)


def read_start(sock: socket.socket) -> Start:
    """Returns the first message, and reads no byte behind it."""
    return _starts.decode(_read(sock, None))


def write_call(
    sock: socket.socket, call: Call, values: Sequence[Sequence[memoryview]], deadline: float | None = None
) -> None:
    """Sends a call and the parts of its values, which are borrowed until it returns."""
    _write(sock, call, [part for parts in values for part in parts], deadline)


def read_call(sock: socket.socket) -> Call:
    """Returns the next call; its values are not read yet."""
    return _calls.decode(_read(sock, None))


def write_answer(sock: socket.socket, answer: Answer, values: Sequence[memoryview]) -> None:
    """Sends an answer and the received values."""
    _write(sock, answer, values, None)


def read_answer(sock: socket.socket, deadline: float) -> Answer:
    """Returns the answer; its values are not read yet."""
    return _answers.decode(_read(sock, deadline))


def receive_into(sock: socket.socket, parts: Sequence[memoryview], nbytes: int, deadline: float | None = None) -> None:
    """Receives one value into the beginning of its parts. Raises `ConnectionError` for a value that does not fit."""
    if nbytes > sum(part.nbytes for part in parts):
        raise ConnectionError(f"a value of {nbytes} bytes does not fit")
    for part in parts:
        end = min(part.nbytes, nbytes)
        nbytes -= end
        at = 0
        while at < end:
            _arm(sock, deadline)
            received = sock.recv_into(part[at:end])
            if not received:
                raise EOFError
            at += received


def _read(sock: socket.socket, deadline: float | None) -> bytearray:
    head = bytearray(_LENGTH.size)
    receive_into(sock, [memoryview(head)], len(head), deadline)
    body = bytearray(_LENGTH.unpack(head)[0])
    receive_into(sock, [memoryview(body)], len(body), deadline)
    return body


def _write(
    sock: socket.socket, message: Start | Call | Answer, values: Sequence[Buffer], deadline: float | None
) -> None:
    body = _encoder.encode(message)
    views = [memoryview(_LENGTH.pack(len(body)) + body), *(memoryview(each) for each in values if len(each))]
    first = 0
    while first < len(views):
        _arm(sock, deadline)
        sent = sock.sendmsg(views[first : first + _IOV_MAX])
        while first < len(views) and sent >= views[first].nbytes:
            sent -= views[first].nbytes
            first += 1
        if sent:
            views[first] = views[first][sent:]


def _arm(sock: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    sock.settimeout(left)
