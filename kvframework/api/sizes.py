"""Sizes: a number of bytes as text, such as "8.0 GiB", and back; the bytes of one element of a dtype. Pure.

`kvframework.api.plugin` has what plugins use of it.
"""

from __future__ import annotations

import re

from kvframework.errors import BadDtype


class ByteSize(int):
    """A number of bytes; in TOML an integer or a string such as "512MiB", "1.5 GiB" or "10GB"."""

    _UNITS = {"": 1, "b": 1} | {
        f"{p}{u}": b**e for e, p in enumerate("kmgt", start=1) for u, b in (("", 1024), ("ib", 1024), ("b", 1000))
    }

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Parse a size. Raises `ValueError` with the expected form."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([a-zA-Z]*)\s*", value)
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


# Bytes of one element, by torch's name without the `torch.` prefix.
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
    """Return the bytes of one element of a dtype. Raises `BadDtype`."""
    try:
        return DTYPE_BYTES[name]
    except KeyError:
        raise BadDtype(
            f"there is no dtype {name!r}", available=", ".join(DTYPE_BYTES), hint="give torch's name without 'torch.'"
        ) from None
