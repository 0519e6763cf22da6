"""Token ids as packed 32-bit integers: by the token kernel (`native/token_ids.c`), an optional part of the build, and
by `array.fromlist`, which takes five times as long. Both give the same integers and errors. For any thread.
"""

from __future__ import annotations

import array
import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

_LIBRARY = Path(__file__).with_name("native") / "libkvf_token_ids.so"
_ABI = 1
# Below this, the call costs more than it saves.
_FEW = 512

# (a list, room for as many integers) -> how many of its first items were packed: the rest it cannot judge.
_Pack = Callable[[list[int], "array.array[int]"], int]


def packed_behind(rest: array.array[int], token_ids: Sequence[int]) -> array.array[int]:
    """Return `rest`, an array of u32, with the ids behind it, as a new array. Raises `OverflowError` for an id that is
    no u32, `TypeError` for what is no integer."""
    if type(token_ids) is list and len(token_ids) >= _FEW and (pack := _kernel()) is not None:
        room = array.array("I", [0]) * len(token_ids)
        if pack(token_ids, room) == len(room) == len(token_ids):
            return rest + room if rest else room
    tokens = rest[:]
    # Lists are packed three times as fast as other sequences.
    tokens.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
    return tokens


class _Form(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_void_p),
        ("ignored", ctypes.c_uint64),
        ("one_digit", ctypes.c_uint64),
        ("zero", ctypes.c_uint64),
    )


@functools.cache
def _kernel() -> _Pack | None:
    """Return the kernel, None where it was not built, or the form of this interpreter's integers is not known."""
    if not _known_interpreter():
        return None
    try:
        # With the GIL: the list must not change meanwhile.
        library = ctypes.PyDLL(str(_LIBRARY))
    except OSError as error:
        log.debug("no token kernel: %s", error)
        return None
    found = int(library.kvf_token_ids_abi())
    if found != _ABI:
        log.warning("%s is of version %d, not %d: build it again; Python packs instead", _LIBRARY, found, _ABI)
        return None
    pack = _pack_by(library)
    if not _is_right(pack):
        log.warning("%s does not read this interpreter's integers; Python packs instead", _LIBRARY)
        return None
    return pack


def _known_interpreter() -> bool:
    """Return whether its integers have their count of digits at byte 16 and digits of 30 bits from byte 24 on, and its
    lists the address of their items there."""
    return (
        sys.implementation.name == "cpython"
        and (3, 10) <= sys.version_info < (3, 15)
        and sys.maxsize > 1 << 32
        and sys.byteorder == "little"
        and (sys.int_info.bits_per_digit, sys.int_info.sizeof_digit) == (30, 4)
        # Debug builds and those without a GIL have larger objects.
        and object.__basicsize__ == 16
    )


def _pack_by(library: ctypes.PyDLL) -> _Pack:
    call = library.kvf_token_ids_pack
    call.argtypes = (ctypes.py_object, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)
    call.restype = ctypes.c_uint64
    # Since Python 3.14 the small ones that it keeps have a bit more.
    zero, small, large = (_tag(number) for number in (0, 5, 1000))
    ignored = small ^ large
    form = _Form(id(int), ignored, large & ~ignored, zero & ~ignored)

    address = ctypes.addressof(form)

    def pack(token_ids: list[int], room: array.array[int], _held: _Form = form) -> int:
        return int(call(token_ids, len(room), room.buffer_info()[0], address))

    return pack


def _tag(number: int) -> int:
    return ctypes.c_uint64.from_address(id(number) + object.__basicsize__).value


def _is_right(pack: _Pack) -> bool:
    """Return whether the kernel reads what it should, and refuses the rest."""
    good = [0, 1, 5, 256, 257, 1000, 128_000, (1 << 30) - 1]
    room = array.array("I", [7]) * len(good)
    if pack(good, room) != len(good) or room.tolist() != good:
        return False
    others: list[object] = [-1, -5, -1000, 1 << 30, 1 << 32, -(1 << 40), 1 << 90, True, False, 1.0, "1", None]
    return not any(pack([other], room) for other in others)  # type: ignore[list-item]
