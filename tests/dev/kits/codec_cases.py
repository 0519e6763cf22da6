"""The kit over codecs that are wrong in one way each, a line a bug, and over a right one. Run by pytest outside of the
repository."""
# ruff: noqa: ARG005, E501  the arguments of all bugs are the same, and each is one line

from __future__ import annotations

import ctypes
import struct
import threading
import time
import zlib
from collections.abc import Callable
from functools import reduce
from itertools import cycle
from operator import xor
from typing import Any

import pytest

from kvf_dev.testing import CodecConformance
from kvf_dev.testing.codec import MakeCodec
from kvframework.api.codec import Codec
from kvframework.api.plugin import DTYPE_BYTES

MAGIC = b"KV01"
HEAD = struct.Struct("<4sQI")


class Planted(CodecConformance):
    Bug: type[Codec]

    @pytest.fixture
    def make_codec(self) -> MakeCodec:
        return self.Bug


class TestNoCodec(CodecConformance):
    pass


class Framed(Codec):
    """A correct codec: magic, the object's size, a checksum, and a body. Each of its steps can be replaced."""

    name = "framed"
    head = HEAD
    sum: Callable[..., int] = staticmethod(zlib.crc32)
    body: Callable[..., bytes] = staticmethod(lambda data: zlib.compress(data, 1))
    room: Callable[..., object] = staticmethod(lambda size: None)
    unbody: Callable[..., bytes]

    def encode(self, data: memoryview) -> Any:
        return [memoryview(self.head.pack(MAGIC, data.nbytes, self.sum(data))), memoryview(self.body(data))]

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        if packed.nbytes < self.head.size:
            raise ValueError("no header")
        magic, size, told = self.head.unpack(packed[: self.head.size])
        self.room(size)
        if magic != MAGIC or size != out.nbytes:
            raise ValueError("another object")
        data = self.unbody(packed[self.head.size :], size)
        if len(data) != size or self.sum(data) != told:
            raise ValueError("damaged")
        out[:] = data

    def unbody(self, body: Any, size: int) -> bytes:  # type: ignore[no-redef]
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(body, size + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if not stream.eof or stream.unused_data:
            raise ValueError("no whole stream")
        return data


def bug(**changed: Any) -> type[Codec]:
    return type(
        "Bug", (Framed,), {k: staticmethod(v) if k in ("sum", "body", "room") else v for k, v in changed.items()}
    )


def raw(sum: Callable[..., int], **more: Any) -> type[Codec]:  # noqa: A002
    """Bytes as they are, so that the checksum alone notices damage."""
    return bug(sum=sum, body=bytes, unbody=lambda self, body, size: bytes(body), **more)


def encode(work: Callable[..., Any], **more: Any) -> type[Codec]:
    return bug(encode=lambda self, data: work(self, data, Framed.encode), **more)


def decode(work: Callable[..., Any], **more: Any) -> type[Codec]:
    return bug(decode_into=lambda self, packed, out: work(self, packed, out, Framed.decode_into), **more)


def elements(work: Callable[..., Any]) -> type[Codec]:
    return bug(encode_elements=work)


def kept(self: Any, key: object, work: Callable[[], Any]) -> Any:
    return (
        self.__dict__.setdefault("known", {}).setdefault(key, work())
        if key not in self.__dict__.get("known", {})
        else self.known[key]
    )


def address(view: memoryview) -> int:
    return 0 if view.readonly or not view.nbytes else ctypes.addressof(ctypes.c_char.from_buffer(view))


def turned(view: Any, k: int) -> bytes:
    return bytes(view[:k]) + bytes(view[k:])[::-1]


def arena(view: memoryview) -> memoryview:
    return memoryview(view.obj).cast("B")


def raising(kind: type[Exception]) -> type[Codec]:
    def work(self: Any, packed: memoryview, out: memoryview, right: Any) -> None:
        try:
            right(self, packed, out)
        except ValueError as error:
            raise kind(str(error)) from error

    return decode(work)


def with_last_error(self: Any, packed: memoryview, out: memoryview, right: Any) -> None:
    try:
        right(self, packed, out)
    except ValueError as error:
        self.last = error
        raise


def runs(data: Any) -> bytes:
    """Runs of equal bytes, whose length has one byte."""
    out, data = bytearray(), bytes(data)
    at = 0
    while at < len(data):
        end = at
        while end < len(data) and data[end] == data[at] and end - at < 256:
            end += 1
        out += bytes([(end - at) & 0xFF, data[at]])
        at = end
    return bytes(out)


def unruns(self: Any, body: Any, size: int) -> bytes:
    return b"".join(bytes([body[at + 1]]) * body[at] for at in range(0, len(body) - 1, 2))


def floats(data: Any) -> bytes:
    count = len(data) // 2
    return struct.pack(f"<{count}e", *struct.unpack(f"<{count}e", data[: 2 * count])) + bytes(data[2 * count :])


def words(self: Any, data: memoryview, right: Any) -> Any:
    if data.nbytes % 4:
        raise ValueError("no whole words")
    return right(self, data)


def threaded(self: Any, packed: memoryview, out: memoryview, right: Any) -> None:
    self.size = out.nbytes
    time.sleep(0.0001)  # another thread has its turn: by chance alone it had none in some runs
    data = self.unbody(packed[HEAD.size :], out.nbytes)
    if len(data) != self.size or HEAD.unpack(packed[: HEAD.size]) != (MAGIC, self.size, zlib.crc32(data)):
        raise ValueError("damaged")
    out[:] = data


def for_an_instant(self: Any, packed: memoryview, out: memoryview, right: Any) -> None:
    place = bytearray(out.nbytes)
    right(self, packed, memoryview(place))
    self.data = place
    out[:] = self.data


class InPlace(Framed):
    """Importable, so that another process can make it."""

    def encode(self, data: memoryview) -> Any:
        original = bytes(data)
        if not data.readonly and len(data):
            data[:] = bytes(255 - each for each in original)
            data[:] = original
        return super().encode(data)


def pooled(self: Any, data: memoryview, right: Any) -> Any:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return right(self, data)


def listed(self: Any, data: memoryview, right: Any) -> Any:
    parts = self.__dict__.setdefault("parts", [])
    parts[:] = right(self, data)
    return parts


SUM = zlib.crc32


def plain(pack: Callable[..., bytes], unpack: Callable[..., bytes]) -> type[Codec]:
    """Without magic, size and checksum; another length is refused by the place."""
    return bug(
        encode=lambda self, data: [memoryview(pack(data))],
        decode_into=lambda self, packed, out: out.__setitem__(slice(None), unpack(packed, out.nbytes)),
    )


def loose(self: Any, body: Any, size: int) -> bytes:
    """Takes a stream without its end, and whatever follows it."""
    return zlib.decompressobj().decompress(body, size + 1)


def one_buffer(self: Any, data: memoryview, right: Any) -> Any:
    packed, buffer = b"".join(right(self, data)), self.__dict__.setdefault("buffer", bytearray(8 << 20))
    buffer[: len(packed)] = packed
    return [memoryview(buffer)[: len(packed)]]


def noted(self: Any, data: memoryview, right: Any) -> Any:
    """A dictionary of what it packed itself: of no use to another process."""
    known = self.__dict__.setdefault("known", [])
    known.append(bytes(data))
    return right(self, memoryview(len(known).to_bytes(4, "little")))


def looked_up(self: Any, packed: memoryview, out: memoryview, right: Any) -> None:
    index, known = bytearray(4), self.__dict__.get("known", [])
    right(self, packed, memoryview(index))
    at = int.from_bytes(index, "little") - 1
    if at >= len(known) or len(known[at]) != out.nbytes:
        raise ValueError("not known")
    out[:] = known[at]


class Masked(Framed):
    """By Python's hash of texts, which another process has otherwise. Importable."""

    def masked(self, data: Any) -> bytes:
        mask = hash("right").to_bytes(8, "little", signed=True)
        return bytes(byte ^ part for byte, part in zip(data, cycle(mask)))

    def encode(self, data: memoryview) -> Any:
        return [memoryview(self.masked(b"".join(super().encode(data))))]

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        super().decode_into(memoryview(self.masked(packed)), out)


def shared_scratch(self: Any, packed: memoryview, out: memoryview, right: Any) -> None:
    scratch = bytearray(out.nbytes)
    right(self, packed, memoryview(scratch))
    self.scratch = scratch
    time.sleep(0.001)
    out[:] = bytes(self.scratch[: out.nbytes]).ljust(out.nbytes, b"\0")


def beside(out: memoryview) -> None:
    """As native code would: it writes to where the memory goes on."""
    whole = arena(out)
    if whole.nbytes > out.nbytes + 64:
        whole[out.nbytes + 64] = 0


def added(self: Any, packed: memoryview, out: memoryview, right: Any) -> None:
    data = bytearray(out.nbytes)
    right(self, packed, memoryview(data))
    for index, byte in enumerate(data):
        if byte:
            out[index] = byte


def shuffled(self: Any, data: memoryview, right: Any) -> Any:
    if not data.readonly:
        data[:] = bytes(data)[::-1]
        data = memoryview(bytes(data)[::-1])
    return right(self, data)


def deflated(data: Any) -> bytes:
    return zlib.compress(data, 1)


# fmt: off
BUGS = {
    # what is told of the elements
    "TakesWholeElementsOnly": elements(lambda s, data, dtype: s.encode(data) if data.nbytes % DTYPE_BYTES.get(dtype, 1) == 0 else None),
    "KnowsTodaysDtypesOnly": elements(lambda s, data, dtype: (dtype and DTYPE_BYTES[dtype], s.encode(data))[1]),
    "BelievesTheDtype": elements(lambda s, data, dtype: [*s.encode(data)[:1], memoryview(s.body(floats(data)))] if dtype == "float16" else s.encode(data)),
    # what a checksum does not see
    "SumsTheBeginning": raw(lambda data: SUM(data[: 1 << 16])),
    "SumsTheEnds": raw(lambda data: SUM(data[-1000:], SUM(data[:1000]))),
    "SumsEverySecondByte": raw(lambda data: SUM(bytes(data)[::2])),
    "AddsUp": raw(lambda data: sum(bytes(data)) & 0xFFFF_FFFF),
    "XorsBytes": raw(lambda data: reduce(xor, bytes(data), 0)),
    "SumOf8Bits": raw(lambda data: SUM(data) & 0xFF),
    "NoSum": raw(lambda data: 0),
    "SumsTheLength": raw(lambda data: len(data)),
    "ChecksNoSum": decode(lambda s, p, o, right: o.__setitem__(slice(None), s.unbody(p[16:], o.nbytes)[: o.nbytes]), body=bytes, unbody=lambda s, body, size: bytes(body)),
    # what the packed bytes claim
    "BelievesTheHeader": bug(room=lambda size: bytearray(size)),
    "BelievesTheHeaderUpToALimit": bug(room=lambda size: bytearray(min(size, 1 << 24))),
    "BelievesABigEndianHeader": bug(head=struct.Struct(">4sQI"), room=lambda size: bytearray(size)),
    "ReservesTwentyTimesThePlace": decode(lambda s, p, o, right: (bytearray(20 << 20), right(s, p, o))),
    # damage that is passed over
    "DropsZerosBehind": decode(lambda s, p, o, right: right(s, memoryview(bytes(p).rstrip(b"\0") + b"\0" * 0) if bytes(p[-64:]).rstrip(b"\0") != bytes(p[-64:]) else p, o)),
    "DropsALineEnd": decode(lambda s, p, o, right: right(s, p[:-1] if p.nbytes and p[-1] == 10 else p, o)),
    "SearchesItsMagic": decode(lambda s, p, o, right: right(s, p[max(bytes(p).find(MAGIC), 0) :], o)),
    "IgnoresAShortHeader": decode(lambda s, p, o, right: right(s, p, o) if p.nbytes >= 16 else None),
    "FillsWithZeros": decode(lambda s, p, o, right: right(s, p, o) if p.nbytes >= 16 else o.__setitem__(slice(None), bytes(o.nbytes))),
    "RaisesEofError": raising(EOFError),
    "RaisesStructError": decode(lambda s, p, o, right: (HEAD.unpack(p[:16]), right(s, p, o))),
    "RaisesIndexError": decode(lambda s, p, o, right: (p[15], right(s, p, o))),
    "RaisesRuntimeError": raising(RuntimeError),
    # what an object may be
    "ItsOwnMagicIsPacked": encode(lambda s, data, right: [data] if bytes(data[:4]) == MAGIC else right(s, data)),
    "RunsOf256": bug(body=runs, unbody=unruns),
    "ThroughFloats": bug(body=lambda data: zlib.compress(floats(data), 1)),
    "LosesAnOddByte": bug(body=lambda data: zlib.compress(bytes(data[: len(data) // 2 * 2]) + b"\0" * (len(data) % 2), 1)),
    "LosesAWholeLastBlock": bug(body=lambda data: zlib.compress(bytes(data[: len(data) - 4096 * (not len(data) % 4096)]).ljust(len(data), b"\0"), 1)),
    "LosesTheTailOfWords": bug(body=lambda data: zlib.compress(bytes(data[: len(data) // 8 * 8]).ljust(len(data), b"\0"), 1)),
    "TakesWholeWordsOnly": encode(words),
    "CannotPackNothing": encode(lambda s, data, right: right(s, data) if data.nbytes else [memoryview(b"")[0:1].cast("I")[0]]),
    "LossyFromAMebibyteOn": bug(body=lambda data: zlib.compress(bytes(data) if len(data) < 1 << 20 else bytes(data[:-1]) + b"\0", 1), sum=lambda data: 0),
    # addresses
    "ReadsFromAlignedAddresses": encode(lambda s, data, right: right(s, data if data.readonly or not data.nbytes else arena(data)[(at := (address(data) - address(arena(data))) // 8 * 8) : at + data.nbytes])),
    "TurnsFromAlignedAddressesOn": bug(encode=lambda s, data: [memoryview(HEAD.pack(MAGIC, data.nbytes, SUM(data))), memoryview(turned(data, -address(data) % 4))], decode_into=lambda s, p, o: _unturn(p, o)),
    "WritesWholeWords": decode(lambda s, p, o, right: (right(s, p, o), _pad(o))),
    "ClearsBeforeThePlace": decode(lambda s, p, o, right: (right(s, p, o), _before(o))),
    # what is kept
    "KeepsTheError": decode(with_last_error),
    "KeepsAllPackedBytes": encode(lambda s, data, right: (s.__dict__.setdefault("all", []).append(parts := right(s, data)), parts)[1]),
    "KeepsAThreadForEach": encode(pooled),
    "RemembersByLength": encode(lambda s, data, right: kept(s, data.nbytes, lambda: right(s, data))),
    "RemembersByBothEnds": encode(lambda s, data, right: kept(s, (data.nbytes, bytes(data[:64]), bytes(data[-64:])), lambda: right(s, data))),
    "RemembersByAddress": encode(lambda s, data, right: kept(s, (address(data) or id(data), data.nbytes), lambda: right(s, data))),
    "AnswersTheSameList": encode(listed),
    "KeepsTheBytesForAnInstant": decode(for_an_instant),
    "PacksInPlaceAndRestores": InPlace,
    "KeepsTheSizeInItself": decode(threaded),
    # the form of the answer
    "AnswersBytes": encode(lambda s, data, right: [bytes(part) for part in right(s, data)]),
    "AnswersOneView": encode(lambda s, data, right: memoryview(b"".join(right(s, data)))),
    "AnswersTwoDimensions": encode(lambda s, data, right: [part.cast("B", (1, part.nbytes)) for part in right(s, data)]),
    "AnswersEverySecondByte": encode(lambda s, data, right: [memoryview(bytes(byte for each in right(s, data) for byte in bytes(each) for _ in "ab"))[::2]]),
    "AnswersNone": encode(lambda s, data, right: None),
    "WritesToTheObject": encode(lambda s, data, right: (right(s, data), None if data.readonly or not data.nbytes else data.__setitem__(0, data[0] ^ 1))[0]),
    # what the steps of an author's first codec get wrong
    "ANameThatFitsNowhere": type("Bug", (Framed,), {"name": "a-name-of-17-byte"}),
    "StripsZeros": plain(lambda data: deflated(bytes(data).rstrip(b"\0")), lambda packed, n: zlib.decompress(packed).ljust(n, b"\0")),
    "LosesWhatIsBehind64K": encode(lambda self, data, right: right(self, memoryview(bytes(data[: 1 << 16]) + bytes(max(0, data.nbytes - (1 << 16)))))),
    "AnswersAGenerator": encode(lambda self, data, right: (each for each in right(self, data))),
    "AnswersWords": encode(lambda self, data, right: [piece for each in right(self, data) for piece in (each[: each.nbytes // 4 * 4].cast("I"), each[each.nbytes // 4 * 4 :])]),
    "PacksAllIntoOneBuffer": encode(one_buffer),
    "KeepsADictionary": encode(noted, decode_into=lambda self, packed, out: looked_up(self, packed, out, Framed.decode_into)),
    "PacksByPythonsHash": Masked,
    "SharesAScratchBuffer": decode(shared_scratch),
    "FillsWhatItCan": plain(deflated, lambda packed, n: loose(None, packed, n)[:n].ljust(n, b"\0")),
    "TakesWhatIsCutOff": bug(unbody=loose),
    "TakesWhatComesBehind": bug(unbody=loose),
    "RaisesItsOwnError": plain(deflated, lambda packed, n: zlib.decompress(packed)),
    "BelievesTheBytes": plain(bytes, lambda packed, n: bytes(packed)),
    "UnpacksBombs": plain(deflated, lambda packed, n: zlib.decompress(packed)),
    "WritesBesideThePlace": decode(lambda self, packed, out, right: (right(self, packed, out), beside(out))),
    "AddsToWhatIsInThePlace": decode(added),
    "ShufflesInPlace": encode(shuffled),
    "NeedsWritableMemory": encode(lambda self, data, right: ((ctypes.c_char * data.nbytes).from_buffer(data) if data.nbytes else None, right(self, data))[1]),
    "KeepsTheObject": encode(lambda self, data, right: (setattr(self, "last", data[:]), right(self, data))[1]),
    "KeepsThePlace": decode(lambda self, packed, out, right: (right(self, packed, out), setattr(self, "last", out[:]))),
    "KeepsWhatFailed": decode(lambda self, packed, out, right: (setattr(self, "current", packed[:]), right(self, packed, out), delattr(self, "current"))),
}
# fmt: on


def _unturn(packed: memoryview, out: memoryview) -> None:
    if packed.nbytes < 16 or HEAD.unpack(packed[:16])[:2] != (MAGIC, out.nbytes) or packed.nbytes != 16 + out.nbytes:
        raise ValueError("another object")
    data = turned(packed[16:], -address(out) % 4)
    out[:] = data


def _pad(out: memoryview) -> None:
    whole, at = arena(out), address(out) - address(arena(out)) + out.nbytes
    if 0 < at < len(whole) and at % 8:
        whole[at] = 0


def _before(out: memoryview) -> None:
    whole, at = arena(out), address(out) - address(arena(out))
    if at > 0:
        whole[at - 1] = 0


globals().update({f"Test{name}": type(f"Test{name}", (Planted,), {"Bug": kind}) for name, kind in BUGS.items()})
globals()["TestRightFramedCodec"] = type("TestRightFramedCodec", (Planted,), {"Bug": Framed})
