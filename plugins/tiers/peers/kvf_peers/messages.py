"""The protocol between two nodes: what is said, and its form on a connection. Pure.

A message is a u32 length, little-endian, and msgpack. The holder greets with a nonce, the reader proves that it knows
the token, the holder does too; then the reader asks and gets, one request after the other. The answer to `Get` is, for
each key, `VALUE_HEAD` and the value.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvframework.api.keys import PACKED_KEY_BYTES, PackedKey

VERSION = 1
NONCE_BYTES = 32
BOOT_BYTES = 16
# Longest messages: of strangers, of those who have proved themselves.
STRANGER_BYTES = 1 << 10
MOST_BYTES = 1 << 19
# Keys of one `Ask`, and of one `Get`.
ASK_KEYS = 4096
GET_KEYS = 256
# Longest answer to an `Ask`.
ANSWER_BYTES = ASK_KEYS + 64
# Models, and namespaces of each, that a node tells.
MOST_MODELS = 64
MOST_NAMESPACES = 32

LENGTH = struct.Struct("<I")
# Letters of what a stranger said that are shown.
MOST_REASON = 128
# Status, and the bytes that follow.
VALUE_HEAD = struct.Struct("<BQ")
VALUE, MISSING, BUSY, TOO_LONG = range(4)

_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof = Annotated[bytes, Meta(min_length=32, max_length=32)]
M = TypeVar("M")


class ProtocolError(Exception):
    """The other side does not speak this protocol, or a later one."""


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """The holder's first word."""

    version: int
    nonce: _Nonce


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The reader's answer."""

    version: int
    nonce: _Nonce
    proof: _Proof


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The holder's proof, and who it is; see `NodeIdentity` and `Node.models`."""

    proof: _Proof
    boot_id: Annotated[bytes, Meta(min_length=BOOT_BYTES, max_length=BOOT_BYTES)]
    chunk_size: int
    hasher: Annotated[str, Meta(max_length=256)]
    models: Annotated[dict[str, Annotated[list[bytes], Meta(max_length=MOST_NAMESPACES)]], Meta(max_length=MOST_MODELS)]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The holder's last word."""

    reason: Annotated[str, Meta(max_length=256)]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Which of `keys`, one after the other, does L1 have?"""

    keys: bytes


class Found(msgspec.Struct, frozen=True, tag="found"):
    """A byte for each key, 1 or 0."""

    here: bytes


class Get(msgspec.Struct, frozen=True, tag="get"):
    """The values of `keys`, none longer than its room, within `left_ms`."""

    keys: bytes
    rooms: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=GET_KEYS)]
    left_ms: Annotated[int, Meta(ge=1, le=600_000)]


FromStranger = Hello
FromHolder = Welcome | Refused
FromReader = Ask | Get
# Made once, here: two threads that first decode a type at the same moment crash in msgspec.
_DECODERS: dict[object, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (Greeting, Hello, Welcome, Refused, Ask, Found, Get, FromHolder, FromReader)
}


def encoded(message: msgspec.Struct) -> bytes:
    """The message with its length. Raises `ProtocolError` for one that is too long."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MOST_BYTES:
        raise ProtocolError(f"the message has {len(body)} bytes")
    return LENGTH.pack(len(body)) + body


def decoded(body: bytes, kind: type[M]) -> M:
    """Raise `ProtocolError`."""
    try:
        decoder: msgspec.msgpack.Decoder[M] = _DECODERS[kind]
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the message has an unexpected form: {error}") from None


def joined_keys(keys: Sequence[PackedKey]) -> bytes:
    return b"".join(keys)


def split_keys(keys: bytes, most: int) -> list[PackedKey]:
    """Raise `ProtocolError` for a part of a key, and for more than `most`."""
    count, rest = divmod(len(keys), PACKED_KEY_BYTES)
    if rest or count > most:
        raise ProtocolError(f"{len(keys)} bytes are not 0 to {most} whole keys")
    return [keys[at : at + PACKED_KEY_BYTES] for at in range(0, len(keys), PACKED_KEY_BYTES)]


def proof(token: bytes, side: bytes, holder_nonce: bytes, reader_nonce: bytes) -> bytes:
    """What only one who knows the token can say; `side` is b"reader" or b"holder"."""
    said = b"kvf-peers/1 " + side + holder_nonce + reader_nonce
    return hmac.new(token, said, hashlib.sha256).digest()
