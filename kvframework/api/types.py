"""Owns the small value types that hooks, configuration and wire share: sizes, element types, buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from kvframework.errors import BadDtype

Buffer = bytes | bytearray | memoryview

# One list of block ids per layer group, in the order of the layout's groups.
BlockIds = Sequence[Sequence[int]]

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def dtype_bytes(name: str) -> int:
    """Bytes of one element of the dtype `name` (torch's names without the `torch.` prefix). Raises `BadDtype`."""
    try:
        return DTYPE_BYTES[name]
    except KeyError:
        raise BadDtype(
            f"there is no dtype {name!r}", available=", ".join(DTYPE_BYTES), hint="give torch's name without 'torch.'"
        ) from None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of everything that travels: msgpack maps that evolve by adding defaulted fields, never by retyping."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a plugin's own options: what its TOML table may hold besides the core's keys."""


class NoOptions(Options, frozen=True):
    """A plugin without options."""


class ByteSize(int):
    """A number of bytes; in TOML an integer or a string such as "512MiB", "1.5 GiB" or "10GB"."""

    _UNITS = {"": 1, "b": 1} | {
        f"{p}{u}": b**e for e, p in enumerate("kmgt", start=1) for u, b in (("", 1024), ("ib", 1024), ("b", 1000))
    }

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Raises `ValueError` with what was expected."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
            if match and match[2].lower() in cls._UNITS:
                return cls(int(float(match[1]) * cls._UNITS[match[2].lower()]))
        raise ValueError(f'expected a size such as 1073741824, "512MiB" or "1GB", found {value!r}')

    def __str__(self) -> str:
        size = float(self)
        for unit in ("B", "KiB", "MiB", "GiB"):
            if size < 1024:
                return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
            size /= 1024
        return f"{size:.1f} TiB"
