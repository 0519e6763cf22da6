"""The framing of messages: request id, request type, one msgpack payload, then raw buffers. Pure, no sockets.

Frames of a request (after ZMQ's routing id): an 8-byte little-endian request id chosen by the client, the request's
name in ASCII, the msgpack map of its payload struct, and zero or more raw buffers. A response repeats the request id;
its type frame is the request's name, or `ERROR` with an `ErrorPayload`. A request of `ONE_WAY_REQUESTS` with the id
`NO_ANSWER` gets none, not even an error, to a server of 0.3 or later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from kvframework.api.plugin import Buffer, Message
from kvframework.errors import InvalidPayload, KVFrameworkError, MalformedFrames, MessageTooLarge

REQUEST_ID_BYTES = 8
NO_ANSWER = (1 << 64) - 1
MAX_TYPE_BYTES = 64
MAX_PAYLOAD_BYTES = 16 << 20
MAX_BUFFER_BYTES = 256 << 20  # all buffers of a message together
MAX_BUFFERS = 4096
MAX_ERROR_TEXT = 2000  # of each part: a peer's text ends in logs
ERROR_TYPE = "ERROR"

M = TypeVar("M", bound=Message)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Message]] = {}


class Envelope(NamedTuple):
    """One message, split into its frames; the payload is not yet decoded. Frames are borrowed, not copied."""

    request_id: int
    type: str
    payload: Buffer
    buffers: Sequence[memoryview]


class ErrorPayload(Message, frozen=True):
    """A typed error on the wire: the stable code and the text's parts, see `kvframework.errors`."""

    code: str
    fact: str
    where: str = ""
    available: str = ""
    hint: str = ""


def join(request_id: int, type_name: str, payload: Message, buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of one message, without the routing id. Buffers are passed through, never copied."""
    return [request_id.to_bytes(8, "little"), type_name.encode("ascii"), _encoder.encode(payload), *buffers]


def split(frames: Sequence[Buffer]) -> Envelope:
    """Split a message, without the routing id, into its parts. Raises `MalformedFrames` for a wrong number, size or
    order of frames and `MessageTooLarge` beyond the bounds."""
    if len(frames) < 3:
        raise MalformedFrames(f"found {len(frames)} frames", available="request id, type, payload, then buffers")
    if len(frames) - 3 > MAX_BUFFERS:
        raise MessageTooLarge(f"the message has {len(frames) - 3} buffer frames", available=f"at most {MAX_BUFFERS}")
    if len(frames[0]) != REQUEST_ID_BYTES:
        raise MalformedFrames(f"the request id frame has {len(frames[0])} bytes", available=f"{REQUEST_ID_BYTES}")
    if not 1 <= len(frames[1]) <= MAX_TYPE_BYTES:
        raise MalformedFrames(f"the type frame has {len(frames[1])} bytes", available=f"1 to {MAX_TYPE_BYTES}")
    if len(frames[2]) > MAX_PAYLOAD_BYTES:
        raise MessageTooLarge(f"the payload frame has {len(frames[2])} bytes", available=f"at most {MAX_PAYLOAD_BYTES}")
    try:
        type_name = bytes(frames[1]).decode("ascii")
    except UnicodeDecodeError:
        raise MalformedFrames("the type frame is not ASCII") from None
    if len(frames) == 3:
        return Envelope(int.from_bytes(frames[0], "little"), type_name, frames[2], ())
    buffers = [memoryview(frame).cast("B") for frame in frames[3:]]
    if sum(buffer.nbytes for buffer in buffers) > MAX_BUFFER_BYTES:
        raise MessageTooLarge(f"{len(buffers)} buffers are too large together", available=f"{MAX_BUFFER_BYTES} bytes")
    return Envelope(int.from_bytes(frames[0], "little"), type_name, frames[2], buffers)


def decode(payload: Buffer, struct: type[M], *, where: str) -> M:
    """Decode a payload frame. Raises `InvalidPayload` naming the field."""
    decoder = _decoders.get(struct)
    if decoder is None:
        decoder = _decoders.setdefault(struct, msgspec.msgpack.Decoder(struct))
    try:
        return decoder.decode(payload)  # type: ignore[return-value]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidPayload(str(error), where=where, hint=f"see {struct.__name__} in kvframework.wire") from None


def error_payload(error: BaseException) -> ErrorPayload:
    """The error as a peer receives it; of an unexpected one only its class, since its text may hold anything."""
    if isinstance(error, KVFrameworkError):
        return ErrorPayload(error.code, *_shortened(error.fact, error.where, error.available, error.hint))
    return ErrorPayload("run.handler", f"{type(error).__name__} in the handler", hint="see the server's log")


def error_from(payload: ErrorPayload) -> KVFrameworkError:
    texts = _shortened(payload.code, payload.fact, payload.where, payload.available, payload.hint)
    code, fact, where, available, hint = texts
    return KVFrameworkError.from_code(code, fact, where=where, available=available, hint=hint)


def _shortened(*texts: str) -> list[str]:
    return [text if len(text) <= MAX_ERROR_TEXT else f"{text[:MAX_ERROR_TEXT]} ..." for text in texts]
