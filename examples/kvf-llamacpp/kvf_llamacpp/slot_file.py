"""The file that llama.cpp's server writes for a slot: its tokens, and the cells of the sequence. Pure, engine side.

As of version 4 of the form; all numbers are little-endian:

    u32 magic "qsgg", u32 version, u32 n, then n numbers of 32 bits: -1, 1, tokens, the tokens, 0
    u32 streams; for each one u32 cells, and where there are any:
      for each cell i32 position, u32 1, i32 sequence
      u32 v_trans, u32 layers, u64 0
      for each layer i32 type, u64 bytes of a row, the rows of its keys [cell][n_embd_k_gqa]
      for each layer the same of its values; with v_trans i32 type, u32 bytes of an element, u32 n_embd_v_gqa,
      then [n_embd_v_gqa][cell]

Whatever differs is refused: a state of a hybrid model or of a window has other parts, and wrong bytes are worse than
none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvframework.errors import BadLayout

MAGIC, VERSION = b"qsgg", 4
# ggml's numbers of the element types that are single numbers.
TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}

# Keys and values of one layer, each [cells, elements].
Planes = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SlotForm:
    """What is equal in all files of one slot of one server: streams and the slot's own one, sequence, memory."""

    streams: int
    stream: int
    sequence: int
    v_trans: bool
    types: tuple[tuple[int, int], ...]
    hidden: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SlotFile:
    """`layers` borrow the bytes that were parsed."""

    form: SlotForm
    tokens: list[int]
    layers: list[Planes] = field(repr=False)


def parsed(data: bytearray) -> SlotFile:
    """Return the file's parts. Raises `BadLayout` for any other form than the one above."""
    reader = _Reader(data)
    reader.expect("magic and version", MAGIC + struct.pack("<I", VERSION))
    (count,) = reader.numbers("I")
    reader.expect("the head of the tokens", struct.pack("<2i", -1, 1))
    (tokens,) = reader.numbers("I")
    if count != tokens + 4:
        raise _other(f"{count} numbers for {tokens} tokens")
    ids = list(reader.numbers(f"{tokens}i"))
    reader.expect("the end of the tokens", bytes(4))
    (streams,) = reader.numbers("I")
    stream = cells = 0
    while not cells and stream < min(streams, 1 << 10):
        (cells,) = reader.numbers("I")
        stream += not cells
    places = reader.numbers(f"{3 * cells}i")
    if cells != tokens or list(places[::3]) != list(range(cells)) or set(places[1::3]) != {1}:
        raise _other(f"{cells} cells for {tokens} tokens, not one after the other")
    v_trans, layers, zero = reader.numbers("IIQ")
    if v_trans not in (0, 1) or not 1 <= layers <= 1 << 12 or zero:
        raise _other(f"v_trans {v_trans}, {layers} layers, {zero}")
    keys = [reader.plane(cells, transposed=False) for _ in range(layers)]
    values = [reader.plane(cells, transposed=bool(v_trans)) for _ in range(layers)]
    reader.expect("the end", bytes(4 * (streams - stream - 1)))
    if reader.rest:
        raise _other(f"{reader.rest} bytes behind the last layer")
    pairs = list(zip(keys, values, strict=True))
    form = SlotForm(
        streams,
        stream,
        places[2],
        bool(v_trans),
        tuple((key.number, value.number) for key, value in pairs),
        tuple((key.tensor.shape[1], value.tensor.shape[1]) for key, value in pairs),
    )
    return SlotFile(form, ids, [(key.tensor, value.tensor) for key, value in pairs])


def built(form: SlotForm, tokens: Sequence[int], layers: Sequence[Planes]) -> bytes:
    """Return the file of a slot that holds these tokens. `layers` hold at least as many cells."""
    cells = len(tokens)
    parts = [
        MAGIC,
        struct.pack("<II", VERSION, cells + 4),
        struct.pack(f"<iiI{cells}ii", -1, 1, cells, *tokens, 0),
        struct.pack(f"<I{form.stream}x{3 * form.stream}xI", form.streams, cells),
        b"".join(struct.pack("<iIi", at, 1, form.sequence) for at in range(cells)),
        struct.pack("<IIQ", form.v_trans, len(layers), 0),
    ]
    for plane in (0, 1):
        for layer, numbers in zip(layers, form.types, strict=True):
            tensor, transposed = layer[plane][:cells], form.v_trans and plane == 1
            size, hidden = tensor.element_size(), tensor.shape[1]
            parts.append(
                struct.pack("<iII", numbers[plane], size, hidden)
                if transposed
                else struct.pack("<iQ", numbers[plane], size * hidden)
            )
            elements = (tensor.transpose(0, 1) if transposed else tensor).contiguous()
            parts.append(elements.view(torch.uint8).numpy().tobytes())
    parts.append(bytes(4 * (form.streams - form.stream - 1)))
    return b"".join(parts)


@dataclass(frozen=True)
class _Plane:
    number: int
    tensor: torch.Tensor


class _Reader:
    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._at = 0

    @property
    def rest(self) -> int:
        return len(self._data) - self._at

    def numbers(self, form: str) -> tuple[int, ...]:
        size = struct.calcsize("<" + form)
        if size > self.rest:
            raise _other(f"it ends after {len(self._data)} bytes")
        found = struct.unpack_from("<" + form, self._data, self._at)
        self._at += size
        return found

    def expect(self, what: str, value: bytes) -> None:
        found = bytes(self._data[self._at : self._at + len(value)])
        if found != value:
            raise _other(f"{what} {found.hex()}, not {value.hex()}")
        self._at += len(value)

    def plane(self, cells: int, *, transposed: bool) -> _Plane:
        number, first, *more = self.numbers("iII" if transposed else "iQ")
        dtype = TYPES.get(number)
        if dtype is None:
            raise _other(f"elements of ggml type {number}, which are quantised or unknown")
        size = first * more[0] if transposed else first
        hidden, odd = divmod(size, dtype.itemsize)
        if odd or not 1 <= hidden <= 1 << 20 or (transposed and first != dtype.itemsize) or cells * size > self.rest:
            raise _other(f"rows of {size} bytes of {dtype}")
        tensor = torch.frombuffer(self._data, dtype=dtype, count=cells * hidden, offset=self._at)
        self._at += cells * size
        return _Plane(number, tensor.view(hidden, cells).transpose(0, 1) if transposed else tensor.view(cells, hidden))


def _other(what: str) -> BadLayout:
    return BadLayout(
        f"the slot's file has {what}",
        available=f"version {VERSION}, one sequence of full attention, f16, bf16 or f32",
        hint="hybrid models, windows, quantised caches and other releases of llama.cpp are left alone",
    )
