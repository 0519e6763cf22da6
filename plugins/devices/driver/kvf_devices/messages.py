"""The messages between server and copier: msgspec structs, each behind its length on one Unix socket.

The server speaks first (`Start`). Block ids travel as packed native u32 and ranges as packed native u64, since both
sides are one machine and one version.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Iterator

import msgspec

from kvframework.api.layout import KVLayout, MemoryLayoutDesc
from kvframework.api.process import NamedCall
from kvframework.api.transport import ArenaRange, CopyJob, GroupBlocks
from kvframework.errors import KVFrameworkError

FRAME_HEAD = struct.Struct("=I")  # the length of the payload
MAX_FRAME = 1 << 30
# Drivers may block other calls of the copier while one slice of the arena is pinned.
SLICE_BYTES = 4 << 30


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """`create` makes the driver of `device`. `log` is the server's level and form; None: it did not choose one. The
    arena is pinned by slices of `slice_bytes`."""

    create: NamedCall
    device: str
    log: tuple[str, str] | None = None
    slice_bytes: int = 0


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A `KVFrameworkError` on its way to the server, with all of its parts."""

    code: str
    fact: str
    where: str = ""
    available: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: KVFrameworkError) -> Failure:
        return cls(error.code, error.fact, error.where, error.available, error.hint)

    def error(self) -> KVFrameworkError:
        parts = {"where": self.where, "available": self.available, "hint": self.hint}
        return KVFrameworkError.from_code(self.code, self.fact, **parts)


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Opens an instance's memory. With `alive`, a descriptor follows that the copier keeps until the instance is
    closed."""

    context: int
    layout: KVLayout
    desc: MemoryLayoutDesc
    handles: tuple[bytes, ...]
    alive: bool = False


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    context: int


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    job: int
    context: int
    is_store: bool
    ranges: bytes
    block_ids: tuple[bytes, ...]
    per_object: tuple[int, ...]
    event: bytes
    skip_tokens: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    job: int


ToCopier = Start | Open | Close | Copy | Cancel


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The device is open. Sent once."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The answer to `Open`; without a failure the memory is open."""

    context: int
    failure: Failure | None = None


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The answer to `Close`: none of the instance's memory is mapped or touched any more."""

    context: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The end of a copy, which no longer touches any memory. `ok` False without a failure: it was cancelled."""

    job: int
    ok: bool
    failure: Failure | None = None


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The sign of life while copies are under way; `oldest_s` is the age of the oldest launch."""

    oldest_s: float


class Lacks(msgspec.Struct, frozen=True, array_like=True, tag="lacks"):
    """All that the driver does without so far, see `CopierDriver.lacks`."""

    what: tuple[str, ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """The last message of a copier that cannot continue."""

    failure: Failure


FromCopier = Ready | Opened | Closed | Done | Beat | Lacks | Lost

to_copier: Callable[[bytes], ToCopier] = msgspec.msgpack.Decoder(ToCopier).decode
from_copier: Callable[[bytes], FromCopier] = msgspec.msgpack.Decoder(FromCopier).decode
_encoder = msgspec.msgpack.Encoder()


def framed(message: ToCopier | FromCopier) -> bytes:
    payload = _encoder.encode(message)
    return FRAME_HEAD.pack(len(payload)) + payload


class Frames:
    """Cuts the received bytes into payloads."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that are whole. Raises `ValueError` for an impossible length."""
        self._data += data
        while len(self._data) >= FRAME_HEAD.size:
            (length,) = FRAME_HEAD.unpack_from(self._data)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            end = FRAME_HEAD.size + length
            if len(self._data) < end:
                return
            payload = bytes(self._data[FRAME_HEAD.size : end])
            del self._data[:end]
            yield payload


def copy_message(number: int, context: int, job: CopyJob) -> Copy:
    ranges = array.array(
        "Q", [value for place in job.ranges for value in (place.chunk, place.group, place.offset, place.length)]
    )
    return Copy(
        number,
        context,
        job.is_store,
        ranges.tobytes(),
        tuple(array.array("I", each.ids).tobytes() for each in job.blocks),
        tuple(each.per_object for each in job.blocks),
        job.event,
        job.skip_tokens,
    )


def ranges_of(copy: Copy) -> list[ArenaRange]:
    values = iter(array.array("Q", copy.ranges))
    return [ArenaRange(*each) for each in zip(values, values, values, values, strict=True)]


def blocks_of(copy: Copy) -> list[GroupBlocks]:
    return [
        GroupBlocks(array.array("I", ids).tolist(), count, 0, -1)
        for ids, count in zip(copy.block_ids, copy.per_object, strict=True)
    ]
